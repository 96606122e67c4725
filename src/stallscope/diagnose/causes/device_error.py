"""The rank's own kernel failed: an assert, an illegal address or instruction. Later calls only repeat it."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Run that rank again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel.",
        "An illegal address can also come from a broken GPU: if it stays with the host, test that GPU.",
    ]


CAUSE = Cause(
    name="device_error",
    title="ran a kernel that failed on the GPU",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
