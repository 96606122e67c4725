"""The rank's GPU, its memory or one of its links is broken: the CUDA calls say so."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Look for Xid errors on that host (dmesg, nvidia-smi -q -d ECC); drain it and test the GPU (dcgmi diag -r 3).",
        "Its peers only wait for it: do not replace theirs.",
    ]


CAUSE = Cause(
    name="gpu_fault",
    title="its GPU or a link of it failed",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
