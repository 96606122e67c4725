"""The rank waits for memory: page faults, reclaim, compaction."""

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    return merged(intervals(excess.off(Category.FAULT)), on_host.memory(excess))


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Check the memory pressure of the host and of the rank's cgroup (memory.pressure), and swap.",
        "Touch or lock buffers before the loop; check transparent huge page compaction.",
    ]


CAUSE = Cause(
    name="page_fault",
    title="waited for memory (page faults, reclaim)",
    state="waiting for memory (page faults, reclaim)",
    noun="memory (page faults, reclaim)",
    categories=(Category.FAULT,),
    evidence=_evidence,
    advice=_advice,
)
