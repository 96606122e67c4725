"""Changes that must not change the blame: other numbers, other clocks, more healthy ranks, a shorter trace."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.demo.recorded_job import recorded
from stallscope.diagnose.report.verdict import Report
from stallscope.events import layout
from stallscope.events.layout import TABLES, UNKNOWN
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

from .builders import MS, Call, Job, dp_trace, every, trace_of
from .reports import blamed, only, report_of

FEW = settings(max_examples=8)
NESTED = (
    Call(((0, 1), (2, 3)), count=10, waits=True),
    Call(((0, 2), (1, 3)), count=500, waits=True),
)
BUILT = {
    "data": dp_trace(every(2, 5, 50 * MS, category=Category.IO)),
    "nested": trace_of(Job(NESTED, delays=tuple(every(1, 4, 50 * MS)))),
    "healthy": dp_trace(),
}
TIMES_OF_EVENTS = ("ts_ns", "ended_ns", "wait_enter_ns", "wait_leave_ns", "in_call_since_ns")


NAMES = pytest.mark.parametrize("name", [*BUILT, "shipped"])


@cache
def shipped() -> Trace:
    return recorded()


def trace_named(name: str) -> Trace:
    return shipped() if name == "shipped" else BUILT[name]


@cache
def report_named(name: str) -> Report:
    return report_of(trace_named(name))


def shifted(trace: Trace, ns: int) -> Trace:
    """The trace as recorded by a host that started earlier or later."""
    out = {}
    for table in TABLES:
        rows = getattr(trace, table.name).copy()
        for name in TIMES_OF_EVENTS:
            if name in (rows.dtype.names or ()):
                rows[name] = np.where(rows[name] == UNKNOWN, UNKNOWN, rows[name] + ns)
        out[table.name] = rows
    clocks = tuple(replace(clock, monotonic_ns=clock.monotonic_ns + ns) for clock in trace.clocks)
    return replace(trace, **out, clocks=clocks, ends_ns=tuple(end + ns for end in trace.ends_ns))


def renumbered(trace: Trace, new: list[int]) -> Trace:
    """The trace with rank i numbered new[i]; process numbers change along."""
    pids = np.sort(trace.processes["pid"])
    rank_of = dict(zip(trace.processes["pid"].tolist(), trace.processes["rank"].tolist(), strict=True))
    new_pid = {pid: 50_000 + new[rank_of[pid]] for pid in pids.tolist()}
    out = {}
    for table in TABLES:
        rows = getattr(trace, table.name).copy()
        rows["pid"] = [new_pid[pid] for pid in rows["pid"].tolist()]
        if table is layout.PROCESSES:
            rows["rank"] = [new[rank] for rank in rows["rank"].tolist()]
        out[table.name] = rows
    return replace(trace, **out)


def test_the_shipped_recording_is_explained():
    verdict = only(report_named("shipped"))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("straggler", [2], [0, 1, 3])
    assert verdict.period_steps == 14


@NAMES
@FEW
@given(new=st.permutations(range(4)))
def test_renumbering_the_ranks_renumbers_the_blame(name, new):
    before = blamed(report_named(name))
    wanted = sorted((kind, tuple(new[rank] for rank in ranks), *rest) for kind, ranks, *rest in before)
    assert blamed(report_of(renumbered(trace_named(name), list(new)))) == wanted


@NAMES
@FEW
@given(ns=st.integers(-5 * 10**9, 10**15))
def test_the_time_of_day_does_not_matter(name, ns):
    begin = int(trace_named(name).collectives["ts_ns"].min())
    before, after = report_named(name), report_of(shifted(trace_named(name), max(ns, 1 - begin)))
    assert blamed(after) == blamed(before)
    for entry, other in zip(before.verdicts, after.verdicts, strict=True):
        assert other.cost == entry.cost
        assert other.since_ns == pytest.approx(entry.since_ns, abs=1000)


@FEW
@given(seed=st.integers(0, 1000), n_more=st.integers(1, 6))
def test_more_healthy_ranks_do_not_change_the_blame(seed, n_more):
    delays = every(2, 5, 50 * MS, category=Category.IO)
    trace = dp_trace(delays, n_ranks=4 + n_more, seed=seed)
    assert blamed(report_of(trace)) == blamed(report_named("data"))


def test_a_healthy_rank_added_to_the_recording_does_not_change_the_blame():
    """A fifth rank that makes the calls of rank 0, a little later."""
    trace = shipped()
    rows = trace.collectives
    more = rows[rows["pid"] == trace.processes["pid"][trace.processes["rank"] == 0][0]].copy()
    more["pid"], more["comm_rank"] = 77_777, 4
    more["ts_ns"] += 50_000
    process = trace.processes[:1].copy()
    process["pid"], process["rank"] = 77_777, 4
    joined = replace(
        trace,
        collectives=np.concatenate([rows, more]),
        processes=np.concatenate([trace.processes, process]),
    )
    assert blamed(report_of(joined)) == blamed(report_named("shipped"))


@NAMES
@FEW
@given(share=st.floats(0.6, 1.0))
def test_cutting_the_trace_at_a_round_leaves_the_blame(name, share):
    rows = trace_named(name).collectives
    hashes = np.unique(rows["comm_hash"]).tolist()
    cut = {hash_: int(share * rows["seq"][rows["comm_hash"] == hash_].max()) for hash_ in hashes}
    kept = rows[rows["seq"] <= np.array([cut[hash_] for hash_ in rows["comm_hash"].tolist()])]
    end_ns = int(kept["ts_ns"].max())
    report = report_of(replace(trace_named(name), collectives=kept, ends_ns=(end_ns,)))
    assert {entry[:2] for entry in blamed(report)} == {entry[:2] for entry in blamed(report_named(name))}


@FEW
@given(offset_ns=st.integers(-(10**6), 10**6), drift=st.floats(-2e-5, 2e-5))
def test_gpu_clocks_do_not_matter(offset_ns, drift):
    late = {(1, step): 4 * MS for step in range(10, 60)}
    program = (
        Call(((0, 1, 2, 3),), work_ns=500_000, gpu_ns=3 * MS),
        Call(((0, 1, 2, 3),), count=7, waits=True),
    )
    trace = trace_of(Job(program, n_steps=60, gpu_late_ns=late, has_gpu_times=True))
    wanted = blamed(report_of(trace))
    own_rows = trace.collectives["pid"] == 1001
    for column in ("gpu_start_ns", "gpu_end_ns"):
        values = trace.collectives[column][own_rows]
        trace.collectives[column][own_rows] = values + offset_ns + (drift * values).astype(np.int64)
    assert wanted
    assert blamed(report_of(trace)) == wanted


def test_a_ring_of_sends_can_be_renumbered():
    ring = Call(((0, 1), (1, 2), (2, 3), (3, 0)), op=Op.SEND, waits=True)
    trace = trace_of(Job((ring,), delays=tuple(every(2, 7, 50 * MS))))
    assert [v.ranks for v in report_of(renumbered(trace, [2, 3, 1, 0])).verdicts] == [[1]]
