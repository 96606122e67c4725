"""The rank waits for its own GPU longer than its peers wait for their GPUs, with the same work."""

from stallscope.diagnose.causes._registry import Cause, Excess, slow_calls
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category, Op


def _evidence(excess: Excess) -> CauseEvidence:
    return slow_calls(excess.made(Op.SYNC), excess)


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Compare clocks and throttle reasons with a healthy GPU: nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE.",
        "Check that no other process uses that GPU (nvidia-smi), and check its PCIe and NVLink state.",
    ]


CAUSE = Cause(
    name="gpu_slow",
    title="waited for its own GPU, which is slower than its peers'",
    state="waiting for its own GPU, which is slower than its peers'",
    noun="slow GPU (slower than its peers)",
    categories=(Category.DEVICE,),
    evidence=_evidence,
    advice=_advice,
)
