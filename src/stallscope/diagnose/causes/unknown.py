"""The time ledger does not explain the delay."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Trace the rank live with stacks, and check the host's logs at these times.",
    ]


CAUSE = Cause(
    name="unknown",
    title="was late for a reason that the time ledger does not show",
    state="for a reason that the time ledger does not show",
    noun="not shown by the time ledger",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
