"""The rank is blocked in the GPU driver outside the traced calls."""

from stallscope.diagnose.causes.registry import Cause, Evidence, Excess, intervals
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    return intervals(excess.off(Category.DRIVER))


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Look for registration, mapping or unmapping of memory in the loop, and for nvidia-smi or monitoring polls.",
    ]


CAUSE = Cause(
    name="driver",
    title="was blocked in the GPU driver (ioctl)",
    categories=(Category.DRIVER,),
    evidence=_evidence,
    advice=_advice,
)
