"""The rank waits for a disk or a file system."""

from stallscope.diagnose.causes.registry import Cause, Evidence, Excess, intervals
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    return intervals(excess.off(Category.IO))


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Move that read or write off the step: prefetch, stage on local NVMe, or checkpoint asynchronously.",
        "Compare the disk's latency on this host with another (iostat -x 1).",
    ]


CAUSE = Cause(
    name="block_io",
    title="waited for disk or file I/O",
    categories=(Category.IO,),
    evidence=_evidence,
    advice=_advice,
)
