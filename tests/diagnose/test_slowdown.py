"""A job that becomes slower as a whole is reported with time, size and cause; noise and phases are not."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.lateness.slowdown import _ERRORS, _UNCLEAR_ERRORS, _change, _is_lasting, _shift
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import case_of
from stallscope.diagnose.verdicts import change
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.events.trace import Trace
from stallscope.stress import load
from stallscope.synth import HostStall, Job, Schedule, simulate

from . import builders
from .builders import MS, Delay
from .reports import only, report_of

LIMITS = Thresholds()


@pytest.mark.parametrize("n_before", [20, 100, 150, 280])
def test_the_change_is_located_at_the_first_slower_step(n_before: int):
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.normal(17e6, 1e6, n_before), rng.normal(44e6, 8e6, 300 - n_before)])
    assert _change(values, 10) == n_before


@pytest.mark.parametrize("n", [60, 400, 1500])
@pytest.mark.parametrize("share", [0.15, 0.25, 0.4])
def test_a_change_of_15_to_40_percent_is_lasting_amid_noise_and_checkpoints(n: int, share: float):
    for seed in range(5):
        rng = np.random.default_rng([n, seed])
        values = wandering(rng, n, 40e6)
        cut = int(n * rng.uniform(0.4, 0.7))
        values[cut:] *= 1 + share
        values[10::50] += 400e6
        change = _change(values, 10)
        assert abs(change - cut) <= max(3, 0.02 * n)
        assert _is_lasting(values, change, LIMITS)


def wandering(rng: np.random.Generator, n: int, step_ns: float) -> np.ndarray:
    """Step times that drift slowly by 2 % and vary by 3 %."""
    wander = np.zeros(n)
    for i in range(1, n):
        wander[i] = 0.6 * wander[i - 1] + rng.normal(0, 0.02)
    return step_ns * np.exp(wander + rng.normal(0, 0.03, n))


@pytest.mark.parametrize("n", [40, 120, 1000])
def test_noise_is_not_a_change(n: int):
    for seed in range(30):
        values = wandering(np.random.default_rng([n, seed]), n, 30e6)
        assert not _is_lasting(values, _change(values, 10), LIMITS)


@pytest.mark.parametrize("n", [12, 16, 20])
def test_few_steps_that_resemble_the_step_before_are_not_a_change(n: int):
    least = case_of(with_several_waits(20), LIMITS, None).step_times.n_least
    n_changes, n_series = 0, 300
    for seed in range(n_series):
        rng = np.random.default_rng([n, seed])
        logs = np.zeros(n)
        for i in range(1, n):
            logs[i] = 0.6 * logs[i - 1] + rng.normal(0, 0.05)
        values = 30e6 * np.exp(logs)
        cut = _change(values, least)
        shift = _shift(values, LIMITS)
        n_changes += _is_lasting(values, cut, LIMITS) or (shift is not None and shift.n_errors >= _ERRORS)
    assert n_changes <= 0.01 * n_series


@pytest.mark.parametrize("n", [40, 100])
def test_chance_makes_a_shift_of_random_steps_unclear_in_few_jobs_and_clear_in_none(n: int):
    values = 30e6 * np.exp(0.2 * np.random.default_rng(n).standard_normal((400, n)))
    found = [shift.n_errors for shift in (_shift(each, LIMITS) for each in values) if shift is not None]
    assert sum(errors >= _UNCLEAR_ERRORS for errors in found) <= 0.04 * len(values)
    assert max(found) < _ERRORS


def with_several_waits(n_steps: int, delays: tuple[Delay, ...] = ()) -> Trace:
    """A job that waits three times in each step, as for several losses."""
    calls = [builders.Call(((0, 1),), count=1 + i, work_ns=4 * MS, waits=i != 1) for i in range(4)]
    return builders.trace_of(builders.Job(tuple(calls), 2, n_steps=n_steps, delays=delays))


def test_a_change_of_few_steps_with_several_waits_is_reported():
    delays = tuple(Delay(rank, step, 8 * MS, Category.IO) for step in range(12, 24) for rank in range(2))
    assert only(report_of(with_several_waits(24, delays))).kind == "change"


def test_an_early_change_of_few_steps_with_several_waits_is_reported():
    delays = tuple(Delay(rank, step, 4 * MS, Category.IO) for step in range(8, 20) for rank in range(2))
    assert only(report_of(with_several_waits(20, delays))).kind == "change"


@pytest.mark.parametrize(("every", "length", "factor"), [(50, 10, 1.5), (100, 25, 1.3), (20, 1, 30.0)])
def test_recurring_phases_are_not_a_change(every: int, length: int, factor: float):
    """Evaluations of several steps, the last of them at the end of the job; checkpoints."""
    for seed in range(5):
        values = wandering(np.random.default_rng(seed), 600, 30e6)
        values[np.arange(600) % every >= every - length] *= factor
        assert not _is_lasting(values, _change(values, 10), LIMITS)


def test_a_slow_start_is_not_a_slowdown():
    values = wandering(np.random.default_rng(1), 300, 30e6)
    values[:60] *= 1.4
    assert not _is_lasting(values, _change(values, 10), LIMITS)


def test_a_host_that_runs_ahead_until_its_launch_queue_is_full_has_not_become_slower():
    job = Job(steps=300, sync_every=50, buckets=2, ranks_per_node=4)
    trace, _ = simulate(job, seed=5, has_twin=False)
    assert report_of(trace).verdicts == []


def slower(
    n_ranks: int, n_steps: int, at: int, ns: int, category: Category, *, work_ns: int = 20 * MS
) -> Verdict:
    delays = tuple(Delay(rank, step, ns, category) for step in range(at, n_steps) for rank in range(n_ranks))
    job = builders.Job(
        builders.data_parallel(n_ranks, n_buckets=2, work_ns=work_ns, gpu_ns=MS),
        n_ranks=n_ranks,
        n_steps=n_steps,
        delays=delays,
        jitter_ns=work_ns // 20,
    )
    return only(report_of(builders.trace_of(job)))


@pytest.mark.parametrize(
    ("n_ranks", "n_steps", "at", "ms", "category", "name"),
    [
        (4, 120, 80, 7, Category.IO, "io"),
        (8, 80, 30, 16, Category.NET, "net"),
        (2, 200, 170, 10, Category.ON_CPU, "on_cpu"),
    ],
)
def test_a_change_is_reported_with_its_moment_size_and_part(n_ranks, n_steps, at, ms, category, name):
    verdict = slower(n_ranks, n_steps, at, ms * MS, category)
    evidence = verdict.evidence
    assert (verdict.kind, verdict.ranks) == ("change", [])
    assert abs(evidence.from_step - at) <= 2
    assert evidence.step_ms_after - evidence.step_ms_before == pytest.approx(ms, rel=0.1)
    assert list(evidence.grew_ms) == [name]
    assert evidence.grew_ms[name] == pytest.approx(ms, rel=0.1)
    assert verdict.cost.gpu_seconds == pytest.approx((n_steps - at) * n_ranks * ms / 1e3, rel=0.15)
    assert "whole job became" in verdict.summary


def test_a_large_job_that_becomes_slower_late_is_reported():
    job = Job(dp=64, steps=120)
    fault = HostStall(
        cause="block_io",
        ranks=tuple(range(64)),
        delay_ns=10 * MS,
        spread=0.02,
        kind="all_slow",
        schedule=Schedule(first=80),
    )
    trace, _ = simulate(job, [fault], seed=3, has_twin=False)
    verdict = only(report_of(trace))
    assert abs(int(verdict.evidence.from_step) - 80) <= 3
    assert next(iter(verdict.evidence.grew_ms)) == "io"


def test_steps_that_are_not_known_to_be_the_same_on_all_ranks_show_no_change():
    """Ranks that were attached late, and whose rounds are known only to within more than a step."""
    job = Job(dp=4, steps=120)
    fault = HostStall(
        cause="block_io", ranks=(0, 1, 2, 3), delay_ns=10 * MS, kind="all_slow", schedule=Schedule(first=80)
    )
    trace, _ = simulate(job, [fault], seed=3, has_twin=False)
    case = case_of(trace, LIMITS, None)
    assert [verdict.kind for verdict in change.of_all_ranks(case)] == ["change"]
    matched = replace(case.matched, matching_error_ns=2 * case.step_ns)
    assert change.of_all_ranks(replace(case, matched=matched)) == []


def test_a_change_of_short_steps_is_reported():
    """A quarter of a step of 7 ms is less than the smallest lateness of one rank that is reported."""
    verdict = slower(8, 100, 50, int(1.7 * MS), Category.IO, work_ns=3 * MS)
    assert verdict.kind == "change"
    assert abs(verdict.evidence.from_step - 50) <= 2


def test_an_early_change_is_reported():
    verdict = slower(4, 50, 10, 5 * MS, Category.NET)
    assert verdict.kind == "change"
    assert abs(verdict.evidence.from_step - 10) <= 1


@pytest.mark.parametrize("n_blocks", [8, 10, 12])
def test_a_job_that_never_waits_is_examined_in_few_blocks_of_steps(n_blocks: int):
    job = load.Job(
        name="ahead", ranks=4, first_rank=0, world=4, interval_ns=20 * MS, straggler=None, late_ns=0
    )
    sent = load.collectives(job, 1000, 64 * n_blocks + 8, origin_round=1000)
    rows = layout.empty(layout.COLLECTIVES, len(sent))
    for name in set(rows.dtype.names) & set(sent.dtype.names):
        rows[name] = sent[name]
    assert report_of(Trace(collectives=rows)).answer == "healthy"


@pytest.mark.parametrize("named", [1, 3])
def test_a_slower_job_is_reported_in_addition_to_a_late_rank(named: int):
    """A rank reads a disk every ninth step; all ranks need 30 % more time from step 60 on."""
    late = builders.every(named, 9, 80 * MS, first=6, until=120, category=Category.IO)
    slower = [Delay(rank, step, 9 * MS) for rank in range(4) for step in range(60, 120)]
    program = builders.data_parallel(work_ns=10 * MS)
    report = report_of(builders.trace_of(builders.Job(program, n_steps=120, delays=(*late, *slower))))
    straggler, change = report.verdicts
    assert (straggler.kind, straggler.ranks, change.kind, change.ranks) == (
        "straggler",
        [named],
        "change",
        [],
    )
    assert change.evidence.from_step == pytest.approx(60, abs=3)
    assert change.cost and change.cost.gpu_seconds == pytest.approx(4 * 60 * 0.009, rel=0.1)


def test_a_rank_that_is_late_in_most_steps_from_some_step_on_is_no_change_of_the_job():
    late = [Delay(2, step, 20 * MS, Category.IO) for step in range(60, 120) if step % 5]
    program = builders.data_parallel(work_ns=10 * MS)
    report = report_of(builders.trace_of(builders.Job(program, n_steps=120, delays=tuple(late))))
    assert [(verdict.kind, verdict.ranks) for verdict in report.verdicts] == [("straggler", [2])]


def varying(spread: float, more: float) -> Report:
    """A job of 120 steps of 20 ms that vary at random, and take `more` times as long again from step 61 on."""
    sizes = 20 * MS * np.random.default_rng(2).uniform(0.0, spread, 120)
    sizes[61:] += (20 * MS + sizes[61:]) * more
    delays = tuple(Delay(rank, step, int(ns)) for step, ns in enumerate(sizes.tolist()) for rank in range(4))
    program = builders.data_parallel(n_buckets=2, work_ns=10 * MS)
    return report_of(builders.trace_of(builders.Job(program, n_steps=120, delays=delays)))


def test_a_healthy_report_states_the_smallest_change_that_shows():
    assert varying(0.0, 0.0).evidence.min_change_share == 0.06
    healthy = varying(1.0, 0.0)
    share = healthy.evidence.min_change_share
    assert healthy.answer == "healthy"
    assert 0.1 <= share < 1
    hidden = varying(1.0, 0.6 * share)
    assert hidden.answer == "inconclusive"
    assert hidden.evidence.min_change_share > 0.6 * share
    assert hidden.evidence.unclear_change_share == pytest.approx(0.6 * share, rel=0.5)
    assert hidden.evidence.unclear_change_step == pytest.approx(61, abs=20)
    assert hidden.evidence.n_steps_to_decide > 117
    assert "Examine about" in hidden.gaps[0].action
    small = varying(1.0, 0.2 * share)
    assert small.answer == "healthy"
    assert [verdict.kind for verdict in varying(1.0, 1.1 * share).verdicts] == ["change"]
