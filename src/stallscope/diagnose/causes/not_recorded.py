"""The rank spent time that the source does not record: no CPU work, no call, no switch off the CPU."""

from stallscope.diagnose.causes._registry import Cause, Excess
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category


def _claims_ns(excess: Excess) -> float:
    return 0.0 if excess.knows_blocking else excess.ns(Category.OTHER_OFF)


def _because(evidence: CauseEvidence) -> str:
    if not evidence.before_replays:
        return ""
    return "before replays of a CUDA graph: this source does not show whether its host or its GPU was late"


def _advice(evidence: CauseEvidence) -> list[str]:
    if evidence.before_replays:
        return ["Trace the job live (stallscope trace), which also records when the host launches a graph."]
    return [
        "Trace the job live (stallscope trace): the time ledger shows how that time was spent.",
        "With torch.profiler: record with_stack=True, or annotate the code with record_function.",
    ]


CAUSE = Cause(
    name="not_recorded",
    title="spent the time in activity that the source does not record",
    state="in activity that this source does not record",
    noun="activity that this source does not record",
    categories=(Category.OTHER_OFF,),
    advice=_advice,
    claims_ns=_claims_ns,
    because=_because,
)
