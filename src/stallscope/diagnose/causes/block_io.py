"""The rank waits for a disk or a file system."""

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    return merged(intervals(excess.off(Category.IO)), on_host.disks(excess))


def _because(evidence: CauseEvidence) -> str:
    if not evidence.devices:
        return ""
    about = f", file {evidence.files[0]}" if evidence.files else ""
    return f"waiting for disk or file I/O ({evidence.devices[0]}{about})"


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Move that read or write out of the step: prefetch, stage on local NVMe, or checkpoint asynchronously.",
        "Compare the disk's latency with another host (iostat -x 1).",
    ]


CAUSE = Cause(
    name="block_io",
    title="waited for disk or file I/O",
    state="waiting for disk or file I/O",
    noun="disk or file I/O",
    categories=(Category.IO,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
