"""A hanging job: the positions of the ranks, the snapshots, and no rows afterwards."""

import numpy as np
import pytest
from numpy.typing import NDArray

from stallscope.errors import BadInput
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace
from stallscope.synth import CrossedOrder, Job, MismatchedCall, MissingRank, Phase, simulate

JOB = Job(dp=8, steps=40)


def last_seq(trace: Trace, rank: int, comm_hash: int) -> int:
    c = trace.collectives
    own_rows = (c["pid"] == trace.processes["pid"][rank]) & (c["comm_hash"] == comm_hash)
    return int(c["seq"][own_rows].max())


def states(trace: Trace) -> NDArray[np.void]:
    """Each process's last snapshot, in rank order (jobs of one node)."""
    return np.array(
        [trace.snapshots[trace.snapshots["pid"] == pid][-1] for pid in trace.processes["pid"]],
        trace.snapshots.dtype,
    )


@pytest.mark.parametrize("doing", [Category.SLEEP, Category.ON_CPU, Category.LOCK])
def test_a_missing_rank_is_behind_and_the_others_wait(doing: Category) -> None:
    trace, truth = simulate(JOB, [MissingRank(ranks=(3,), step=20, doing=doing)], seed=1)
    data = trace.collectives["comm_hash"][trace.collectives["count"] > 8][0]
    seqs = [last_seq(trace, rank, data) for rank in range(8)]
    assert seqs[3] == 20 * JOB.buckets - 1
    assert set(seqs) - {seqs[3]} == {21 * JOB.buckets - 1}
    last = states(trace)
    assert last["category"][3] == doing
    assert (np.delete(last["category"], 3) == Category.WAIT_GPU).all()
    assert (np.delete(last["in_call"], 3) == Op.SYNC).all()
    assert (last["alive"] == 1).all()
    assert last["n_collectives"][3] == last["n_completed"][3]
    assert (np.delete(last["n_collectives"] - last["n_completed"], 3) == JOB.buckets).all()
    assert truth.kind == "hang"


def test_a_hung_job_is_watched_and_its_time_runs_on() -> None:
    trace, truth = simulate(JOB, [MissingRank(ranks=(3,), step=20)], seed=1)
    snapshots = trace.snapshots[trace.snapshots["pid"] == trace.processes["pid"][0]]
    grown = np.diff(snapshots["ledger_ns"][-10:, Category.WAIT_GPU - 1])
    assert grown == pytest.approx(np.full(9, 1e9), rel=1e-3)
    assert trace.ends_ns[0] - trace.collectives["ts_ns"].max() > 29_000_000_000
    assert truth.lost_gpu_seconds == pytest.approx(7 * 30, rel=0.02)


def test_a_dead_process_has_ended() -> None:
    trace, _ = simulate(JOB, [MissingRank(ranks=(2,), step=20, is_dead=True, where=Phase.FORWARD)], seed=1)
    assert [int(alive) for alive in states(trace)["alive"]] == [1, 1, 0, 1, 1, 1, 1, 1]
    ended = trace.processes["ended_ns"]
    assert (np.delete(ended, 2) == -1).all()
    collectives = trace.collectives[trace.collectives["pid"] == trace.processes["pid"][2]]
    assert ended[2] >= collectives["ts_ns"].max()


def test_hosts_that_run_ahead_block_in_a_launch_some_rounds_later() -> None:
    job = Job(dp=8, steps=100, sync_every=100)
    trace, _ = simulate(job, [MissingRank(ranks=(3,), step=20)], seed=1)
    data = trace.collectives["comm_hash"][trace.collectives["count"] > 8][0]
    seqs = [last_seq(trace, rank, data) for rank in range(8)]
    assert min(seqs) == seqs[3]
    assert 4 < seqs[0] - seqs[3] < 200
    assert (np.delete(states(trace)["in_call"], 3) == Op.LAUNCH).all()


@pytest.mark.parametrize("differs", ["op", "count", "datatype"])
def test_a_mismatch_is_in_the_records_of_one_rank_in_one_round(differs: str) -> None:
    trace, _ = simulate(JOB, [MismatchedCall(ranks=(5,), step=20, differs=differs)], seed=1)
    c = trace.collectives
    data = c[c["count"] > 8]
    usual = data[differs][0]
    odd = data[data[differs] != usual]
    assert len(odd) == 1
    assert odd["pid"][0] == trace.processes["pid"][5]
    hung = data[data["seq"] == odd["seq"][0]]
    assert len(hung) == 8
    assert data["seq"].max() < 21 * JOB.buckets
    assert (states(trace)["category"] == Category.WAIT_GPU).all()


def test_crossed_order_leaves_each_side_waiting_on_its_own_communicator() -> None:
    trace, _ = simulate(Job(dp=8, ep=4, steps=30), [CrossedOrder(ranks=(6,), step=15)], seed=1)
    order = {}
    for rank in range(8):
        collectives = trace.collectives[trace.collectives["pid"] == trace.processes["pid"][rank]]
        order[rank] = [int(op) for op in collectives[np.argsort(collectives["ts_ns"])]["op"][-2:]]
    assert order.pop(6) == [Op.ALL_REDUCE, Op.ALL_TO_ALL]
    assert all(ops == [Op.ALL_TO_ALL, Op.ALL_REDUCE] for ops in order.values())
    last = states(trace)
    assert len(set(last["n_collectives"])) == 1
    assert (last["category"] == Category.WAIT_GPU).all()


def test_crossed_order_needs_nested_groups() -> None:
    with pytest.raises(BadInput, match="grad_norm"):
        simulate(JOB, [CrossedOrder(ranks=(6,), step=15)], seed=1)


def test_the_sums_still_fill_time_when_a_job_hangs() -> None:
    trace, _ = simulate(JOB, [MissingRank(ranks=(3,), step=20)], seed=1)
    born = dict(zip(trace.processes["pid"], trace.processes["ts_ns"], strict=True))
    for row in trace.snapshots:
        assert row["ledger_ns"].sum() == row["ts_ns"] - born[row["pid"]]
        assert (row["ledger_ns"] >= 0).all()
