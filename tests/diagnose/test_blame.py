"""Blame: the slow rank is named, ranks that wait for it are not, and chance names no rank."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.recurrence import (
    _binomial_tail,
    _poisson_tail,
    _rate_of_quiet,
    beyond_chance,
    one_offs,
    recurring,
    with_unproven_delays,
)
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.names import Category, Op

from .builders import MS, Call, Delay, Job, data_parallel, dp_trace, every, trace_of
from .reports import only, report_of

LIMITS = Thresholds()
MIN_NS = LIMITS.min_late_ns
TENSOR = Call(((0, 1), (2, 3)), count=10, waits=True)
DATA = Call(((0, 2), (1, 3)), count=500, waits=True)


def late(process: int, step: int, ns: float = 50 * MS) -> LateStep:
    return LateStep(process, step, 0, 0, ns, ns, 1)


@pytest.mark.parametrize(
    ("steps", "is_named"),
    [
        (range(60, 100), True),  # from some moment on in each step
        (range(0, 100, 2), False),  # in half of the steps, from the first to the last
        (range(90, 100), False),  # a host may be slow for some steps
    ],
)
def test_delays_just_above_the_threshold_name_a_rank_late_in_nearly_all_later_steps(
    steps: range, is_named: bool
) -> None:
    delays = [late(2, step, 1.1 * MIN_NS) for step in steps]
    seen = np.array([[0, 99]] * 8)
    assert (2 in recurring(delays, 8, min_ns=MIN_NS, limits=LIMITS, seen=seen)) == is_named


def test_late_rank_is_named_when_io_stalls_it():
    verdict = only(report_of(dp_trace(every(2, 7, 50 * MS, category=Category.IO))))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("straggler", [2], [0, 1, 3])
    assert (verdict.causes[0].cause.name, verdict.period_steps) == ("block_io", 7)
    assert verdict.causes[0].share == pytest.approx(1.0, abs=0.01)
    assert verdict.late_ms["median"] == pytest.approx(50, abs=0.2)
    assert verdict.nodes == ["host-a"]
    assert verdict.n_incidents == len(range(5, 40, 7))


def test_a_healthy_job_is_healthy():
    for seed in range(5):
        assert report_of(dp_trace(n_ranks=8, seed=seed, jitter_ns=800_000)).healthy


@pytest.mark.parametrize("culprit", range(4))
def test_victims_of_a_nested_group_are_not_named(culprit):
    delays = tuple(every(culprit, 6, 50 * MS))
    verdict = only(report_of(trace_of(Job((TENSOR, TENSOR, DATA), delays=delays))))
    assert verdict.ranks == [culprit]
    assert verdict.victims == [rank for rank in range(4) if rank != culprit]


def test_two_culprits_at_once_are_two_verdicts():
    delays = [*every(1, 5, 40 * MS, category=Category.IO), *every(4, 7, 60 * MS, category=Category.NET)]
    report = report_of(dp_trace(delays, n_ranks=8))
    result = {v.ranks[0]: (v.kind, v.causes[0].cause.name, v.period_steps) for v in report.verdicts}
    assert result == {1: ("straggler", "block_io", 5), 4: ("straggler", "network_wait", 7)}


def test_two_culprits_in_the_same_steps_are_both_named():
    delays = [*every(1, 5, 40 * MS), *every(4, 5, 60 * MS)]
    report = report_of(dp_trace(delays, n_ranks=8))
    assert sorted(verdict.ranks[0] for verdict in report.verdicts) == [1, 4]


@pytest.mark.parametrize(
    ("periods", "firsts"), [((3, 3), (6, 7)), ((2, 2), (6, 7)), ((2, 4), (6, 7)), ((4, 4), (6, 7))]
)
def test_two_culprits_in_turns_are_both_named(periods, firsts):
    """The victims of one rank wait in the steps in which the other rank is late, or in quiet steps."""
    delays = [
        *every(1, periods[0], 40 * MS, first=firsts[0], until=60, category=Category.IO),
        *every(3, periods[1], 60 * MS, first=firsts[1], until=60, category=Category.NET),
    ]
    report = report_of(dp_trace(delays, n_steps=60))
    assert {v.ranks[0]: v.causes[0].cause.name for v in report.verdicts} == {1: "block_io", 3: "network_wait"}


def test_half_of_the_ranks_pausing_is_not_all_of_them_pausing():
    delays = [*every(2, 4, 50 * MS, until=80), *every(3, 4, 50 * MS, until=80)]
    report = report_of(dp_trace(delays, n_steps=80))
    assert sorted(rank for verdict in report.verdicts for rank in verdict.ranks) == [2, 3]


def test_a_rank_that_is_slow_in_every_step_is_named():
    verdict = only(report_of(dp_trace(every(3, 1, 6 * MS, first=0), n_ranks=8)))
    assert (verdict.ranks, verdict.period_steps) == ([3], None)


def test_the_slow_rank_of_two_is_named():
    for culprit in (0, 1):
        trace = dp_trace(every(culprit, 5, 50 * MS, until=60), n_ranks=2, n_steps=60)
        assert only(report_of(trace)).ranks == [culprit]


def test_delays_that_move_between_ranks_name_no_rank():
    rng = np.random.default_rng(3)
    delays = [Delay(int(rng.integers(8)), step, 40 * MS, Category.ON_CPU) for step in range(4, 60, 3)]
    report = report_of(dp_trace(delays, n_ranks=8, n_steps=60))
    verdict = only(report)
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert verdict.evidence.moves is True
    assert verdict.causes[0].cause.name == "host_compute"


def test_a_simultaneous_pause_of_all_ranks_is_not_a_straggler():
    delays = [Delay(rank, step, 200 * MS, Category.IO) for rank in range(4) for step in (12, 24, 36)]
    assert report_of(dp_trace(delays)).healthy


def test_one_long_delay_is_a_remark_when_it_took_little_of_the_time():
    delays = [Delay(2, 100, 1200 * MS)]
    report = report_of(trace_of(Job(data_parallel(work_ns=60 * MS), n_steps=150, delays=tuple(delays))))
    assert report.healthy
    assert [remark["rank"] for remark in report.benign] == [2]


def test_a_single_long_delay_is_reported_as_a_one_off():
    verdict = only(report_of(dp_trace([Delay(2, 20, 3000 * MS, Category.PREEMPTED)])))
    assert (verdict.ranks, verdict.n_incidents) == ([2], 1)
    assert verdict.evidence.is_one_off is True
    assert verdict.causes[0].cause.name == "cpu_preemption"
    assert verdict.confidence < 0.7
    assert "once" in verdict.summary


def test_twice_is_coincidence():
    report = report_of(dp_trace([Delay(2, 12, 50 * MS), Delay(2, 26, 50 * MS)]))
    assert not [verdict for verdict in report.verdicts if verdict.ranks]


def test_warm_up_is_not_judged():
    delays = [Delay(2, step, 300 * MS, Category.ON_CPU) for step in range(3)]
    report = report_of(dp_trace(delays))
    assert report.healthy


def test_a_slow_start_of_all_ranks_is_benign():
    delays = [Delay(rank, step, 90 * MS) for rank in range(4) for step in range(8)]
    delays += [Delay(1, step, 30 * MS) for step in range(8)]
    report = report_of(dp_trace(delays))
    assert report.healthy
    assert report.benign
    assert "warm-up" in str(report.benign[0]["what"])


def test_lateness_below_the_limit_is_not_worth_a_word():
    assert report_of(dp_trace(every(2, 3, LIMITS.min_late_ns // 2))).healthy
    low = replace(LIMITS, min_late_ns=LIMITS.min_late_ns // 4)
    assert only(report_of(dp_trace(every(2, 3, LIMITS.min_late_ns // 2)), limits=low)).ranks == [2]


def test_a_late_victim_of_a_send_is_not_named():
    """Rank 0 is late; rank 1 waits for its data, and therefore also enters the all-reduce late."""
    program = (
        Call(((0, 1), (2, 3)), op=Op.SEND, count=7, waits=True),
        Call(((0, 1, 2, 3),), count=9, waits=True),
    )
    verdict = only(report_of(trace_of(Job(program, delays=tuple(every(0, 6, 50 * MS))))))
    assert verdict.ranks == [0]
    assert 1 in verdict.victims


def test_a_rank_that_is_late_repeatedly_among_quiet_ranks_recurs():
    result = [late(2, step) for step in range(0, 30, 5)]
    assert list(recurring(result, 8, min_ns=MIN_NS, limits=LIMITS)) == [2]


@pytest.mark.parametrize("n_ranks", [2, 8, 64])
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_late_steps_that_all_ranks_share_are_chance(n_ranks, spread):
    """If all ranks of a job are late at times, by equal or varying amounts, a rank is rarely named."""
    n_jobs, n_named = 300, 0
    for seed in range(n_jobs):
        rng = np.random.default_rng(seed)
        sizes = 50 * MS * rng.lognormal(0, spread, 60 if n_ranks < 64 else 24)
        result = [late(int(rng.integers(n_ranks)), step, float(ns)) for step, ns in enumerate(sizes)]
        n_named += bool(recurring(result, n_ranks, min_ns=MIN_NS, limits=LIMITS))
    family_chance = 4.2 * LIMITS.chance
    assert n_named <= n_jobs * family_chance + 3 * np.sqrt(n_jobs * family_chance)


def test_small_delays_of_other_ranks_do_not_hide_large_delays():
    result = [late(2, step, 300 * MS) for step in range(0, 30, 5)]
    result += [late(rank, step, 5 * MS) for rank in (0, 1, 3) for step in range(1, 30, 4)]
    assert 2 in recurring(result, 4, min_ns=MIN_NS, limits=LIMITS)


def test_small_delays_of_all_ranks_do_not_hide_few_large_delays_of_a_rank():
    large = [late(2, step, 290 * MS) for step in range(3, 32, 14)]
    small = [late(rank, step, 8 * MS) for rank in range(4) for step in range(rank, 32, 7)]
    named = recurring([*large, *small], 4, min_ns=4 * MS, limits=LIMITS)
    assert {rank: [delay.step for delay in delays] for rank, delays in named.items()} == {2: [3, 17, 31]}


def test_a_rank_with_small_and_far_longer_delays_beyond_chance_keeps_both():
    large = [late(2, step, 290 * MS) for step in range(3, 60, 14)]
    small = [late(2, step, 15 * MS) for step in range(1, 60, 5)]
    assert len(recurring([*large, *small], 4, min_ns=4 * MS, limits=LIMITS)[2]) == len(large) + len(small)


def test_far_longer_delays_of_all_ranks_are_chance():
    large = [late(rank, step, 290 * MS) for rank in range(4) for step in range(rank, 60, 17)]
    small = [late(rank, step, 8 * MS) for rank in range(4) for step in range(rank, 60, 7)]
    assert not recurring([*large, *small], 4, min_ns=4 * MS, limits=LIMITS)


@pytest.mark.parametrize(("excess_ms", "is_doubtful"), [(60, True), (20, False)])
def test_two_late_steps_are_doubtful_if_they_took_a_twentieth_of_the_time(excess_ms, is_doubtful):
    result = [late(2, step, excess_ms * MS) for step in (5, 10)]
    costly_ns = 0.05 * 2_000 * MS
    doubtful = with_unproven_delays(
        result, {}, min_ns=10 * MS, long_ns=1_000 * MS, costly_ns=costly_ns, limits=LIMITS
    )
    assert list(doubtful) == ([2] if is_doubtful else [])


def test_fewer_than_three_late_steps_name_no_rank():
    assert not recurring([late(2, 5), late(2, 10)], 100, min_ns=MIN_NS, limits=LIMITS)


def test_a_one_off_is_a_long_isolated_delay():
    long = LIMITS.one_off_ns
    assert one_offs([late(1, 5, long)], long, LIMITS)
    assert not one_offs([late(1, 5, long - 1)], long, LIMITS)
    assert not one_offs([late(1, step, long) for step in range(5, 15)], long, LIMITS)
    mixed = [late(1, 5, 20 * long), *(late(1, step, long) for step in range(9))]
    assert len(one_offs(mixed, long, LIMITS)) == 1


@pytest.mark.parametrize("rate", [0.3, 1.0, 5.0, 50.0])
def test_the_rate_of_all_ranks_is_estimated_from_the_quieter_ranks(rate):
    counts = np.sort(np.random.default_rng(0).poisson(rate, 100_000))
    assert _rate_of_quiet(float(counts[:75_000].mean())) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize(
    ("least", "rate"), [(0, 1.0), (1, 0.25), (4, 0.5), (9, 3.0), (230, 200.0), (600, 700.0)]
)
def test_the_poisson_tail_matches_simulated_counts(least, rate):
    drawn = np.random.default_rng(1).poisson(rate, 400_000) >= least
    assert _poisson_tail(least, rate) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 632 + 1e-6)


def test_the_chance_test_works_for_long_traces():
    assert not beyond_chance(1000, [1000] * 7, LIMITS.chance)
    assert beyond_chance(2000, [1000] * 7, LIMITS.chance)
    assert not beyond_chance(200, [190, 195, 205, 210, 199, 201, 198], LIMITS.chance)


@pytest.mark.parametrize(("least", "n", "among"), [(2, 3, 2), (5, 40, 20), (560, 1024, 2), (3, 2000, 2000)])
def test_the_binomial_tail_matches_the_exact_sum(least, n, among):
    exact = sum(comb(n, k) * (among - 1) ** (n - k) for k in range(least, n + 1)) / among**n
    assert _binomial_tail(least, n, 1 / among) == pytest.approx(exact, rel=1e-9)


def test_five_late_steps_of_one_rank_among_thousands_are_chance():
    """Of 5,120 ranks with 0.35 late steps each on average, one has five in every sixth job."""
    counts = np.zeros(5_119, np.int64)
    counts[:1_400], counts[1_400:1_600] = 1, 2
    assert not beyond_chance(5, counts, LIMITS.chance)
    assert beyond_chance(9, counts, LIMITS.chance)


def test_a_rank_among_late_peers_needs_more_late_steps_to_stand_out():
    assert beyond_chance(3, [0, 0, 0], LIMITS.chance)
    assert not beyond_chance(6, [1, 1, 0, 2, 1, 1, 1], LIMITS.chance)
    assert beyond_chance(8, [1, 1, 0, 2, 1, 1, 1], LIMITS.chance)


def test_few_late_steps_within_chance_are_inconclusive():
    delays = [*(Delay(1, step, 60 * MS) for step in (8, 17, 29)), Delay(2, 22, 60 * MS)]
    verdict = only(report_of(dp_trace(delays)))
    assert (verdict.kind, verdict.ranks) == ("inconclusive", [])
    assert verdict.evidence.suspects == [1]
    assert "coincidence" in verdict.abstained_because


def test_two_late_steps_name_no_rank_and_are_inconclusive_if_they_took_much_of_the_time():
    delays = [Delay(1, 8, 60 * MS), Delay(1, 17, 60 * MS), Delay(2, 22, 60 * MS)]
    verdict = only(report_of(dp_trace(delays)))
    assert (verdict.kind, verdict.evidence.suspects) == ("inconclusive", [1])
    assert report_of(dp_trace(delays, n_steps=500)).healthy


def test_long_delays_that_two_ranks_have_once_each_accuse_neither():
    delays = [Delay(rank, step, 3000 * MS, Category.ON_CPU) for rank, step in ((1, 12), (2, 25))]
    verdict = only(report_of(dp_trace(delays)))
    assert (verdict.kind, verdict.ranks) == ("inconclusive", [])
    assert verdict.evidence.suspects == [1, 2]


def test_long_delays_that_move_between_ranks_name_no_rank():
    """All ranks collect garbage at times: three times on one rank and once or twice on the others is chance."""
    turns = [(1, 6), (0, 10), (1, 14), (2, 18), (3, 22), (0, 26), (1, 30), (3, 34)]
    delays = [Delay(rank, step, 1500 * MS, Category.ON_CPU) for rank, step in turns]
    report = report_of(dp_trace(delays))
    assert not [verdict for verdict in report.verdicts if verdict.ranks]
    assert [verdict.kind for verdict in report.verdicts] == ["imbalance"]


def test_a_one_off_of_another_rank_has_its_own_verdict():
    delays = [*every(1, 5, 1500 * MS), Delay(3, 33, 6000 * MS)]
    assert [verdict.ranks for verdict in report_of(dp_trace(delays)).verdicts] == [[1], [3]]


def test_a_one_off_of_all_ranks_of_a_node_names_these_ranks():
    delays = [Delay(rank, 20, 3000 * MS, Category.IO) for rank in (2, 3)]
    two_hosts = {"node": (0, 0, 1, 1), "offset_ns": (0, 0)}
    assert {
        rank for verdict in report_of(dp_trace(delays, **two_hosts)).verdicts for rank in verdict.ranks
    } == {2, 3}
    four_hosts = {"node": (0, 0, 0, 0, 1, 1, 1, 1), "offset_ns": (0, 0), "n_ranks": 8}
    assert not [verdict for verdict in report_of(dp_trace(delays, **four_hosts)).verdicts if verdict.ranks]
