"""The process was stopped: a signal, a debugger, or its cgroup frozen."""

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    return merged(intervals(excess.off(Category.STOPPED)), on_host.stopped_by(excess))


def _because(evidence: CauseEvidence) -> str:
    senders = evidence.stopped_by
    return f"stopped by a signal from {senders[0]}" if senders else ""


def _advice(evidence: CauseEvidence) -> list[str]:
    if evidence.stopped_by:
        return [
            "Find out why that process stops the rank: a scheduler that suspends jobs, a script, a terminal."
        ]
    return [
        "Find out what stops the rank: an attached debugger or profiler, a job scheduler, a frozen cgroup.",
    ]


CAUSE = Cause(
    name="process_stopped",
    title="was stopped (SIGSTOP, a debugger or a frozen cgroup)",
    state="stopped (SIGSTOP, a debugger or a frozen cgroup)",
    noun="stopped process (SIGSTOP, a debugger or a frozen cgroup)",
    categories=(Category.STOPPED,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
