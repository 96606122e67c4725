"""The process was stopped: a signal, a debugger, or its cgroup frozen."""

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Evidence, Excess, intervals
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    return intervals(excess.off(Category.STOPPED)) | on_host.stopped_by(excess)


def _because(evidence: Evidence) -> str:
    senders = evidence.get("stopped_by")
    return f"stopped by a signal from {senders[0]}" if isinstance(senders, list) and senders else ""


def _advice(evidence: Evidence) -> list[str]:
    if evidence.get("stopped_by"):
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
    noun="stopped (SIGSTOP, a debugger or a frozen cgroup)",
    categories=(Category.STOPPED,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
