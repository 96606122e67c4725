"""Another process uses the rank's GPU: it works in turns, by varying amounts."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    return [
        "List the processes on that GPU (nvidia-smi, or fuser /dev/nvidiaN) and end the foreign one.",
        "If it is alone there, look at throttle reasons: nvidia-smi -q -d PERFORMANCE.",
    ]


CAUSE = Cause(
    name="gpu_shared",
    title="has a GPU that works by turns, as when another process shares it",
    state="with a GPU that works by turns, as when another process shares it",
    noun="GPU that works by turns",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
