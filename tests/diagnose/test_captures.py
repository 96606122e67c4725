"""Properties of the capture that must not change the blame: clocks, partial data, restarted agents."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.diagnose.arrays.row_order import RowsInOrder
from stallscope.diagnose.timeline.late_attach import renumbered
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category, CollectiveFlag
from stallscope.events.trace import Trace
from stallscope.synth import Capture, ClockSpread, HostStall, Job, Schedule, fault_scenarios, simulate

from .builders import MS, Call, dp_trace, every, trace_of
from .builders import Job as MadeJob
from .reports import blamed, only, report_of

FEW = settings(max_examples=8)
TWO_HOSTS = (0, 0, 1, 1)
DELAYS = tuple(every(2, 5, 50 * MS, category=Category.IO, until=100))
NESTED = (
    Call(((0, 1), (2, 3)), count=10, waits=True),
    Call(((0, 2), (1, 3)), count=500, waits=True),
)
CULPRIT = [("straggler", (2,), 5, "block_io")]


def two_hosts(offset_ns: int = 0, *, program: tuple[Call, ...] = ()) -> Trace:
    """Rank 2 is late every fifth of 100 steps; ranks 2 and 3 run on a host whose clock is offset_ns ahead."""
    more = {"node": TWO_HOSTS, "offset_ns": (0, offset_ns), "n_steps": 100}
    if program:
        return trace_of(MadeJob(program, delays=DELAYS, **more))
    return dp_trace(DELAYS, **more)


@pytest.mark.parametrize("program", [(), NESTED], ids=["data", "nested"])
@FEW
@given(offset_ns=st.integers(-5 * 10**9, 10**15))
def test_the_clock_of_one_host_does_not_matter(program, offset_ns):
    assert blamed(report_of(two_hosts(offset_ns, program=program))) == CULPRIT


@FEW
@given(share=st.floats(0.3, 0.7))
def test_both_parts_of_a_split_trace_blame_the_same_rank(share):
    trace = two_hosts(10**12)
    rows = trace.collectives
    moment = {node: np.quantile(rows["ts_ns"][rows["node"] == node], share) for node in (0, 1)}
    is_early = rows["ts_ns"] < np.array([moment[node] for node in rows["node"].tolist()])
    for part, ends_ns in (
        (is_early, tuple(int(moment[node]) for node in (0, 1))),
        (~is_early, trace.ends_ns),
    ):
        assert blamed(report_of(replace(trace, collectives=rows[part], ends_ns=ends_ns))) == CULPRIT


def restarted(trace: Trace, nodes: tuple[int, ...], *, share: float, away_ns: int = 40 * MS) -> Trace:
    """The trace with the agents of some nodes restarted: they count from 0 again, and know addresses only."""
    rows = trace.collectives.copy()
    if not rows["comm_handle"].any():
        rows["comm_handle"] = rows["comm_hash"] % 100_003 + rows["pid"]
    keep = np.ones(len(rows), bool)
    for node in nodes:
        own_rows = rows["node"] == node
        begin = int(np.quantile(rows["ts_ns"][own_rows], share))
        keep &= ~(own_rows & (rows["ts_ns"] >= begin) & (rows["ts_ns"] < begin + away_ns))
        again = own_rows & (rows["ts_ns"] >= begin + away_ns)
        for pid in np.unique(rows["pid"][again]).tolist():
            own = again & (rows["pid"] == pid)
            for handle in np.unique(rows["comm_handle"][own]).tolist():
                these = own & (rows["comm_handle"] == handle)
                rows["seq"][these] -= rows["seq"][these].min()
            rows["ledger_ns"][own] -= rows["ledger_ns"][own].min(axis=0)
            for name in ("n_syncs", "n_allocs", "n_copies", "n_launches"):
                rows[name][own] -= rows[name][own].min()
        rows["comm_hash"][again] = 0
        rows["comm_rank"][again] = rows["nranks"][again] = UNKNOWN
        rows["flags"][again] |= np.uint32(CollectiveFlag.LATE_ATTACH)
    return replace(trace, collectives=rows[keep])


@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("program", [(), NESTED], ids=["data", "nested"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_restarted_agent_does_not_change_the_blame(nodes, program, share):
    assert blamed(report_of(restarted(two_hosts(10**12, program=program), nodes, share=share))) == CULPRIT


@pytest.mark.parametrize("program", [(), NESTED], ids=["data", "nested"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_late_attach_and_a_restart_do_not_change_the_blame(program, share):
    """Neither capture knows the communicators, and both count from 0."""
    late = restarted(two_hosts(10**12, program=program), (0, 1), share=0.0)
    trace = restarted(late, (0, 1), share=share, away_ns=500 * MS)
    report = report_of(trace)
    assert blamed(report) == CULPRIT
    n_rounds = len(trace.collectives) / 4 * (2 if program else 1) * (0.5 if program else 1)
    assert report.examined["n_rounds"] > 0.9 * n_rounds


@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1)])
def test_rounds_are_renumbered_consistently_after_an_agent_restart(nodes):
    """If another host recorded throughout, the numbers continue; otherwise they only match between the ranks."""
    trace = two_hosts(10**12)
    after = restarted(trace, nodes, share=0.5).collectives
    order = np.lexsort((after["ts_ns"], after["pid"]))
    changed = renumbered(RowsInOrder(after, order, {}), after["pid"][order] - 1000, trace.clocks)
    put_right = RowsInOrder(after, order, changed)[:]
    assert (put_right["comm_hash"] != 0).all()
    arrivals: dict[int, list[int]] = {}
    for row in put_right:
        arrivals.setdefault(int(row["seq"]), []).append(int(row["ts_ns"]) - 10**12 * int(row["node"]))
    assert max(max(times) - min(times) for times in arrivals.values()) < 60 * MS
    if nodes != (0, 1):
        true = {(int(row["pid"]), int(row["ts_ns"])): int(row["seq"]) for row in trace.collectives}
        assert all(true[int(r["pid"]), int(r["ts_ns"])] == int(r["seq"]) for r in put_right)


@pytest.mark.parametrize("sync_every", [1, 10])
@pytest.mark.parametrize("seed", range(3))
def test_a_node_captured_late_does_not_change_the_blame(sync_every, seed):
    job = Job(dp=16, steps=240, sync_every=sync_every)
    fault = HostStall(cause="block_io", ranks=(5,), delay_ns=150 * MS, schedule=Schedule(every=7))
    capture = Capture(late_nodes=(1,), late_ns=3_000_000_000)
    trace, _ = simulate(job, [fault], seed=seed, capture=capture, clocks=ClockSpread(), has_twin=False)
    report = report_of(trace)
    assert {rank for verdict in report.verdicts for rank in verdict.ranks} <= {5}
    assert report.verdicts


@pytest.mark.parametrize("late_nodes", [(1,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("every", [2, 3])
def test_a_node_late_in_every_other_step_is_named_after_a_late_attach(late_nodes, every):
    """The other nodes enter each step when the late node enters the step before: only the releases differ."""
    job, ranks = Job(dp=16, steps=60, ranks_per_node=4), (4, 5, 6, 7)
    fault = HostStall(cause="block_io", ranks=ranks, delay_ns=100 * MS, schedule=Schedule(every=every))
    capture = Capture(late_nodes=late_nodes, late_ns=2_800 * MS)
    trace, _ = simulate(job, [fault], seed=1, capture=capture, has_twin=False)
    verdict = only(report_of(trace))
    assert (verdict.kind, tuple(verdict.ranks), verdict.period_steps) == ("straggler", ranks, every)


@pytest.mark.parametrize("number", [161, 162, 197])
def test_saves_with_different_step_numbers_across_nodes_are_shared_pauses(number):
    trace, _ = fault_scenarios.healthy(number)
    assert not report_of(trace).verdicts


def test_small_delays_without_victims_name_no_rank():
    trace, _ = fault_scenarios.healthy(882)
    assert not any(verdict.ranks for verdict in report_of(trace).verdicts)


@pytest.mark.parametrize("seed", range(3))
def test_late_attached_hosts_that_run_far_ahead_are_aligned_by_their_waits(seed):
    """All ranks are captured late, each at a different call, and are steps apart; their releases coincide."""
    job = Job(dp=4, steps=72, layers=4, sync_every=10, grad_norm=True, checkpoint_every=20, buckets=3)
    late_ns = 1_900_000_000 + 13_000_000 * seed
    trace, _ = simulate(job, seed=seed, capture=Capture(late_nodes=(0,), late_ns=late_ns), has_twin=False)
    whole, _ = simulate(job, seed=seed, has_twin=False)
    number = {
        (int(row["pid"]), int(row["comm_hash"]), int(row["ts_ns"])): int(row["seq"])
        for row in whole.collectives
    }
    rows = timeline_of(trace).rows
    columns = (rows[name].tolist() for name in ("pid", "comm_hash", "ts_ns", "seq"))
    shifts = {(comm, number[pid, comm, ts] - seq) for pid, comm, ts, seq in zip(*columns, strict=True)}
    assert len(shifts) == len({comm for comm, _ in shifts})
    assert not report_of(trace).verdicts


def attached_late(trace: Trace, at_ns: int) -> Trace:
    """The trace of an agent that begins when the job runs: rounds count from there, communicators have no identity."""
    rows = trace.collectives[trace.collectives["ts_ns"] >= at_ns].copy()
    rows["comm_handle"] = rows["comm_hash"] % 100_003 + rows["pid"]
    for pid in np.unique(rows["pid"]).tolist():
        own = rows["pid"] == pid
        rows["seq"][own] -= rows["seq"][own].min()
    rows["comm_hash"], rows["nranks"], rows["comm_rank"] = 0, UNKNOWN, UNKNOWN
    rows["flags"] |= np.uint32(CollectiveFlag.LATE_ATTACH)
    return replace(trace, collectives=rows)


def test_a_straggler_is_named_although_all_ranks_were_attached_late():
    """The agent begins while the others wait: the slow rank's record has one step more than theirs."""
    n_steps, slow_rank = 20, 2
    delays = every(slow_rank, 1, 400 * MS, category=Category.LOCK, first=0, until=n_steps)
    trace = dp_trace(delays, n_steps=n_steps)
    rows = trace.collectives
    is_slow = rows["pid"] == np.unique(rows["pid"])[slow_rank]
    third_step = rows["ts_ns"][is_slow][3 * 3]
    report = report_of(attached_late(trace, int(third_step) - 200 * MS))
    assert blamed(report) == [("straggler", (slow_rank,), 0, "lock_contention")]


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("begins_ms", [1, 17, 39])
def test_a_rank_that_is_late_in_each_step_is_named_among_few_that_were_attached_late(n_ranks, begins_ms):
    """Both of two ranks are typically as far from their round: the releases show that the rounds are right."""
    delays = every(1, 1, 40 * MS, category=Category.COPY, first=0, until=60)
    trace = dp_trace(delays, n_ranks=n_ranks, n_steps=60)
    at_ns = int(np.quantile(trace.collectives["ts_ns"], 0.2)) + begins_ms * MS
    report = report_of(attached_late(trace, at_ns))
    assert blamed(report) == [("straggler", (1,), 0, "host_device_copy")]


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("begins_ms", [1, 3, 5])
def test_few_ranks_of_a_healthy_job_that_were_attached_late_are_healthy(n_ranks, begins_ms):
    trace = dp_trace(n_ranks=n_ranks, n_steps=60)
    at_ns = int(np.quantile(trace.collectives["ts_ns"], 0.2)) + begins_ms * MS
    report = report_of(attached_late(trace, at_ns))
    assert report.verdicts == [] and report.answer == "healthy", report.gaps


def test_a_rank_whose_rounds_may_be_off_by_a_step_leaves_the_answer_inconclusive():
    """On two nodes, the releases of two ranks do not show which of them entered first."""
    delays = every(1, 1, 40 * MS, category=Category.COPY, first=0, until=60)
    trace = dp_trace(delays, n_ranks=2, n_steps=60, node=(0, 1), offset_ns=(0, 5_000 * MS))
    report = report_of(attached_late(trace, int(trace.collectives["ts_ns"].min()) + 200 * MS))
    assert report.answer != "healthy"
    assert all(verdict.ranks == [1] for verdict in report.verdicts)
