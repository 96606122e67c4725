"""The rank is blocked in the GPU driver outside the traced calls."""

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    return merged(intervals(excess.off(Category.DRIVER)), on_host.driver(excess))


def _because(evidence: CauseEvidence) -> str:
    ioctls = evidence.ioctls
    return f"blocked in the GPU driver ({ioctls[0]})" if ioctls else ""


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Look for registration, mapping or unmapping of memory in the loop, and for nvidia-smi or monitoring polls.",
    ]


CAUSE = Cause(
    name="driver",
    title="was blocked in the GPU driver (ioctl)",
    state="blocked in the GPU driver (ioctl)",
    noun="GPU driver (ioctl)",
    categories=(Category.DRIVER,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
