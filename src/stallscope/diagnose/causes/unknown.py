"""The time ledger does not explain the delay."""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Trace the rank live with stacks, and check the host's logs at these times.",
    ]


CAUSE = Cause(
    name="unknown",
    title="was late for a reason that the time ledger does not show",
    state="for a reason that the time ledger does not show",
    noun="reason that the time ledger does not show",
    categories=(),
    advice=_advice,
)
