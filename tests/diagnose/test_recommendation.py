"""The recommended action is conservative: it needs a cause, confidence and severity."""

from types import SimpleNamespace

import pytest

from stallscope.diagnose import Verdict
from stallscope.diagnose.report.recommendation import recommendation
from stallscope.diagnose.report.verdict import VerdictCost

COST = VerdictCost.of(1.0, None, is_lower_bound=False, observed_ns=1e9)


def verdict(kind: str = "straggler", cause: str = "block_io", **values: object) -> Verdict:
    parts = [SimpleNamespace(cause=SimpleNamespace(name=cause))] if cause else []
    fields = {"severity": "high", "confidence": 0.97, "ranks": [3], "nodes": ["n0"]} | values
    return Verdict(kind=kind, summary="s", causes=parts, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "action"),
    [
        (verdict(), "look"),
        (verdict(severity="low", cost=COST), "none"),
        (verdict(severity="low"), "look"),
        (verdict(kind="inconclusive", cause="gpu_fault"), "look"),
        (verdict(cause="gpu_fault"), "replace_gpu"),
        (verdict(cause="gpu_fault", confidence=0.85), "look"),
        (verdict(cause="gpu_slow"), "drain_node"),
        (verdict(cause="gpu_slow", severity="medium"), "look"),
        (verdict(cause="gpu_slow", nodes=["n0", "n1"]), "look"),
        (verdict(kind="hang", cause="lock_contention"), "restart_job"),
        (verdict(kind="hang", cause="process_stopped"), "restart_rank"),
        (verdict(kind="hang", severity="low"), "restart_job"),
        (verdict(kind="change", cause="", ranks=[], nodes=[]), "look"),
    ],
)
def test_action(made, action):
    assert recommendation(made).action == action


def test_target_is_the_machine_or_the_whole_job():
    drained, restarted = recommendation(verdict(cause="gpu_slow")), recommendation(verdict(kind="hang"))
    assert (drained.ranks, drained.nodes) == ([3], ["n0"])
    assert (restarted.ranks, restarted.nodes) == ([], [])
