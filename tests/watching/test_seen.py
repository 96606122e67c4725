"""The view of a running job: counts, lateness and percentiles of known values; and incoming rows."""

import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category, CollectiveFlag, Op
from stallscope.events.trace import Clock, Trace
from stallscope.live.job_totals import WINDOW_NS, LiveState
from stallscope.live.tail import TraceTail
from stallscope.live.trace_records import records, verdict_record
from stallscope.store import node
from stallscope.store.node import NodeTrace

from ..diagnose.builders import MS, dp_trace, every


def fed(*batches: Trace) -> LiveState:
    observed = LiveState()
    for batch in batches:
        observed.feed(batch)
    return observed


def test_rounds_and_lateness_are_listed_by_rank():
    trace = dp_trace(every(2, 4, 50 * MS))
    lines = {line.rank: line for line in fed(trace).ranks()}
    assert {line.n_rounds for line in lines.values()} == {40 * 3}
    assert lines[2].worst_ms == pytest.approx(50, abs=1)
    assert all(lines[rank].worst_ms < 1 for rank in (0, 1, 3))


def test_batches_or_one_whole_give_the_same_lines():
    trace = dp_trace(every(2, 4, 50 * MS))
    half = len(trace.collectives) // 2
    first = replace(trace, collectives=trace.collectives[:half], ends_ns=())
    second = replace(trace, collectives=trace.collectives[half:], processes=trace.processes[:0])
    assert fed(first, second).ranks() == fed(trace).ranks()


def test_the_time_to_the_last_rank_has_the_right_percentiles():
    trace = dp_trace()
    rows = trace.collectives
    last = {seq: rows["ts_ns"][rows["seq"] == seq].max() for seq in np.unique(rows["seq"]).tolist()}
    ahead = [(last[row["seq"]] - row["ts_ns"]) / 1e6 for row in rows.tolist() and rows if row["seq"] > 0]
    (line, *_) = fed(trace).operations()
    assert (line.name, line.n_calls) == ("all_reduce", 480)
    for q in (0.5, 0.95, 0.99):
        assert line.quantile_ms(q) == pytest.approx(np.quantile(ahead, q))


def calls(*durations_ms: float, op: Op = Op.ALLOC) -> layout.Array:
    rows = layout.empty(layout.CALLS, len(durations_ms))
    rows["ts_ns"] = 10**9 + np.arange(len(rows))
    rows["duration_ns"] = np.array(durations_ms) * 1e6
    rows["pid"], rows["op"], rows["symbol"] = 7, op, 1
    return rows


def test_the_first_call_of_a_function_is_apart():
    (line,) = fed(Trace(calls=calls(250.0, 1.0, 2.0, 3.0))).operations()
    assert (line.name, line.first_ms, line.only_slow) == ("allocate, free", 250.0, True)
    assert line.timed_ms.tolist() == [1.0, 2.0, 3.0]


def test_calls_older_than_ten_seconds_count_only_in_totals():
    early, late = calls(9.0, 1.0), calls(2.0)
    late["ts_ns"] += 2 * WINDOW_NS
    (line,) = fed(Trace(calls=early), Trace(calls=late)).operations()
    assert line.timed_ms.tolist() == [2.0]
    assert line.first_ms == 9.0


def test_preempting_processes_are_listed_with_their_time():
    rows = layout.empty(layout.OFFCPU, 3)
    rows["ts_ns"], rows["category"], rows["by_pid"] = 10**9, Category.PREEMPTED, (5, 5, 6)
    rows["by_comm"], rows["duration_ns"] = (b"hog", b"hog", b"other"), (30 * MS, 12 * MS, 1 * MS)
    assert fed(Trace(offcpu=rows)).hosts() == [("hog", 5, 42.0), ("other", 6, 1.0)]


def test_shares_are_those_of_the_last_ten_seconds():
    rows = layout.empty(layout.SNAPSHOTS, 2)
    rows["ts_ns"], rows["pid"], rows["alive"] = (10**9, 2 * 10**9), 1000, 1
    rows["ledger_ns"][1, Category.IO - 1] = 750 * MS
    rows["ledger_ns"][1, Category.ON_CPU - 1] = 250 * MS
    trace = replace(dp_trace(n_steps=0), snapshots=rows)
    (line, *_) = fed(trace).ranks()
    assert line.shares[Category.IO - 1] == 0.75


def test_an_ended_process_is_not_listed_as_alive():
    rows = layout.empty(layout.SNAPSHOTS, 1)
    rows["ts_ns"], rows["pid"], rows["alive"] = 10**12, 1002, 0
    observed = fed(dp_trace(), Trace(snapshots=rows, nodes=("host-a",)))
    assert 2 not in {line.rank for line in observed.ranks() if line.is_alive}


def test_rows_are_followed_as_they_are_committed(tmp_path):
    trace = dp_trace(every(2, 7, 50 * MS))
    half = len(trace.collectives) // 2
    store = NodeTrace(tmp_path / "trace.db")
    node.add(store, replace(trace, collectives=trace.collectives[:half], lost={"arrivals": 3}))
    with node.reading(tmp_path / "trace.db") as db:
        following = TraceTail(db)
        first = following.batch()
        assert np.array_equal(first.collectives["ts_ns"], trace.collectives["ts_ns"][:half])
        assert first.lost == {"arrivals": 3}
        assert first.nodes[1] == "host-a"
        nothing = following.batch()
        assert not len(nothing.collectives)
        assert not nothing.lost
        number = store.node("host-a")
        more = trace.collectives[half:].copy()
        more["node"] = number
        store.append(layout.COLLECTIVES, more)
        store.commit()
        assert len(following.batch().collectives) == len(trace.collectives) - half
        since = int(trace.collectives["ts_ns"][-10])
        assert len(TraceTail(db, since).batch().collectives) == 10
    store.close()


def test_records_carry_names_and_null():
    trace = dp_trace(n_steps=1)
    output = list(records(trace, Clock(0, 0, 1_700_000_000 * 10**9)))
    first = next(entry for entry in output if entry["record"] == "collectives")
    assert first["op"] == "all_reduce"
    assert first["node"] == "host-a"
    assert first["time"].startswith("2023-11-14T22:13:30")
    assert first["gpu_start_ns"] is None
    assert len(first["comm_hash"]) == 16
    assert sum(entry["record"] == "processes" for entry in output) == 4


def test_a_change_is_a_record_with_the_verdict():
    own = {"incident": "i1", "change": "opened", "state": "open", "closed_because": None}
    output = verdict_record(10**18, {"ranks": [2]} | own)
    assert (output["record"], output["change"], output["verdict"]) == ("verdict", "opened", {"ranks": [2]})


def test_the_late_rank_of_a_job_that_ran_before_is_an_estimate():
    trace = dp_trace(every(2, 4, 50 * MS))
    trace.collectives["flags"] = int(CollectiveFlag.LATE_ATTACH)
    trace.collectives["seq"][trace.collectives["pid"] == 1002] += 5
    observed = fed(trace)
    assert observed.was_late
    worst_ms = {line.pid: line.worst_ms or 0.0 for line in observed.ranks()}
    assert worst_ms.pop(1002) > 40
    assert max(worst_ms.values()) < 5
    assert {line.job for line in observed.ranks()} == {0}


def test_ended_ranks_of_a_job_that_ran_before_stay_in_their_job():
    first, second = dp_trace(every(2, 4, 50 * MS)), dp_trace(every(1, 4, 50 * MS), n_ranks=2)
    for name in ("collectives", "processes", "snapshots"):
        getattr(second, name)["pid"] += 1000
    for trace in (first, second):
        trace.collectives["flags"] = int(CollectiveFlag.LATE_ATTACH)
        trace.collectives["comm_hash"] = 0
    observed = fed(first)
    jobs = {line.pid: line.job for line in observed.ranks()}
    assert (set(jobs.values()), observed.n_communicators) == ({0}, 1)
    ended = layout.empty(layout.SNAPSHOTS, 4)
    ended["pid"], ended["alive"] = sorted(jobs), 0
    ended["ts_ns"] = observed.now_ns
    second.collectives["ts_ns"] += observed.now_ns + 2 * WINDOW_NS
    observed.feed(Trace(snapshots=ended))
    observed.ranks()
    observed.feed(second)
    lines = observed.ranks()
    assert {line.pid: line.job for line in lines if line.pid in jobs} == jobs
    assert {line.job for line in lines if line.pid not in jobs} == {1}
    assert observed.n_communicators == 2


def test_changed_process_rows_are_returned_once(tmp_path):
    """The agent writes both into the row that is there."""
    trace = dp_trace()
    trace.processes["rank"][3] = UNKNOWN
    path = tmp_path / "trace.db"
    node.write(path, trace)
    with node.reading(path) as db:
        following = TraceTail(db)

        def told() -> tuple[int, np.ndarray]:
            batch = following.batch()
            return len(batch.processes), following.with_changes(batch).processes

        assert [len(rows) for _, rows in (told(), told())] == [4, 0]
        with sqlite3.connect(path) as writing:
            writing.execute("UPDATE processes SET ended_ns = 77 WHERE pid = 1001")
            writing.execute("UPDATE processes SET rank = 3 WHERE pid = 1003")
        writing.close()
        n_new, changed = told()
        assert n_new == 0
        assert changed[["pid", "rank", "ended_ns"]].tolist() == [(1001, 1, 77), (1003, 3, UNKNOWN)]
        assert len(told()[1]) == 0


def test_an_end_between_the_two_reads_is_not_lost(tmp_path):
    path = tmp_path / "trace.db"
    node.write(path, dp_trace())
    with node.reading(path) as db:
        following = TraceTail(db)
        batch = following.batch()
        with sqlite3.connect(path) as writing:
            writing.execute("UPDATE processes SET ended_ns = 77 WHERE pid = 1001")
        writing.close()
        known = following.with_changes(batch).processes
        assert known["ended_ns"][known["pid"] == 1001].tolist() == [UNKNOWN, 77]
