"""The rank's GPU has too little free memory for an allocation."""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Compare its peak with the other ranks' (torch.cuda.memory_summary); reduce the batch size or shard more.",
        "Much reserved but unallocated memory means fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ]


CAUSE = Cause(
    name="out_of_memory",
    title="ran out of GPU memory",
    categories=(),
    advice=_advice,
)
