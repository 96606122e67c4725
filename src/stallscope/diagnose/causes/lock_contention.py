"""The rank waits in a futex that another of its threads holds."""

from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    return intervals(excess.off(Category.LOCK))


def _advice(evidence: CauseEvidence) -> list[str]:
    advice = [
        "Check the other threads of the rank: a logger, an upload or a data thread may hold the interpreter lock."
    ]
    if (at := evidence.at) is not None:
        return [f"Look at {at}: the rank waits for the lock there.", *advice]
    return [*advice, "`py-spy dump --pid PID` during a delay shows the thread that holds the lock."]


CAUSE = Cause(
    name="lock_contention",
    title="waited for a lock held by another of its threads",
    state="waiting for a lock held by another of its threads",
    noun="lock held by another of its threads",
    categories=(Category.LOCK,),
    evidence=_evidence,
    advice=_advice,
)
