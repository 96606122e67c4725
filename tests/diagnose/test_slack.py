"""Costs where slack hides delays: in pipelines, behind queued GPU work, behind other late ranks.

The truth comes from the simulator: how much later the job ends than its twin without the fault, for each other rank.
"""

import numpy as np
import pytest

from stallscope.diagnose.cost import absorbed
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import VerdictCost
from stallscope.synth import (
    Capture,
    HostStall,
    Job,
    MovingImbalance,
    Schedule,
    SharedDevice,
    Timing,
    simulate,
)

from .reports import only, report_of

MS = 1_000_000
LONG_KERNELS = Timing(forward_ns=1_500_000, backward_ns=3_000_000)
PIPELINE = Job(dp=2, pp=4, steps=40, layers=2, buckets=1, microbatches=2)
SLACK_GPU_SECONDS = 0.1  # of some 20 that the job takes


def stall(rank: int, delay_ms: int, *, every: int, first: int = 8) -> HostStall:
    schedule = Schedule(first=first, every=every)
    return HostStall(cause="host_sleep", ranks=(rank,), delay_ns=delay_ms * MS, schedule=schedule)


def told_and_true(job: Job, fault, *, seed: int = 1, **how) -> tuple[VerdictCost, float]:
    trace, truth = simulate(job, [fault], seed=seed, **how)
    cost = report_of(trace).verdicts[0].cost
    assert cost is not None
    return cost, truth.slowdown_ns / 1e9 * (job.nranks - 1)


def holds(cost: VerdictCost, true: float) -> bool:
    most = cost.gpu_seconds if not cost.is_lower_bound else cost.at_most_gpu_seconds
    is_least = cost.gpu_seconds <= 1.1 * true + SLACK_GPU_SECONDS
    return is_least and (most is None or 1.1 * most + SLACK_GPU_SECONDS >= true)


@pytest.mark.parametrize("rank", [1, 2, 6])
@pytest.mark.parametrize("delay_ms", [15, 40])
def test_the_cost_of_a_delay_in_each_pipeline_step_excludes_the_slack(rank: int, delay_ms: int):
    cost, true = told_and_true(PIPELINE, stall(rank, delay_ms, every=1), timing=LONG_KERNELS)
    assert holds(cost, true)


def test_the_cost_of_occasional_long_pipeline_delays_is_a_single_number():
    cost, true = told_and_true(PIPELINE, stall(5, 150, every=4), timing=LONG_KERNELS)
    assert not cost.is_lower_bound and cost.at_most_gpu_seconds is None
    assert cost.gpu_seconds == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("seed", [1, 2])
def test_others_would_have_waited_for_the_next_one_anyway(seed: int):
    """Hosts of a sharded job differ by milliseconds from step to step."""
    job = Job(dp=8, steps=50, sharded=True)
    cost, true = told_and_true(job, stall(3, 40, every=1), seed=seed)
    assert cost.gpu_seconds == pytest.approx(true, rel=0.12)


def test_ranks_that_share_no_late_round_wait_as_long():
    job = Job(dp=4, tp=2, steps=50, layers=3, grad_norm=True)
    trace, truth = simulate(job, [MovingImbalance(delay_ns=40 * MS)], seed=2)
    cost = only(report_of(trace)).cost
    assert cost is not None
    assert cost.gpu_seconds == pytest.approx(truth.slowdown_ns / 1e9 * (job.nranks - 1), rel=0.06)


def test_the_cost_is_a_range_when_hosts_run_ahead_of_long_kernels():
    job = Job(dp=8, steps=120, sync_every=10)
    timing = Timing(forward_ns=2_000_000, backward_ns=4_000_000)
    cost, true = told_and_true(job, stall(6, 40, every=3), timing=timing)
    assert cost.is_lower_bound and cost.gpu_seconds > 0
    assert holds(cost, true)


def test_the_cost_of_a_shared_gpu_is_the_additional_step_time():
    timing = Timing(forward_ns=2_000_000, backward_ns=4_000_000)
    job = Job(dp=8, steps=60)
    capture = Capture(has_gpu_times=True)
    cost, true = told_and_true(job, SharedDevice(ranks=(4,)), timing=timing, capture=capture)
    assert holds(cost, true)
    assert cost.may_be_gpu_seconds <= 1.3 * cost.gpu_seconds


def passed_on_by(spent: np.ndarray, delay: np.ndarray, *, wait_ns: float) -> float:
    """The passed-on share of a single stretch."""
    return float(absorbed.passed_on_by(spent[None], delay[None], wait_ns=np.array([wait_ns]))[0])


EVEN = np.full(20, 1.0 * MS)


def with_delay(at: int) -> tuple[np.ndarray, np.ndarray]:
    """Twenty pieces of 1 ms each, one of them with 5 ms more."""
    delay = np.zeros(20)
    delay[at] = 5.0 * MS
    return EVEN + delay, delay


@pytest.mark.parametrize("at", [0, 5])
def test_a_gpu_whose_queue_has_drained_passes_a_delay_on(at: int):
    assert passed_on_by(*with_delay(at), wait_ns=0.0) == pytest.approx(1.0)


def test_a_gpu_without_queued_work_passes_a_delay_on():
    """Each piece brings 2 ms of work for 1 ms of the host's: 20 ms are left after the twenty."""
    spent, delay = with_delay(0)
    assert passed_on_by(spent, delay, wait_ns=20.0 * MS) == pytest.approx(1.0, abs=0.3)


def test_a_gpu_with_much_left_hides_a_delay():
    """After fifteen pieces 15 ms of work were left, so the GPU continued."""
    spent, delay = with_delay(15)
    assert passed_on_by(spent, delay, wait_ns=15.0 * MS) == pytest.approx(0.0, abs=0.05)


def test_a_cost_range_is_printed_with_both_bounds():
    trace, _ = simulate(PIPELINE, [stall(2, 15, every=1, first=0)], seed=1, timing=LONG_KERNELS)
    report = report_of(trace)
    cost = report.verdicts[0].cost
    assert cost is not None and cost.at_most_gpu_seconds is not None
    output, most = text.report(report), f"{cost.at_most_gpu_seconds:.1f} GPU seconds"
    assert f"at most {most}" in output or f"{cost.gpu_seconds:.1f} to {most}" in output


def test_the_price_of_a_range_is_a_range():
    trace, _ = simulate(PIPELINE, [stall(2, 15, every=1, first=0)], seed=1, timing=LONG_KERNELS)
    report = report_of(trace, usd_per_gpu_hour=3600.0)
    cost = report.verdicts[0].cost
    assert cost is not None and cost.at_most_usd == pytest.approx(cost.at_most_gpu_seconds, abs=0.01)
    assert cost.usd == pytest.approx(cost.gpu_seconds, abs=0.01)
    assert f"{cost.at_most_usd:.2f} USD" in text.report(report)
