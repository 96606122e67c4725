"""Delays of hosts behind queued GPU work, host work before a wait, and additional work on a GPU accuse no GPU."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope import synth
from stallscope.diagnose.causes import Excess, explained
from stallscope.events.names import N_CATEGORIES, Category
from stallscope.synth import HostStall, Schedule, simulate

from .builders import MS, Call, Delay, Job, trace_of
from .reports import only, report_of

N_RANKS, N_STEPS = 8, 60
EVERYONE = (tuple(range(N_RANKS)),)


def queued(*, first: int, delay_ms: float) -> Job:
    """Two all-reduces: 20 ms of GPU work lie before the first, and rank 0 is late with the second."""
    program = (
        Call(EVERYONE, count=1, work_ns=MS, gpu_ns=20 * MS),
        Call(EVERYONE, count=2, work_ns=MS, gpu_ns=MS, waits=True),
    )
    delays = [Delay(0, step, int(delay_ms * MS), Category.ON_CPU, call=1) for step in range(first, N_STEPS)]
    return Job(program, n_ranks=N_RANKS, n_steps=N_STEPS, delays=tuple(delays))


def test_an_absorbed_delay_in_every_step_names_no_rank():
    report = report_of(trace_of(queued(first=0, delay_ms=4.5)))
    assert {verdict.kind for verdict in report.verdicts} <= {"inconclusive"}


def test_an_absorbed_delay_after_steps_without_it_names_no_rank():
    report = report_of(trace_of(queued(first=20, delay_ms=4.5)))
    assert not report.verdicts


@pytest.mark.parametrize("slower_ms", [4, 8])
def test_an_absorbed_delay_in_a_job_that_becomes_slower_is_not_the_cause(slower_ms: int):
    """The steps without the delay lie before the change of all ranks; later steps are longer by the change."""
    slower = {(rank, step): slower_ms * MS for rank in range(N_RANKS) for step in range(30, N_STEPS)}
    verdict = only(report_of(trace_of(replace(queued(first=10, delay_ms=4.5), gpu_late_ns=slower))))
    assert (verdict.kind, verdict.ranks) == ("change", [])


def test_a_delay_longer_than_the_queue_names_its_rank():
    verdict = only(report_of(trace_of(queued(first=20, delay_ms=60))))
    assert verdict.ranks == [0]
    assert verdict.cost is not None
    passed_on_ms = 60 - 20 + 1  # the GPU needs 20 ms, 1 ms of which lies before the delay
    true = passed_on_ms / 1e3 * (N_STEPS - 20) * (N_RANKS - 1)
    assert verdict.cost.gpu_seconds == pytest.approx(true, rel=0.1)


def test_an_absorbed_delay_next_to_a_late_rank_names_the_late_rank_only():
    """Rank 0's GPU hides 4.5 ms of its host in every step; rank 3 is 60 ms late in every fifth step."""
    job = queued(first=5, delay_ms=4.5)
    late = tuple(Delay(3, step, 60 * MS, Category.IO, call=1) for step in range(10, N_STEPS, 5))
    verdict = only(report_of(trace_of(replace(job, delays=job.delays + late))))
    assert verdict.ranks == [3]


def test_a_delay_hidden_by_another_rank_in_a_job_that_runs_ahead_names_both_ranks():
    """Between two waits rank 0 loses 300 ms, rank 10 150 ms or 300 ms, and a job without delays needs 200 ms."""
    delays = [
        HostStall(cause=cause, ranks=(rank,), delay_ns=150 * MS, schedule=Schedule(first=first, every=every))
        for cause, rank, first, every in (("network_wait", 0, 8, 5), ("block_io", 10, 9, 7))
    ]
    trace, _ = simulate(synth.Job(dp=16, steps=120, sync_every=10), delays, seed=7, has_twin=False)
    assert sorted(verdict.ranks for verdict in report_of(trace).verdicts) == [[0], [10]]


def test_a_queue_that_absorbs_most_of_a_delay_passes_on_the_rest():
    """Of 24 ms, the GPU needs 20 ms for the work before, of which 1 ms lies before the delay: 5 ms of 24 are lost."""
    verdict = only(report_of(trace_of(queued(first=20, delay_ms=24))))
    assert verdict.ranks == [0] and verdict.cost is not None
    true = (24 - 20 + 1) / 1e3 * (N_STEPS - 20) * (N_RANKS - 1)
    assert verdict.cost.gpu_seconds == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_host_work_before_the_wait_is_not_reported_as_a_slow_gpu(seed: int):
    """Rank 7 starts 6 ms after the others, and no wait is long enough to bring the ranks together again."""
    program = (Call(EVERYONE, work_ns=MS, waits=True, after_ns=24 * MS),)
    start = Delay(7, 0, 6 * MS, Category.ON_CPU)
    report = report_of(trace_of(Job(program, n_ranks=N_RANKS, n_steps=N_STEPS, delays=(start,), seed=seed)))
    assert not report.verdicts


def test_a_gpu_that_works_longer_every_tenth_step_has_more_work():
    program = (Call(EVERYONE, work_ns=MS, gpu_ns=20 * MS, waits=True),)
    late = {(0, step): 40 * MS for step in range(10, N_STEPS, 10)}
    trace = trace_of(Job(program, n_ranks=N_RANKS, n_steps=N_STEPS, gpu_late_ns=late, has_gpu_times=True))
    for verdict in report_of(trace).verdicts:
        assert not verdict.ranks
        assert not {part.cause.name for part in verdict.causes} & {"gpu_slow", "gpu_shared"}


@pytest.mark.parametrize(("n_syncs", "name"), [(10, "gpu_work"), (0, "gpu_slow")])
def test_time_on_the_own_gpu_in_additional_calls_is_additional_work(n_syncs: int, name: str):
    ledger = np.zeros(N_CATEGORIES)
    ledger[Category.DEVICE - 1] = 800.0 * MS
    excess = Excess(total_ns=800.0 * MS, ledger_ns=ledger, n_steps=10, n_syncs=n_syncs)
    assert [part.cause.name for part in explained(excess)] == [name]


def test_a_save_after_the_last_step_costs_the_wait_of_all_others():
    """The wait itself is in no record: no call follows it."""
    last = N_STEPS - 1
    program = (Call(EVERYONE, count=1, work_ns=MS, gpu_ns=10 * MS, waits=True),)
    barrier = Call(EVERYONE, count=2, work_ns=0, waits=True)
    save = Delay(0, last, 60_000 * MS, Category.IO, call=-1)
    job = Job(program, n_ranks=N_RANKS, n_steps=N_STEPS, delays=(save,), extra={last: (barrier,)})
    verdict = only(report_of(trace_of(job)))
    assert verdict.ranks == [0] and verdict.cost is not None
    assert verdict.cost.gpu_seconds == pytest.approx(60 * (N_RANKS - 1), rel=0.1)
