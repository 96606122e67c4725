"""Simulated jobs of unusual shapes: long steps, hosts far ahead, a rank a node, few ranks, lost last records."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.report.verdict import Report
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import case_of
from stallscope.synth import Capture, HostStall, Job, Schedule, Timing, simulate

from .reports import report_of

GPU_TIMES = Capture(has_gpu_times=True)


def named(report: Report) -> set[int]:
    return {rank for verdict in report.verdicts for rank in verdict.ranks}


def with_long_kernels(factor: float, jitter: float = 1.0) -> Timing:
    """Kernels and transfers that take this many times as long; the hosts are unchanged."""
    usual = Timing().scaled(jitter)
    kernels = ("forward_ns", "backward_ns", "optimizer_ns", "layer_bytes", "sharded_ns")
    return replace(usual, **{name: int(getattr(usual, name) * factor) for name in kernels})


def test_a_late_host_of_a_job_that_runs_ahead_makes_no_gpu_slow():
    job = Job(dp=6, tp=3, ranks_per_node=6, layers=3, buckets=3, sync_every=5, grad_norm=True, steps=60)
    fault = HostStall(cause="host_sleep", ranks=(8,), delay_ns=6_000_000_000, schedule=Schedule(until=30))
    trace, truth = simulate(job, [fault], seed=5, timing=with_long_kernels(1500), capture=GPU_TIMES)
    report = report_of(trace)
    assert named(report) == {8}
    cost = report.verdicts[0].cost
    assert cost is not None and cost.gpu_seconds == pytest.approx(truth.lost_gpu_seconds, rel=0.4)


def test_the_gpu_of_the_other_rank_of_two_is_not_slow():
    """The clock of its GPU is known well; the clock of the late rank's GPU is not."""
    timing = with_long_kernels(40, 0.3)
    slow = HostStall(cause="block_io", ranks=(1,), delay_ns=70_000_000, schedule=Schedule(first=0))
    job = Job(dp=2, layers=2, buckets=3, steps=90)
    for seed in range(3):
        trace, _ = simulate(job, [slow], seed=seed, timing=timing, capture=GPU_TIMES, has_twin=False)
        assert named(report_of(trace)) == {1}


@pytest.mark.parametrize("delay_ms", [600, 1500])
def test_the_cost_of_a_late_host_with_queued_work_is_a_range(delay_ms: int):
    """It is late in every step while its GPU has work: the data does not show how much of the delay that hides."""
    job = Job(dp=6, layers=4, buckets=1, sync_every=5, steps=100)
    late = HostStall(cause="block_io", ranks=(3,), delay_ns=delay_ms * 1_000_000, schedule=Schedule(first=5))
    trace, truth = simulate(job, [late], seed=2, timing=with_long_kernels(200))
    (verdict,) = report_of(trace).verdicts
    assert verdict.ranks == [3]
    assert verdict.cost is not None and verdict.cost.is_lower_bound
    assert verdict.cost.gpu_seconds <= 1.1 * truth.lost_gpu_seconds
    assert verdict.cost.at_most_gpu_seconds >= 0.9 * truth.lost_gpu_seconds


@pytest.mark.parametrize("seed", [18, 19])
def test_ranks_on_separate_nodes_with_inaccurate_clocks_are_not_slow(seed: int):
    job = Job(dp=6, tp=2, ranks_per_node=1, layers=2, buckets=2, steps=40)
    trace, _ = simulate(job, seed=seed, timing=with_long_kernels(10, 3.0))
    assert report_of(trace).healthy


def test_a_rank_with_a_lost_last_record_is_not_missing():
    job = Job(dp=12, pp=3, ranks_per_node=2, layers=3, buckets=3, microbatches=1, sync_every=20, steps=40)
    trace, _ = simulate(job, seed=30, timing=with_long_kernels(300))
    rows = trace.collectives
    last = rows[rows["node"] == 8]["ts_ns"].max()
    kept = rows[~((rows["node"] == 8) & (rows["ts_ns"] == last))]
    report = report_of(replace(trace, collectives=kept, lost={"records": 1}))
    assert not report.verdicts
    assert not report.evidence.n_ranks_unseen


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_small_delay_in_each_step_is_detected_in_spite_of_host_jitter(rank: int):
    """Single steps differ by as much; over 150 of them the other ranks do not."""
    slow = HostStall(cause="host_sleep", ranks=(rank,), delay_ns=3_000_000)
    trace, _ = simulate(Job(dp=4, steps=150), [slow], seed=rank, timing=Timing().scaled(3.0), has_twin=False)
    (verdict,) = report_of(trace).verdicts
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([rank], "host_sleep")


def test_records_lost_from_another_communicator_are_not_gpu_work():
    """A gap is seen in the communicator of the lost record only, while the GPU's time there seems to be work."""
    job = Job(dp=5, tp=3, pp=2, ranks_per_node=16, buckets=1, microbatches=1, sync_every=5, steps=90)
    capture = Capture(has_gpu_times=True, lost=0.01)
    trace, _ = simulate(job, seed=60, timing=with_long_kernels(300, 2.0), capture=capture)
    assert report_of(trace).healthy


def test_a_rank_with_a_lost_first_record_has_the_same_steps_as_its_peers():
    """Two communicators of the same size are distinguished by their first use."""
    job = Job(dp=6, ranks_per_node=3, layers=1, buckets=1, grad_norm=True, steps=16)
    trace, _ = simulate(job, seed=133, timing=with_long_kernels(300), capture=GPU_TIMES)
    rows = trace.collectives
    own_rows = (rows["node"] == rows["node"][0]) & (rows["pid"] == rows["pid"][0])
    first = own_rows & (rows["ts_ns"] == rows["ts_ns"][own_rows].min())
    assert report_of(replace(trace, collectives=rows[~first], lost={"records": 1})).healthy


def test_a_rank_that_lost_a_few_records_of_a_rare_call_still_has_peers():
    """Alone it would be compared with its own other steps, in which it does not save."""
    job = Job(
        dp=6, pp=2, ranks_per_node=1, layers=3, buckets=2, microbatches=1, checkpoint_every=7, steps=160
    )
    trace, _ = simulate(job, seed=53, timing=with_long_kernels(10))
    rows = trace.collectives
    whole = np.flatnonzero((rows["node"] == 9) & (rows["nranks"] == job.nranks))
    kept = replace(trace, collectives=np.delete(rows, whole[[3, 11]]), lost={"records": 2})
    assert case_of(kept, Thresholds(), None).programs.program.tolist() == [0] * 6 + [1] * 6
    assert report_of(kept).healthy


@pytest.mark.parametrize("seed", [0, 15])
def test_a_rank_that_lost_some_records_is_not_alone_in_its_program(seed: int):
    """Alone it would have no peers, and be late by the evaluation that all ranks make every sixth step."""
    job = Job(dp=8, pp=3, layers=1, buckets=2, microbatches=1, grad_norm=True, steps=40)
    ranks = tuple(range(job.nranks))
    evaluation = HostStall(
        cause="host_compute",
        ranks=ranks,
        delay_ns=500_000_000,
        spread=0.1,
        schedule=Schedule(first=6, every=6),
    )
    trace, _ = simulate(job, [evaluation], seed=seed, capture=Capture(lost=0.02), has_twin=False)
    assert not named(report_of(trace))
    assert len(set(case_of(trace, Thresholds(), None).programs.program.tolist())) == job.pp


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gpus_with_high_variance_are_not_slow(seed: int):
    """Kernels whose variation exceeds a small share of a step."""
    job = Job(dp=6, layers=3, buckets=3, sync_every=20, steps=100)
    trace, _ = simulate(job, seed=seed, timing=with_long_kernels(200, 2.0), capture=GPU_TIMES)
    assert not named(report_of(trace))
