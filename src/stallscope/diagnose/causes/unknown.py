"""Nothing in the ledger explains it."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Trace the rank live with stacks, and look at the host around these times.",
    ]


CAUSE = Cause(
    name="unknown",
    title="was late for a reason the ledger does not show",
    state="for a reason that the time ledger does not show",
    noun="not shown by the time ledger",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
