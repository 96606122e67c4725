"""The rank waits for a child process, mostly a data loader worker."""

from stallscope.diagnose.causes.registry import Cause, Evidence, Excess, intervals
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    return intervals(excess.off(Category.CHILD))


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Raise num_workers and prefetch_factor, or make the input cheaper; keep workers alive between epochs.",
        "Check that the workers have CPUs: their threads and the rank's share one cpuset.",
    ]


CAUSE = Cause(
    name="input_starvation",
    title="waited for its data loader (a child process)",
    categories=(Category.CHILD,),
    evidence=_evidence,
    advice=_advice,
)
