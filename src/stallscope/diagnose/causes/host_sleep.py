"""The rank sleeps: nanosleep and similar calls."""

from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    return intervals(excess.off(Category.SLEEP))


def _advice(evidence: CauseEvidence) -> list[str]:
    if (at := evidence.at) is not None:
        return [f"Look at {at}: the rank sleeps there (time.sleep, a retry or back-off loop, a rate limit)."]
    return [
        "Look for time.sleep, retry or back-off loops and rate limits in the code path of that rank.",
        "`py-spy dump --pid PID` during a delay shows the line.",
    ]


CAUSE = Cause(
    name="host_sleep",
    title="slept (nanosleep)",
    state="asleep in nanosleep",
    noun="sleep (nanosleep)",
    categories=(Category.SLEEP,),
    evidence=_evidence,
    advice=_advice,
)
