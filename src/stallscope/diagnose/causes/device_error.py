"""A kernel of the rank failed: an assert, an illegal address or instruction. Later calls return the same error."""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Run that rank again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel.",
        "A faulty GPU can also cause an illegal address: if the error recurs on the same host, test that GPU.",
    ]


CAUSE = Cause(
    name="device_error",
    title="ran a kernel that failed on the GPU",
    categories=(),
    advice=_advice,
)
