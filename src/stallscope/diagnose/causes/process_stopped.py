"""The process was stopped: a signal, a debugger, or its cgroup frozen."""

from stallscope.diagnose.causes.registry import Cause, Evidence, Excess, intervals
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    return intervals(excess.off(Category.STOPPED))


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Find who stops it: a debugger or profiler attached, a job scheduler that suspends, a frozen cgroup.",
    ]


CAUSE = Cause(
    name="process_stopped",
    title="was stopped (SIGSTOP, a debugger or a frozen cgroup)",
    categories=(Category.STOPPED,),
    evidence=_evidence,
    advice=_advice,
)
