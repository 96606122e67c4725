"""The rank spends the time in launches: many small kernels."""

from stallscope.diagnose.causes._registry import Cause, Excess
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    extra = round(excess.n_launches)
    return CauseEvidence(n_extra_launches=extra) if extra > 0 else CauseEvidence()


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Launch fewer, larger kernels: CUDA graphs, fused optimisers, torch.compile.",
    ]


CAUSE = Cause(
    name="launch_bound",
    title="spent the time launching kernels",
    state="launching kernels",
    noun="kernel launches",
    categories=(Category.LAUNCH,),
    evidence=_evidence,
    advice=_advice,
)
