"""The rank computes on the CPU: no CUDA call, no system call."""

from stallscope.diagnose.causes._registry import Cause, Excess
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    extra = round(excess.n_launches)
    return CauseEvidence(n_launches=extra) if extra > 0 else CauseEvidence()


def _advice(evidence: CauseEvidence) -> list[str]:
    if evidence.n_launches:
        return [
            "This rank makes more launches than its peers: compare its shapes and code paths with another rank."
        ]
    return [
        "Profile that rank's host code: garbage collection, data preparation, logging or a compiler on one rank only.",
        "If it is the garbage collector: call gc.freeze() after start-up, or collect on all ranks in the same step.",
    ]


CAUSE = Cause(
    name="host_compute",
    title="computed on the CPU",
    state="computing on the CPU",
    noun="computation on the CPU",
    categories=(Category.ON_CPU,),
    evidence=_evidence,
    advice=_advice,
)
