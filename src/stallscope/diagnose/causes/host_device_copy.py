"""The rank waits for copies between host and GPU."""

from dataclasses import replace

from stallscope.diagnose.causes._registry import Cause, Excess, slow_calls
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category, Op


def _evidence(excess: Excess) -> CauseEvidence:
    evidence = slow_calls(excess.made(Op.COPY), excess)
    extra = round(excess.n_copies)
    return replace(evidence, n_extra_calls=extra) if extra > 0 else evidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Pin the host memory and copy with non_blocking=True; pageable copies block the caller.",
        "Check the PCIe link of that GPU (nvidia-smi -q, PCIe generation and width under load).",
    ]


CAUSE = Cause(
    name="host_device_copy",
    title="copied between host and GPU",
    state="copying between host and GPU",
    noun="copies between host and GPU",
    categories=(Category.COPY,),
    evidence=_evidence,
    advice=_advice,
)
