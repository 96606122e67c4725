"""CUDA calls report an error of the rank's GPU, of its memory or of one of its links."""

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
