"""A kernel of the rank failed: an assert, an illegal address or instruction. Later calls return the same error."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Run that rank again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel.",
        "A faulty GPU can also cause an illegal address: if the error recurs on the same host, test that GPU.",
    ]


CAUSE = Cause(
    name="device_error",
    title="ran a kernel that failed on the GPU",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
