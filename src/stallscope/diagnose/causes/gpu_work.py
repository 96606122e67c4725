"""The rank waits for additional work on its GPU, such as an evaluation. A slow GPU makes no additional calls."""

from dataclasses import replace

from stallscope.diagnose.causes._registry import Cause, Excess, slow_calls
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category, Op

_MORE_IN_STEPS = 0.5  # additional calls for each late step


def has_more_calls(excess: Excess) -> bool:
    """Whether the rank synchronised more often than its peers in most of its late steps."""
    return excess.n_syncs >= _MORE_IN_STEPS * max(excess.n_steps, 1)


def _claims_ns(excess: Excess) -> float:
    return excess.ns(Category.DEVICE) if has_more_calls(excess) else 0.0


def _evidence(excess: Excess) -> CauseEvidence:
    return replace(slow_calls(excess.made(Op.SYNC), excess), n_extra_syncs=round(excess.n_syncs))


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Divide the additional work (evaluation, logging, sampling) among all ranks, or do it in fewer steps.",
    ]


CAUSE = Cause(
    name="gpu_work",
    title="ran additional work on its GPU and waited for it",
    categories=(Category.DEVICE,),
    evidence=_evidence,
    advice=_advice,
    claims_ns=_claims_ns,
)
