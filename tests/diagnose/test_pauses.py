"""Steps in which all ranks pause, as for a checkpoint: ranks differ by factors, and no rank is accused."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.lateness.pauses import _student_tail
from stallscope.events.names import Category
from stallscope.synth import HostStall, Schedule, Timing, fault_scenarios, simulate
from stallscope.synth import Job as SimulatedJob

from .builders import MS, Delay, dp_trace, every
from .reports import only, report_of

SAVES = (10, 20, 30)


def saves(lengths_s):
    """All ranks save in some steps: lengths in seconds, by save, by rank."""
    return [
        Delay(rank, step, int(length * 1000) * MS, Category.IO)
        for step, lengths in zip(SAVES, lengths_s, strict=True)
        for rank, length in enumerate(lengths)
    ]


def accused(trace):
    return {rank for verdict in report_of(trace).verdicts for rank in verdict.ranks}


def test_no_rank_is_named_for_the_longest_of_uneven_saves():
    lengths = [(0.8, 0.3, 0.5, 1.1), (0.4, 0.2, 0.9, 0.3), (0.4, 3.5, 0.7, 0.3)]
    assert report_of(dp_trace(saves(lengths))).healthy


def test_an_exceptionally_long_save_is_reported():
    lengths = [(0.50, 0.48, 0.53, 0.55), (0.51, 0.50, 0.47, 0.52), (0.49, 3.5, 0.51, 0.50)]
    verdict = only(report_of(dp_trace(saves(lengths))))
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([1], "block_io")
    assert verdict.evidence.is_one_off is True


def test_a_rank_with_consistently_long_saves_is_named():
    lengths = [[0.1 if rank != 2 else 0.8 for rank in range(4)] for _ in SAVES]
    verdict = only(report_of(dp_trace(saves(lengths))))
    assert (verdict.ranks, verdict.period_steps) == ([2], 10)


def test_of_two_ranks_a_long_save_is_compared_to_the_spread_of_saves():
    some = [Delay(rank, step, 500 * MS, Category.IO) for rank in (0, 1) for step in range(6, 36, 5)]
    long = [Delay(1, 23, 4000 * MS, Category.IO), Delay(0, 23, 500 * MS, Category.IO)]
    assert accused(dp_trace([*some, *long], n_ranks=2)) == {1}
    uneven = [
        Delay(rank, step, int(400 * 4 ** ((rank + step) % 3 - 1)) * MS, Category.IO)
        for rank in (0, 1)
        for step in range(6, 36, 5)
    ]
    assert not accused(dp_trace([*uneven, *long], n_ranks=2))


def test_a_delay_between_uneven_saves_is_named():
    lengths = [(0.8, 0.3, 0.5, 1.1), (0.4, 0.2, 0.9, 0.3), (0.4, 1.5, 0.7, 0.3)]
    assert accused(dp_trace([*saves(lengths), *every(3, 6, 50 * MS, first=7)])) == {3}


@pytest.mark.parametrize("number", [4086, 1617])
def test_ranks_that_count_a_shared_save_in_the_step_before_or_after_are_not_named(number: int) -> None:
    """4,086: a rank that was attached late, whose step begins at another call. 1,617: the stages of a pipeline."""
    trace, _ = fault_scenarios.healthy(number)
    assert report_of(trace).healthy


def test_the_last_rank_of_a_shared_evaluation_is_not_named():
    """One rank's evaluation took a tenth longer, while the others were already waiting."""
    usual = Timing().scaled(3.0)
    kernels = ("forward_ns", "backward_ns", "optimizer_ns", "layer_bytes")
    timing = replace(usual, **{name: 4 * getattr(usual, name) for name in kernels})
    job = SimulatedJob(dp=32, pp=2, ranks_per_node=1, layers=1, buckets=3, sync_every=4, steps=46)
    schedule = Schedule(first=4, every=4)
    ranks = tuple(range(job.nranks))
    evaluation = HostStall(
        cause="host_compute", ranks=ranks, delay_ns=1000 * MS, spread=0.1, schedule=schedule
    )
    trace, _ = simulate(job, [evaluation], seed=1152, timing=timing, has_twin=False)
    assert not accused(trace)


@pytest.mark.parametrize(("degrees", "t"), [(2, 3.0), (6, 2.5), (30, 2.0)])
def test_the_chance_of_more_is_that_of_students_law(degrees, t):
    drawn = np.random.default_rng(0).standard_t(degrees, 400_000)
    assert _student_tail(t, degrees) == pytest.approx(np.mean(drawn > t), rel=0.1)
