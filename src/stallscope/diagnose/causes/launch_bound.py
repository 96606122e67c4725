"""The rank spends the time in launches: many small kernels."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    extra = round(excess.n_launches)
    return {"n_extra_launches": extra} if extra > 0 else {}


def _advice(evidence: Evidence) -> list[str]:
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
