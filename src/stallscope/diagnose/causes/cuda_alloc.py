"""The rank allocates or frees GPU or pinned memory in the loop."""

from dataclasses import replace

from stallscope.diagnose.causes._registry import Cause, Excess, slow_calls
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category, Op


def _evidence(excess: Excess) -> CauseEvidence:
    evidence = slow_calls(excess.made(Op.ALLOC, Op.FREE), excess)
    extra = round(excess.n_allocs)
    return replace(evidence, n_extra_calls=extra) if extra > 0 else evidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Do not call empty_cache() in the loop: the allocator must then request its memory from the driver again. "
        "Nearly full memory causes retries.",
        "Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or a smaller batch on that rank.",
    ]


CAUSE = Cause(
    name="cuda_alloc",
    title="allocated or freed GPU memory",
    state="allocating or freeing GPU memory",
    noun="GPU memory allocation",
    categories=(Category.ALLOC,),
    evidence=_evidence,
    advice=_advice,
)
