"""The time budget: shares of the ranks' time, a loss that all ranks share, severity."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.report.budget import NOT_RECORDED, budget, budget_of
from stallscope.diagnose.report.severity import severity
from stallscope.diagnose.report.verdict import Verdict, VerdictCost
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.names import N_CATEGORIES, Category, CollectiveFlag

from .builders import dp_trace
from .reports import report_of

LIMITS = Thresholds()


def spent(**ms: float) -> np.ndarray:
    """One process's time by category, in ns."""
    row = np.zeros(N_CATEGORIES, np.int64)
    for name, value in ms.items():
        row[Category[name.upper()] - 1] = value * 1_000_000
    return row


def test_the_shares_are_of_the_time_of_all_processes():
    whole = budget(np.array([spent(on_cpu=100), spent(io=300)]), limits=LIMITS)
    assert whole.shares == {"io": 0.75, "on_cpu": 0.25}
    assert (whole.seconds, whole.n_processes, whole.dominant) == (0.4, 2, None)
    assert whole.line() == "Time budget of 2 ranks: 75% disk I/O, 25% on CPU."


def test_time_that_the_ledger_does_not_cover_is_not_recorded():
    whole = budget(np.array([spent(on_cpu=25)]), elapsed_ns=np.array([100 * 10**6]), limits=LIMITS)
    assert whole.shares == {NOT_RECORDED: 0.75, "on_cpu": 0.25}


def test_blocked_time_of_a_source_without_switches_is_not_recorded():
    whole = budget(np.array([spent(other_off=100)]), knows_blocking=False, limits=LIMITS)
    assert NOT_RECORDED in whole.line()
    assert whole.dominant is None


@pytest.mark.parametrize(("io_ms", "dominant"), [(90, "io"), (35, "io"), (20, None)])
def test_a_category_that_fills_much_of_every_ranks_time_dominates(io_ms, dominant):
    rows = np.array([spent(io=io_ms, on_cpu=100 - io_ms), spent(io=95, on_cpu=5)])
    assert budget(rows, limits=LIMITS).dominant == dominant


def test_waiting_for_gpus_and_computing_never_dominate():
    assert budget(np.array([spent(wait_gpu=90, on_cpu=10)]), limits=LIMITS).dominant is None


def test_a_disk_wait_shared_by_all_ranks_is_a_benign_remark():
    trace = dp_trace()
    rows = trace.collectives.copy()
    ledger = rows["ledger_ns"]
    ledger[:, Category.IO - 1] += ledger[:, Category.ON_CPU - 1]
    ledger[:, Category.ON_CPU - 1] = 0
    report = report_of(replace(trace, collectives=rows))
    assert report.healthy
    assert report.budget.dominant == "io"
    assert any(remark.get("category") == "io" for remark in report.benign)


def test_a_source_without_a_ledger_has_no_budget():
    trace = dp_trace()
    rows = trace.collectives.copy()
    rows["flags"] |= np.uint32(CollectiveFlag.NO_LEDGER)
    empty = budget_of(replace(trace, collectives=rows, snapshots=trace.snapshots[:0]), LIMITS)
    assert not empty.is_recorded
    assert NOT_RECORDED in empty.line()


def verdict(gpu_seconds: float, confidence: float = 0.95, kind: str = "straggler") -> Verdict:
    cost = VerdictCost.of(gpu_seconds, None, is_lower_bound=False, observed_ns=1e9)
    return Verdict(kind=kind, summary="", confidence=confidence, cost=cost)


@pytest.mark.parametrize(
    ("share", "level"),
    [
        (LIMITS.critical_share, "critical"),
        (LIMITS.high_share, "high"),
        (LIMITS.medium_share, "medium"),
        (0.001, "low"),
    ],
)
def test_the_severity_follows_the_share_of_the_jobs_time(share, level):
    assert severity(verdict(share * 100), 100.0, LIMITS) == level


def test_a_doubtful_verdict_is_a_level_less_severe():
    assert severity(verdict(50, confidence=0.5), 100.0, LIMITS) == "high"


def test_a_hang_is_critical_whatever_it_has_cost_so_far():
    assert severity(verdict(0.1, kind="hang"), 100.0, LIMITS) == "critical"
