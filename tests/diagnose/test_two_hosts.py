"""Recordings of one host, changed as if half of the ranks ran on a host whose clock is ahead and drifts."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.timeline.clocks import aligned
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.layout import TABLES, UNKNOWN, Array
from stallscope.events.trace import Clock, Trace
from stallscope.importers import importer_for

from .reports import blamed, report_of

AHEAD_NS, DRIFT = 80_000_000, 20e-6
MOMENTS = ("ts_ns", "ended_ns", "wait_enter_ns", "wait_leave_ns", "in_call_since_ns")
MOVED_RANKS = (2, 3)

pytestmark = pytest.mark.shared


def told_by_two_hosts(trace: Trace, *, ahead_ns: int = AHEAD_NS, drift: float = DRIFT) -> Trace:
    """The trace with ranks 2 and 3 on a second host, whose clock was `ahead_ns` ahead when the job began.

    Durations are left as they are: the drift of 20 ppm adds less to them than a clock can resolve.
    """
    begin = int(trace.collectives["ts_ns"].min())
    moved = trace.processes["pid"][np.isin(trace.processes["rank"], MOVED_RANKS)]

    def theirs(ns: Array) -> Array:
        return ns + ahead_ns + np.rint(drift * (ns - begin)).astype(np.int64)

    out = {}
    for table in TABLES:
        rows = getattr(trace, table.name).copy()
        on_second = np.isin(rows["pid"], moved)
        rows["node"][on_second] = 1
        for name in set(MOMENTS) & set(rows.dtype.names or ()):
            known = on_second & (rows[name] != UNKNOWN)
            rows[name][known] = theirs(rows[name][known])
        out[table.name] = rows
    ends = np.array(trace.ends_ns, np.int64)
    second = tuple(
        Clock(1, int(theirs(np.array(clock.monotonic_ns))), clock.wall_ns, clock.error_ns)
        for clock in trace.clocks
    )
    return replace(
        trace,
        **out,
        nodes=(*trace.nodes, "second-host"),
        clocks=(*trace.clocks, *second),
        ends_ns=(*trace.ends_ns, *theirs(ends).tolist()),
    )


@pytest.fixture(params=["nested_tp", "pipeline_imbalance"])
def trace(request, recordings):
    folder = recordings / request.param
    return importer_for(folder).read(folder)


def test_the_answer_is_that_of_one_host(trace):
    assert blamed(report_of(told_by_two_hosts(trace))) == blamed(report_of(trace))


def test_the_cost_is_that_of_one_host(trace):
    (before,), (after,) = report_of(trace).verdicts, report_of(told_by_two_hosts(trace)).verdicts
    assert after.cost.gpu_seconds == pytest.approx(before.cost.gpu_seconds, rel=0.02)
    assert after.evidence.slow_stage == before.evidence.slow_stage


@pytest.mark.parametrize(("ahead_ns", "drift"), [(AHEAD_NS, DRIFT), (-AHEAD_NS, -DRIFT), (10**15, 0.0)])
def test_the_offset_lies_within_its_own_error(trace, ahead_ns, drift):
    moved = told_by_two_hosts(trace, ahead_ns=ahead_ns, drift=drift)
    offset = aligned(timeline_of(moved), moved).offsets[1]
    begin, end = int(trace.collectives["ts_ns"].min()), int(trace.collectives["ts_ns"].max())
    for moment in np.linspace(begin, end, 20):
        true = ahead_ns + drift * (moment - begin)
        result = float(offset.ns(np.array([moment + true]))[0])
        assert abs(result - true) <= offset.error_ns


def test_the_error_is_small_enough_to_see_a_delay(recordings):
    """Lateness counts from 2 ms on, and from twice the error: where both hosts wait for the same rounds, that is less.

    Point-to-point calls only bound the offset, by how long their receivers wait.
    """
    folder = recordings / "nested_tp"
    moved = told_by_two_hosts(importer_for(folder).read(folder))
    assert aligned(timeline_of(moved), moved).error_ns[1] < 1_000_000
