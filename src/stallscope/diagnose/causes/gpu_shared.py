"""The rank's GPU slows down irregularly, as if another process shared it."""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "List the processes on that GPU (nvidia-smi, or fuser /dev/nvidiaN) and end the processes of other jobs.",
        "If the rank has the GPU to itself, check the throttle reasons: nvidia-smi -q -d PERFORMANCE.",
    ]


CAUSE = Cause(
    name="gpu_shared",
    title="has a GPU of irregular speed, as if another process shared it",
    state="on a GPU of irregular speed, as if another process shared it",
    noun="GPU of irregular speed",
    categories=(),
    advice=_advice,
)
