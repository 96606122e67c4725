"""Invariants of every simulated job, for any shape and any fault."""

import numpy as np
import pytest
from numpy.typing import NDArray

from stallscope.events.names import SYNCHRONISING_OPS, Category, Op
from stallscope.events.trace import Trace
from stallscope.synth import Capture, ClockSpread, HostStall, Job, Schedule, Timing, Truth, simulate
from stallscope.synth.simulated_clocks import EPOCH_NS

ONE_CLOCK = ClockSpread(drift_ppm=0.0)
SHAPES = {
    "data": Job(dp=8, steps=20),
    "sharded": Job(dp=8, steps=20, sharded=True),
    "tensor": Job(dp=4, tp=4, steps=20, grad_norm=True),
    "pipeline": Job(dp=2, tp=2, pp=4, layers=1, buckets=1, steps=20),
    "experts": Job(dp=8, ep=4, steps=20),
    "run-ahead": Job(dp=8, steps=40, sync_every=10),
    "two nodes": Job(dp=16, steps=20, checkpoint_every=8),
}
SLEEP = HostStall(
    cause="host_sleep", ranks=(1,), delay_ns=50_000_000, spread=0.0, schedule=Schedule(first=12, every=4)
)


def true_ns(trace: Trace, truth: Truth, field: str = "ts_ns") -> NDArray[np.int64]:
    """A column taken back from the nodes' clocks to true time, within a few ns."""
    node, column = trace.collectives["node"], trace.collectives[field]
    return np.rint((column - truth.clock_offset_ns[node]) / (1 + truth.clock_drift[node])).astype(np.int64)


def rounds(trace: Trace) -> list[NDArray[np.intp]]:
    """Row numbers of each synchronising round."""
    rows = np.flatnonzero(np.isin(trace.collectives["op"], SYNCHRONISING_OPS))
    names = trace.collectives[rows][["comm_hash", "seq"]]
    _, group = np.unique(names, return_inverse=True)
    order = np.argsort(group, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(group[order])) + 1)


def by_process(trace: Trace) -> list[NDArray[np.intp]]:
    """Row numbers of each process, by time."""
    c = trace.collectives
    order = np.lexsort((c["ts_ns"], c["pid"], c["node"]))
    changed = (np.diff(c["node"][order].astype(int)) != 0) | (np.diff(c["pid"][order].astype(int)) != 0)
    return np.split(order, np.flatnonzero(changed) + 1)


@pytest.fixture(params=SHAPES, scope="module")
def observed(request: pytest.FixtureRequest) -> tuple[Job, Trace, Truth]:
    job = SHAPES[request.param]
    return job, *simulate(job, [SLEEP], seed=3, capture=Capture(has_gpu_times=True))


def test_every_round_has_all_members_once(observed: tuple[Job, Trace, Truth]) -> None:
    _, trace, _ = observed
    for rows in rounds(trace):
        round_ = trace.collectives[rows]
        assert sorted(round_["comm_rank"]) == list(range(round_["nranks"][0]))
        assert len({(r["op"], r["count"], r["datatype"]) for r in round_}) == 1


def test_no_rank_is_released_before_the_last_rank_has_arrived(observed: tuple[Job, Trace, Truth]) -> None:
    """A wait that ends after its rank has entered a round ends after all have entered it."""
    _, trace, truth = observed
    arrival, leave = true_ns(trace, truth), true_ns(trace, truth, "wait_leave_ns")
    enter = true_ns(trace, truth, "wait_enter_ns")
    process = {int(row): rows for rows in by_process(trace) for row in rows}
    for rows in rounds(trace):
        last = arrival[rows].max()
        for row in rows:
            later = process[int(row)]
            waited = later[enter[later] >= arrival[row]]
            if len(waited):
                assert leave[waited].min() >= last - 10


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_a_round_end_together_after_the_last_arrival(shape: str) -> None:
    clocks = ClockSpread(drift_ppm=0.0, gpu_offset_ns=0)
    trace, truth = simulate(SHAPES[shape], seed=5, clocks=clocks, capture=Capture(has_gpu_times=True))
    c, arrival = trace.collectives, true_ns(trace, truth)
    begin, end = c["gpu_start_ns"] - EPOCH_NS, c["gpu_end_ns"] - EPOCH_NS
    assert (begin > arrival).all()
    for rows in rounds(trace):
        assert len(np.unique(end[rows])) == 1
        assert end[rows[0]] > begin[rows].max()


def test_the_root_of_a_broadcast_does_not_wait_for_the_others() -> None:
    clocks = ClockSpread(drift_ppm=0.0, gpu_offset_ns=0)
    late = HostStall(cause="host_sleep", ranks=(1,), delay_ns=20_000_000, schedule=Schedule(first=12))
    job = Job(dp=2, tp=2, steps=20)
    trace, _ = simulate(job, [late], seed=5, clocks=clocks, capture=Capture(has_gpu_times=True))
    sent = trace.collectives[trace.collectives["op"] == Op.BROADCAST]
    group = sent[sent["comm_hash"] == sent["comm_hash"][sent["pid"] == trace.processes["pid"][1]][0]]
    root, leaf = (group[group["comm_rank"] == rank] for rank in (0, 1))
    assert (leaf["gpu_end_ns"] > root["gpu_start_ns"]).all()
    assert (leaf["gpu_end_ns"][12:] - root["gpu_end_ns"][12:] > 10_000_000).all()


def test_a_receive_ends_with_its_send_and_not_before_it_begins() -> None:
    clocks = ClockSpread(drift_ppm=0.0, gpu_offset_ns=0)
    job = Job(dp=1, pp=3, layers=1, buckets=1, steps=10)
    trace, _ = simulate(job, seed=5, clocks=clocks, capture=Capture(has_gpu_times=True))
    c = trace.collectives
    sends, receives = c[c["op"] == Op.SEND], c[c["op"] == Op.RECV]
    ends = {(s["comm_rank"], s["peer_rank"], s["seq"]): (s["gpu_start_ns"], s["gpu_end_ns"]) for s in sends}
    assert len(ends) == len(receives) == 2 * 2 * job.microbatches * job.steps
    for r in receives:
        begin, end = ends[r["peer_rank"], r["comm_rank"], r["seq"]]
        assert end == r["gpu_end_ns"]
        assert end > max(begin, r["gpu_start_ns"])


def test_the_ledger_fills_time_exactly_and_never_shrinks(observed: tuple[Job, Trace, Truth]) -> None:
    _, trace, _ = observed
    born = {(p["node"], p["pid"]): p["ts_ns"] for p in trace.processes}
    for rows in by_process(trace):
        collectives = trace.collectives[rows]
        since = collectives["ts_ns"] - born[collectives["node"][0], collectives["pid"][0]]
        assert (collectives["ledger_ns"].sum(axis=1) == since).all()
        assert (np.diff(collectives["ledger_ns"], axis=0) >= 0).all()
    for row in trace.snapshots:
        assert row["ledger_ns"].sum() == row["ts_ns"] - born[row["node"], row["pid"]]


def test_seq_has_no_gaps(observed: tuple[Job, Trace, Truth]) -> None:
    _, trace, _ = observed
    c = trace.collectives
    key = np.where(
        c["op"] == 10, c["peer_rank"] * 1000 + c["comm_rank"], c["comm_rank"] * 1000 + c["peer_rank"]
    )
    key = np.where(np.isin(c["op"], (9, 10)), key, -1)
    names = np.unique(
        np.rec.fromarrays([c["comm_hash"], c["comm_rank"], key, c["op"] == 10], names="h,r,k,o"),
        return_inverse=True,
    )[1]
    for name in range(names.max() + 1):
        seq = np.sort(c["seq"][names == name])
        assert (seq == np.arange(len(seq))).all()


def test_arrivals_of_a_process_go_forward(observed: tuple[Job, Trace, Truth]) -> None:
    _, trace, _ = observed
    for rows in by_process(trace):
        collectives = trace.collectives[rows]
        assert (np.diff(collectives["ts_ns"]) > 0).all()
        known = collectives["wait_enter_ns"] >= 0
        assert (collectives["wait_enter_ns"] < collectives["wait_leave_ns"])[known].all()
        assert (collectives["wait_leave_ns"] <= collectives["ts_ns"])[known].all()


def test_the_same_arguments_give_the_same_trace() -> None:
    entry, other = (simulate(Job(dp=4, steps=15), [SLEEP], seed=9)[0] for _ in range(2))
    assert entry.collectives.tobytes() == other.collectives.tobytes()
    assert entry.snapshots.tobytes() == other.snapshots.tobytes()
    third, _ = simulate(Job(dp=4, steps=15), [SLEEP], seed=10)
    assert third.collectives.tobytes() != entry.collectives.tobytes()


def test_victims_wait_as_long_as_the_culprit_sleeps() -> None:
    job = Job(dp=8, steps=30)
    trace, truth = simulate(job, [SLEEP], seed=1, clocks=ONE_CLOCK, timing=Timing().scaled(0.0))
    for rows in by_process(trace):
        collectives = trace.collectives[rows]
        slept = collectives["ledger_ns"][-1, Category.SLEEP - 1]
        wait = np.unique(collectives["wait_leave_ns"] - collectives["wait_enter_ns"])
        if collectives["comm_rank"][0] == 1:
            assert slept == pytest.approx(5 * 49.75e6, rel=1e-3)
            assert wait[wait < 40_000_000].size
        else:
            assert slept == 0
            assert (wait > 49_000_000).sum() >= 1
    assert truth.n_incidents == (5,)
    assert truth.lost_gpu_seconds == pytest.approx(7 * 5 * 0.050, rel=0.02)
    assert truth.slowdown_ns == pytest.approx(5 * 50e6, rel=0.02)


def test_a_node_clock_shifts_only_the_times_of_its_rows() -> None:
    job = Job(dp=16, steps=15)
    far, truth = simulate(job, seed=4)
    near, _ = simulate(job, seed=4, clocks=ClockSpread(uptime_ns=0, drift_ppm=0.0))
    shifted = true_ns(far, truth)
    assert np.abs(shifted - near.collectives["ts_ns"]).max() <= 100
    assert abs(int(truth.clock_offset_ns[0]) - int(truth.clock_offset_ns[1])) > 1_000_000_000
    assert (far.collectives["seq"] == near.collectives["seq"]).all()


def test_a_short_delay_is_absorbed_when_the_host_runs_ahead() -> None:
    """The device still has work queued, so no rank waits longer than before."""
    job = Job(dp=8, steps=60, sync_every=20)
    short = HostStall(
        cause="host_sleep", ranks=(1,), delay_ns=1_000_000, schedule=Schedule(first=25, until=26)
    )
    _, truth = simulate(job, [short], seed=2, timing=Timing().scaled(0.0))
    assert truth.n_incidents == (1,)
    assert truth.lost_gpu_seconds < 7 * 0.0002
