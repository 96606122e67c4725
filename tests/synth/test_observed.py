"""The rows that a capture would have written: losses, late agents, rows on nodes, processes and clocks."""

import numpy as np
import pytest

from stallscope.events import layout
from stallscope.events.names import CollectiveFlag
from stallscope.synth import Capture, ClockSpread, Job, batches, simulate

JOB = Job(dp=16, steps=60)


def test_lost_records_leave_gaps_and_are_counted() -> None:
    whole, _ = simulate(JOB, seed=1)
    thin, _ = simulate(JOB, seed=1, capture=Capture(lost=0.05))
    assert thin.lost["collectives"] == len(whole.collectives) - len(thin.collectives)
    assert thin.lost["collectives"] == pytest.approx(0.05 * len(whole.collectives), rel=0.3)
    assert np.isin(thin.collectives, whole.collectives).all()
    assert whole.lost == {}


def test_a_burst_takes_all_records_of_a_node_for_a_while() -> None:
    whole, _ = simulate(JOB, seed=1)
    torn, _ = simulate(JOB, seed=1, capture=Capture(n_bursts=1, burst_ns=60_000_000))
    gone = whole.collectives[~np.isin(whole.collectives, torn.collectives)]
    assert len(gone) == torn.lost["collectives"]
    for node in np.unique(gone["node"]):
        own_rows = gone[gone["node"] == node]
        assert np.ptp(own_rows["ts_ns"]) <= 60_000_000
        all_mine = whole.collectives[whole.collectives["node"] == node]
        inside = (all_mine["ts_ns"] >= own_rows["ts_ns"].min()) & (
            all_mine["ts_ns"] <= own_rows["ts_ns"].max()
        )
        assert inside.sum() == len(own_rows)


def test_a_late_agent_numbers_rounds_from_its_start_and_sets_the_flag() -> None:
    late, _ = simulate(JOB, seed=1, capture=Capture(late_nodes=(1,), late_ns=2_500_000_000))
    whole, _ = simulate(JOB, seed=1)
    collectives = late.collectives[late.collectives["node"] == 1]
    same = whole.collectives[whole.collectives["node"] == 1]
    assert 0 < len(collectives) < len(same)
    assert (collectives["flags"] & CollectiveFlag.LATE_ATTACH > 0).all()
    assert (late.collectives[late.collectives["node"] == 0]["flags"] == 0).all()
    for pid in np.unique(collectives["pid"]):
        rows, before = collectives[collectives["pid"] == pid], same[same["pid"] == pid]
        assert (rows["seq"] == np.arange(len(rows))).all()
        assert (rows["ts_ns"] == before["ts_ns"][-len(rows) :]).all()
        assert (rows["ledger_ns"].sum(axis=1) == rows["ts_ns"] - rows["ts_ns"][0]).all()


def test_an_agent_that_comes_after_the_job_sees_no_calls() -> None:
    trace, _ = simulate(JOB, seed=1, capture=Capture(late_nodes=(1,), late_ns=90_000_000_000))
    assert set(trace.collectives["node"]) == {0}
    assert set(trace.snapshots["node"]) == {0}


def test_processes_of_two_nodes_share_pids_and_not_ranks() -> None:
    trace, _ = simulate(JOB, seed=1)
    assert sorted(trace.processes["rank"]) == list(range(16))
    assert len(np.unique(trace.processes["pid"])) == 8
    assert trace.nodes == ("node0000", "node0001")
    assert (trace.processes["local_rank"] == trace.processes["rank"] % 8).all()
    assert (trace.processes["ended_ns"] > trace.processes["ts_ns"]).all()


def test_every_record_has_its_communicator() -> None:
    trace, _ = simulate(Job(dp=4, tp=2, pp=2, layers=1, steps=8), seed=1)
    keys = ["node", "pid", "comm_hash", "comm_rank", "nranks"]
    known = {tuple(int(value) for value in row) for row in trace.communicators[keys]}
    observed = {tuple(int(value) for value in row) for row in np.unique(trace.collectives[keys])}
    assert observed <= known
    sizes = {int(row["comm_hash"]): int(row["nranks"]) for row in trace.communicators}
    members = np.unique(trace.communicators["comm_hash"], return_counts=True)
    assert all(sizes[int(name)] == n for name, n in zip(*members, strict=True))


def test_wall_clocks_agree_within_their_error() -> None:
    spread = ClockSpread(wall_error_ns=1_000_000)
    trace, truth = simulate(JOB, seed=1, clocks=spread)
    first = {clock.node: clock for clock in reversed(trace.clocks)}
    offset = [first[node].monotonic_ns - first[node].wall_ns for node in (0, 1)]
    true = int(truth.clock_offset_ns[0] - truth.clock_offset_ns[1])
    assert abs(offset[0] - offset[1] - true) < 6_000_000
    assert all(clock.error_ns > 0 for clock in trace.clocks)


def test_gpu_times_come_only_when_asked_for() -> None:
    plain, _ = simulate(Job(steps=8), seed=1)
    assert (plain.collectives["gpu_start_ns"] == layout.UNKNOWN).all()
    output, _ = simulate(Job(steps=8), seed=1, capture=Capture(has_gpu_times=True))
    assert (output.collectives["gpu_end_ns"] > output.collectives["gpu_start_ns"]).all()


def test_batches_hold_the_same_rows_as_the_trace() -> None:
    trace, _ = simulate(JOB, seed=3)
    rows = np.concatenate(list(batches(JOB, seed=3)))
    rows = rows[np.lexsort((rows["ts_ns"], rows["node"]))]
    assert rows.tobytes() == trace.collectives.tobytes()


def test_batches_stop_after_enough_rounds() -> None:
    job = Job(dp=1024, steps=100, layers=8, buckets=8)
    rows = np.concatenate(list(batches(job, seed=3, n_rounds=41)))
    per_rank = len(rows) / 1024
    assert 41 <= per_rank <= 41 + 8 * 8
