"""The rank synchronises with its GPU far more often than its peers."""

from stallscope.diagnose.causes._registry import Cause, Excess
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category

_MANY_PER_STEP = 20
_AT_MOST_NS = 1_000_000  # a call that waits longer than this waits for GPU work and is not superfluous


def _claims_ns(excess: Excess) -> float:
    """All host time around the extra calls, if they are many and short: each costs a launch, a copy and a wait."""
    if excess.n_syncs < _MANY_PER_STEP * max(excess.n_steps, 1):
        return 0.0
    around = excess.ns(Category.DEVICE, Category.COPY, Category.ON_CPU)
    return around if around <= _AT_MOST_NS * excess.n_syncs else 0.0


def _evidence(excess: Excess) -> CauseEvidence:
    return CauseEvidence(
        n_extra_syncs=round(excess.n_syncs),
        n_extra_syncs_per_step=round(excess.n_syncs / max(excess.n_steps, 1)),
    )


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Look for .item(), .cpu(), print(tensor), torch.cuda.synchronize() in the step; keep values on the GPU.",
    ]


CAUSE = Cause(
    name="excessive_sync",
    title="synchronised with its GPU many times",
    state="synchronising with its GPU many times",
    noun="synchronise calls",
    categories=(
        Category.DEVICE,
        Category.COPY,
        Category.ON_CPU,
    ),
    evidence=_evidence,
    advice=_advice,
    claims_ns=_claims_ns,
)
