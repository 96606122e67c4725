"""Jobs whose hosts run ahead: a rank blocked in a launch behind a late rank is not late itself."""

from dataclasses import replace

import pytest

from stallscope.synth import HostStall, Job, Schedule, Timing, simulate

from .reports import report_of

JOB = Job(dp=8, tp=2, ranks_per_node=8, steps=90, layers=3, buckets=2, sync_every=20)
MS = 1_000_000


def long_kernels(factor):
    usual = Timing()
    kernels = ("forward_ns", "backward_ns", "optimizer_ns", "layer_bytes")
    return replace(usual, **{name: factor * getattr(usual, name) for name in kernels})


def accused(faults, seed):
    trace, _ = simulate(JOB, faults, seed=seed, timing=long_kernels(10), has_twin=False)
    return {rank for verdict in report_of(trace).verdicts for rank in verdict.ranks}


def stall(rank, delay_ms, every, cause="block_io"):
    return HostStall(
        cause=cause, ranks=(rank,), delay_ns=delay_ms * MS, schedule=Schedule(first=8, every=every)
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_other_half_of_a_late_ranks_layers_is_not_late_itself(seed):
    """It computes in step with the late rank, and blocks in a launch once its queue is full."""
    assert accused([stall(14, 2000, 2)], seed) == {14}


@pytest.mark.parametrize("seed", range(2))
def test_a_slow_rank_is_named_although_its_host_runs_ahead(seed):
    assert accused([stall(5, 400, 3, cause="host_compute")], seed) == {5}


def test_two_ranks_that_are_late_by_turns_are_both_named():
    late = [stall(14, 2000, 4, cause="host_compute"), stall(5, 2000, 6, cause="host_compute")]
    assert accused(late, 1) == {5, 14}
