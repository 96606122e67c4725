"""Cost: the union of the waits, 0 where no rank waited, and a bound where the cost is unknown."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallscope.diagnose.cost.waiting import longest_ns
from stallscope.events.names import Op

from .builders import MS, Call, Job, data_parallel, dp_trace, every, trace_of
from .reports import only, report_of

INTERVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 40)), max_size=20)


@given(INTERVALS)
def test_of_intervals_that_overlap_the_longest_counts(intervals):
    columns = np.array(intervals, np.int64).reshape(-1, 3)
    result = longest_ns(columns[:, 0], columns[:, 1], columns[:, 2], n_groups=3)
    expected = [0, 0, 0]
    for group in range(3):
        own_rows = sorted((begin, end) for g, begin, end in intervals if g == group and end > begin)
        reached, longest = -1, 0
        for begin, end in own_rows:
            if begin >= reached:
                expected[group] += longest
                longest = 0
            reached, longest = max(reached, end), max(longest, end - begin)
        expected[group] += longest
    assert result.tolist() == expected


def test_long_intervals_of_large_times_are_exact():
    base = 1 << 60
    begin = np.array([base, base + 5, base + 100])
    assert longest_ns(np.zeros(3, np.int64), begin, begin + 10, n_groups=1).tolist() == [20]


@pytest.mark.parametrize(("second_ms", "together_ms"), [(50, 50), (20, 50), (80, 80)])
def test_the_cost_of_two_ranks_late_together_is_counted_once(second_ms, together_ms):
    delays = (*every(1, 5, 50 * MS), *every(2, 5, second_ms * MS))
    first, second = report_of(dp_trace(delays, n_ranks=6)).verdicts
    n_delays = len(range(5, 40, 5))
    said_s = first.cost.gpu_seconds + second.cost.gpu_seconds
    waits_itself_ms = abs(50 - second_ms)  # the rank that is less late waits for the other rank
    assert said_s == pytest.approx(n_delays * (4 * together_ms + waits_itself_ms) / 1e3, rel=0.1)
    assert second.cost.gpu_seconds >= n_delays * 4 * min(second_ms, 50) / 2e3 * 0.9


def test_a_late_step_of_many_rounds_costs_one_delay_for_each_victim():
    """Six rounds show each delay, 2 ms apart; from the first one's begin to the last one's end is the union."""
    program = data_parallel(n_buckets=6)
    verdict = only(report_of(trace_of(Job(program, delays=tuple(every(2, 7, 50 * MS))))))
    n_delays = len(range(5, 40, 7))
    assert verdict.n_late_rounds == 6 * n_delays
    delay_s, union_s = 0.050, 0.050 + 5 * 0.002
    assert n_delays * 3 * delay_s * 0.99 <= verdict.cost.gpu_seconds <= n_delays * 3 * union_s * 1.02
    assert verdict.cost.is_lower_bound is False


def test_price_and_hours_give_money():
    trace = dp_trace(every(2, 7, 50 * MS))
    cost = only(report_of(trace, usd_per_gpu_hour=3.6)).cost
    assert cost.usd == pytest.approx(cost.gpu_seconds * 0.001, abs=1e-4)
    hours = (trace.collectives["ts_ns"].max() - trace.collectives["ts_ns"].min()) / 3.6e12
    assert cost.usd_per_hour == pytest.approx(cost.gpu_seconds * 0.001 / hours, rel=0.001)
    assert only(report_of(trace)).cost.usd is None


def test_absorbed_lateness_has_no_cost():
    """Rank 2 is late in the first all-reduce; all have 80 ms of work before they wait for it."""
    everyone = ((0, 1, 2, 3),)
    own_first = (2 * MS, 2 * MS, 2 * MS, 2 * MS)
    program = (
        Call(everyone, count=1, work_ns=own_first),
        Call(everyone, count=2, work_ns=(80 * MS, 80 * MS, 30 * MS, 80 * MS)),
        Call(everyone, count=3, waits=True),
    )
    delays = tuple(every(2, 1, 50 * MS, first=0))
    report = report_of(trace_of(Job(program, delays=delays)))
    assert sum(verdict.cost.gpu_seconds for verdict in report.verdicts if verdict.cost) < 0.05


def test_cost_with_sends_is_the_additional_duration_of_the_steps():
    program = (
        Call(((0, 1), (2, 3)), op=Op.SEND, count=7, waits=True),
        Call(((0, 1, 2, 3),), count=9, waits=True),
    )
    delays = tuple(every(0, 6, 50 * MS))
    verdict = only(report_of(trace_of(Job(program, delays=delays))))
    assert verdict.cost.is_lower_bound is False
    assert verdict.cost.gpu_seconds == pytest.approx(len(delays) * 0.050 * 3, rel=0.05)


def test_the_cost_of_a_job_that_never_waits_is_a_bound():
    program = (Call(((0, 1, 2, 3),), count=3), Call(((0, 1, 2, 3),), count=4))
    delays = tuple(every(0, 6, 50 * MS))
    verdict = only(report_of(trace_of(Job(program, delays=delays))))
    assert verdict.cost.is_lower_bound is True
    assert verdict.cost.gpu_seconds <= verdict.cost.at_most_gpu_seconds <= len(delays) * 0.050 * 3 * 1.05


def test_cost_grows_with_the_number_of_victims():
    few, many = (only(report_of(dp_trace(every(1, 7, 50 * MS), n_ranks=n))).cost.gpu_seconds for n in (4, 16))
    assert many / few == pytest.approx(15 / 3, rel=0.05)
