"""The rank's GPU, its memory or one of its links is broken, as CUDA calls report."""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Look for Xid errors on that host (dmesg, nvidia-smi -q -d ECC); drain it and test the GPU (dcgmi diag -r 3).",
        "Do not replace the GPUs of its peers: they only wait for this rank.",
    ]


CAUSE = Cause(
    name="gpu_fault",
    title="has a faulty GPU or GPU link",
    categories=(),
    advice=_advice,
)
