"""Excess: the additional time of a rank over its peers, in total and by category."""

import numpy as np
import pytest

from stallscope.diagnose.timeline.excess import excess_ns, ledger_excess_ns
from stallscope.diagnose.timeline.programs import programs_of
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.names import Category, Op

from .builders import MS, Call, Delay, Job, dp_trace, trace_of


def excess_of(trace):
    timeline = timeline_of(trace)
    programs = programs_of(timeline)
    return timeline, programs, excess_ns(timeline, programs, timeline.self_ns)


def row_of(line, rank, seq):
    return int(np.flatnonzero((line.rank[line.process] == rank) & (line.rows["seq"] == seq))[0])


def ledger_excess_of(line, plan, rows):
    return (part.sum(axis=0) for part in ledger_excess_ns(line, plan, rows))


def test_only_the_late_rank_has_an_excess_its_victims_have_none():
    line, _, excess = excess_of(dp_trace([Delay(2, 6, 25 * MS)], jitter_ns=0))
    late = row_of(line, 2, 18)
    assert excess[late] == 25 * MS
    assert not np.delete(excess, late).any()


def test_the_excess_is_in_the_category_of_the_delay():
    delays = [Delay(2, 6, 25 * MS, Category.IO, n_syncs=3), Delay(2, 6, 5 * MS, Category.PREEMPTED, call=1)]
    line, plan, _ = excess_of(dp_trace(delays, jitter_ns=0))
    ledger, counts = ledger_excess_of(line, plan, np.arange(row_of(line, 2, 18), row_of(line, 2, 20) + 1))
    wanted = np.zeros(len(ledger))
    wanted[Category.IO - 1], wanted[Category.PREEMPTED - 1] = 25 * MS, 5 * MS
    wanted[Category.WAIT_GPU - 1] = ledger[Category.WAIT_GPU - 1]
    np.testing.assert_array_equal(ledger, wanted)
    assert counts.tolist() == [3, 0, 0, 0]


def test_a_victim_has_no_excess_apart_from_waits():
    line, plan, _ = excess_of(dp_trace([Delay(2, 6, 25 * MS)], jitter_ns=0))
    ledger, _ = ledger_excess_of(line, plan, np.arange(row_of(line, 0, 19), row_of(line, 0, 21) + 1))
    own = np.delete(ledger, Category.WAIT_GPU - 1)
    assert own.sum() == 0


def test_a_rank_without_peers_is_held_against_its_own_usual_step():
    first, second = ((0,),), ((1,),)
    program = (
        Call(first, count=4),
        Call(second, count=5),
        Call(second, count=6),
        Call(((0, 1),), op=Op.SEND, count=7, waits=True),
    )
    line, _, excess = excess_of(
        trace_of(Job(program, n_ranks=2, delays=(Delay(1, 12, 30 * MS, call=2),), jitter_ns=0))
    )
    assert excess.max() == pytest.approx(30 * MS)
    assert line.rank[line.process[int(np.argmax(excess))]] == 1


def test_an_interval_with_a_lost_record_is_not_compared():
    trace = dp_trace([Delay(2, 6, 25 * MS)], jitter_ns=0)
    keep = ~((trace.collectives["pid"] == 1002) & (trace.collectives["seq"] == 17))
    trace = type(trace)(**{**trace.__dict__, "collectives": trace.collectives[keep]})
    line, _, excess = excess_of(trace)
    assert excess[row_of(line, 2, 18)] == 0
