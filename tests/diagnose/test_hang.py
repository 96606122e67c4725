"""Hangs: missing ranks, waiting ranks, and cases without a verdict."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.evidence_fields import RankActivity
from stallscope.diagnose.stream import Stream
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import CALLS, COMMUNICATORS, HOST_EVENTS, POSITIONS, empty
from stallscope.events.names import Category, CollectiveFlag, HostKind, Op
from stallscope.events.trace import Trace

from .builders import MS, Call, Gone, Job, comm_hash, data_parallel, dp_trace, trace_of
from .cutting import Hand
from .reports import only, report_of

LIMITS = Thresholds()
LONG_NS = 2 * LIMITS.hang_after_ns


def hung(*gone: Gone, program=None, quiet_ns: int = LONG_NS, **rest):
    return trace_of(Job(program or data_parallel(), gone=gone, quiet_ns=quiet_ns, **rest))


def test_the_missing_rank_is_named_with_its_current_state():
    verdict = only(report_of(hung(Gone(2, 30, 1, Category.IO))))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("hang", [2], [0, 1, 3])
    assert verdict.first_round == 30 * 3 + 1
    assert verdict.causes[0].cause.name == "missing_rank"
    assert verdict.evidence.doing == [RankActivity(2, is_alive=True, state="io")]
    assert "state io" in verdict.summary


def test_ranks_whose_capture_ended_before_the_hang_are_not_missing():
    """Node 1 (ranks 2 and 3) is captured until the middle of the job; rank 1 stops later."""
    trace = hung(Gone(1, 30, 1, Category.LOCK), node=(0, 0, 1, 1), offset_ns=(0, 0))
    rows, states = trace.collectives, trace.snapshots
    end_ns = int(np.median(rows["ts_ns"]))
    cut = replace(
        trace,
        collectives=rows[(rows["node"] == 0) | (rows["ts_ns"] <= end_ns)],
        snapshots=states[(states["node"] == 0) | (states["ts_ns"] <= end_ns)],
        ends_ns=[trace.ends_ns[0], end_ns],
    )
    verdict = only(report_of(cut))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("hang", [1], [0])
    waited_s = verdict.evidence.waited_s
    assert verdict.cost.gpu_seconds == pytest.approx(waited_s, rel=0.05)
    assert verdict.cost.at_most_gpu_seconds == pytest.approx(3 * waited_s, rel=0.05)


IN_PYTHON = ("clock_nanosleep+0xbf (libc.so.6)", "/job/train.py:88 wait_for_ever", "/job/train.py:120 main")
FOR_WORK = (
    "0x98e51 (libc.so.6)",
    "pthread_cond_wait+0x20c (libc.so.6)",
    "ReadyQueue::pop+0x4a (libtorch_cpu.so)",
)
IN_NCCL = ("poll+0x4f (libc.so.6)", "ncclCommInit+0x20 (libnccl.so.2)")


@pytest.mark.parametrize(
    ("of_caller", "expected"),
    [
        (FOR_WORK, IN_PYTHON),
        (IN_NCCL, IN_NCCL),
        (("/job/model.py:7 backward",), ("/job/model.py:7 backward",)),
    ],
)
def test_the_stack_of_the_collective_thread_is_reported_unless_it_is_idle(of_caller, expected):
    """PyTorch's backward pass runs in a thread of its own, which waits between two passes."""
    trace = hung(Gone(2, 30, 1, Category.SLEEP))
    pid, caller = int(trace.processes["pid"][2]), 77777
    trace.collectives["tid"][trace.collectives["pid"] == pid] = caller
    positions = empty(POSITIONS, 2)
    positions["ts_ns"], positions["pid"] = int(trace.snapshots["ts_ns"].max()), pid
    positions["tid"], positions["stack"] = (caller, pid), (1, 2)
    examined = replace(trace, positions=positions, stacks={1: of_caller, 2: IN_PYTHON})
    (doing,) = only(report_of(examined)).evidence.doing
    assert doing.stack == list(expected)


def joined(trace: Trace, *, nranks: int = 4) -> Trace:
    """The communicator as its members made it."""
    rows = empty(COMMUNICATORS, len(trace.processes))
    for name in ("node", "pid", "ts_ns"):
        rows[name] = trace.processes[name]
    rows["comm_rank"], rows["nranks"] = trace.processes["rank"], nranks
    rows["comm_hash"] = trace.collectives["comm_hash"][0]
    return replace(trace, communicators=rows)


@pytest.mark.parametrize(
    ("doing", "message"), [(Category.ON_CPU, "state on cpu"), (Category.NONE, "its process has ended")]
)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_rank_that_has_never_made_a_call_is_named(doing, message, n_ranks):
    """It joined the communicator, and then loads its data, compiles, or dies."""
    program = data_parallel(n_ranks)
    trace = joined(hung(Gone(1, 0, 0, doing), program=program, n_ranks=n_ranks), nranks=n_ranks)
    verdict = only(report_of(trace))
    others = [rank for rank in range(n_ranks) if rank != 1]
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("hang", [1], others)
    assert (verdict.first_round, verdict.nodes) == (0, ["host-a"])
    assert message in verdict.summary
    stream = Stream(clock=Hand())
    stream.feed(trace)
    assert [entry.ranks for entry in stream.report().verdicts] == [[1]]


def test_a_rank_without_calls_on_one_of_its_communicators_is_named():
    pairs = (Call(((0, 1), (2, 3)), count=7), *data_parallel())
    trace = hung(Gone(2, 0, 0), program=pairs)
    rows = empty(COMMUNICATORS, 8)
    groups = ((0, 1), (2, 3), (0, 1, 2, 3))
    for i, (rank, group) in enumerate((rank, members) for members in groups for rank in members):
        rows[i]["pid"], rows[i]["comm_rank"] = 1000 + rank, group.index(rank)
        rows[i]["comm_hash"], rows[i]["nranks"] = comm_hash(group), len(group)
    verdict = only(report_of(replace(trace, communicators=rows)))
    assert (verdict.kind, verdict.ranks) == ("hang", [2])


def test_untraced_ranks_are_not_assumed_to_have_entered():
    """Only one of two nodes was traced: the missing ranks on the other node are not visible."""
    trace = joined(dp_trace(quiet_ns=LONG_NS), nranks=8)
    trace.snapshots["category"], trace.snapshots["in_call"] = Category.WAIT_GPU, Op.SYNC
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks) == ("hang", [])
    assert "4 more ranks of the communicator are not in this trace" in str(verdict.abstained_because)


def test_members_that_make_no_call_before_a_job_has_begun_are_quiet():
    assert report_of(joined(dp_trace())).healthy


def test_several_missing_ranks_are_named_not_the_one_that_is_ahead():
    gone = [Gone(rank, 30, 0) for rank in (0, 1, 3)]
    verdict = only(report_of(hung(*gone)))
    assert (verdict.ranks, verdict.victims) == ([0, 1, 3], [2])


def test_an_ended_process_is_reported_without_the_hang_delay():
    verdict = only(report_of(hung(Gone(2, 30, 1, Category.NONE), quiet_ns=LIMITS.dead_after_ns + 10 * MS)))
    assert (verdict.kind, verdict.ranks) == ("hang", [2])
    assert "has ended" in verdict.summary
    assert "exit code" in verdict.advice[0]


def test_the_hourly_cost_of_a_hang_is_at_most_the_cost_of_its_victims():
    cost = only(report_of(hung(Gone(2, 30, 1)), usd_per_gpu_hour=2.0)).cost
    assert cost is not None and cost.usd_per_hour is not None
    assert 0.9 * 3 * 2.0 < cost.usd_per_hour < 3 * 2.0


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_last_failed_call_of_a_missing_rank_is_reported(is_alive):
    """For any error: an invalid argument is not a fault of the device, and still ends a program."""
    trace = hung(Gone(2, 30, 1, Category.SLEEP if is_alive else Category.NONE))
    last_ns = trace.collectives["ts_ns"][trace.collectives["pid"] == 1002].max()
    calls = empty(CALLS, 2)
    calls["pid"], calls["node"], calls["op"], calls["symbol"] = 1002, 0, Op.COPY, (1, 2)
    calls["ts_ns"], calls["duration_ns"], calls["result"] = (last_ns - MS, last_ns + MS), 10_000, 1
    symbols = ("", "cudaFree", "cudaMemcpy")
    verdict = only(report_of(replace(trace, calls=calls, symbols=symbols)))
    assert (verdict.kind, verdict.ranks) == ("hang", [2])
    assert "; its cudaMemcpy failed with error 1; it" in verdict.summary
    assert "cudaMemcpy failed" in verdict.advice[0]
    recovered = replace(trace, calls=calls[:1], symbols=symbols)
    assert "cudaFree" not in only(report_of(recovered)).summary  # it went on after that


@pytest.mark.parametrize(
    ("status", "advice"),
    [(1, "the rank's log"), (137, "the SIGKILL"), (139, "core file"), (134, "core file")],
)
def test_the_advice_fits_how_a_process_ended(status, advice):
    trace = hung(Gone(2, 30, 1, Category.NONE), quiet_ns=LIMITS.dead_after_ns + 10 * MS)
    exits = empty(HOST_EVENTS, 1)
    exits["pid"], exits["ts_ns"] = 1002, trace.collectives["ts_ns"].max()
    exits["kind"], exits["value"] = HostKind.EXIT, status
    assert advice in only(report_of(replace(trace, host_events=exits))).advice[0]


@pytest.mark.parametrize(
    ("doing", "message", "advice"),
    [
        (Category.PREEMPTED, "state on cpu", "an endless loop"),
        (Category.STOPPED, "state stopped", "kill -CONT"),
        (Category.OTHER_OFF, "state blocked", "instead of in the collective"),
        (Category.NET, "waiting for a socket or pipe", "instead of in the collective"),
    ],
)
def test_the_advice_matches_the_state_of_the_missing_rank(doing, message, advice):
    trace = hung(Gone(2, 30, 1, doing))
    looks = empty(POSITIONS, 1)
    looks["pid"] = looks["tid"] = 1002
    looks["ts_ns"], looks["stack"] = trace.ends_ns[0], 1
    trace = replace(trace, positions=looks, stacks={1: ("/job/train.py:7 step",)})
    verdict = only(report_of(trace))
    assert message in verdict.summary
    assert advice in verdict.advice[0]


def test_a_killed_hung_job_is_reported_with_the_state_of_the_missing_rank():
    trace = hung(Gone(2, 30, 1, Category.IO), quiet_ns=LONG_NS)
    end_ns = int(trace.collectives["ts_ns"].max()) + LONG_NS - 1000 * MS
    trace.processes["ended_ns"] = end_ns
    exits = empty(HOST_EVENTS, len(trace.processes))
    exits["pid"], exits["node"] = trace.processes["pid"], trace.processes["node"]
    exits["ts_ns"], exits["kind"], exits["value"] = end_ns, HostKind.EXIT, 143
    verdict = only(report_of(replace(trace, host_events=exits)))
    assert (verdict.ranks, verdict.victims) == ([2], [0, 1, 3])
    assert (
        "it was in state io instead, until its process was ended by SIGTERM (exit status 143)"
        in verdict.summary
    )
    assert "exit code" not in verdict.advice[0]
    assert verdict.cost is not None  # no rank waits after the end
    assert verdict.cost.gpu_seconds == pytest.approx(3 * (LONG_NS - 1000 * MS) / 1e9, rel=0.02)


def test_a_hang_is_not_reported_before_the_limit():
    just_before = hung(Gone(2, 30, 1), quiet_ns=LIMITS.hang_after_ns - 100 * MS)
    assert report_of(just_before).healthy
    just_after = hung(Gone(2, 30, 1), quiet_ns=LIMITS.hang_after_ns + 100 * MS)
    assert only(report_of(just_after)).kind == "hang"


def test_a_slow_job_is_given_more_patience():
    """Its typical gap between calls is 4 s: ten seconds without a call are not a hang yet, thirty are."""
    slow = data_parallel(n_buckets=1, work_ns=4000 * MS)
    assert report_of(hung(Gone(2, 30), program=slow, quiet_ns=15_000 * MS)).healthy
    assert only(report_of(hung(Gone(2, 30), program=slow, quiet_ns=30_000 * MS))).kind == "hang"


def test_patience_is_a_setting():
    limits = replace(LIMITS, hang_after_ns=1000 * MS)
    assert only(report_of(hung(Gone(2, 30, 1), quiet_ns=1500 * MS), limits=limits)).kind == "hang"


def test_rounds_in_flight_are_quiet():
    whole = dp_trace()
    for cut in range(-1, -12, -1):
        moment = np.sort(whole.collectives["ts_ns"])[cut]
        kept = whole.collectives[whole.collectives["ts_ns"] < moment]
        assert report_of(replace(whole, collectives=kept, ends_ns=(int(moment),))).healthy


def test_the_end_of_a_job_is_quiet():
    trace = dp_trace(quiet_ns=LONG_NS)
    trace.processes["ended_ns"] = trace.collectives["ts_ns"].max() + MS
    trace.snapshots["alive"] = 0
    assert report_of(trace).healthy
    kept = ~((trace.collectives["pid"] == 1002) & (trace.collectives["seq"] > 116))
    assert report_of(replace(trace, collectives=trace.collectives[kept])).healthy


@pytest.mark.parametrize(("waited_ns", "is_told"), [(LONG_NS, True), (LIMITS.hang_after_ns // 2, False)])
def test_a_hang_that_ended_by_a_kill_is_reported_if_the_wait_was_long(waited_ns, is_told):
    trace = hung(Gone(2, 30, 1), quiet_ns=LONG_NS + 5000 * MS)
    trace.processes["ended_ns"] = trace.collectives["ts_ns"].max() + waited_ns
    trace.snapshots["alive"] = 0
    report = report_of(trace)
    assert [verdict.ranks for verdict in report.verdicts if verdict.kind == "hang"] == (
        [[2]] if is_told else []
    )


def test_waits_are_followed_through_two_communicators():
    """Rank 3 has left its tensor group (2, 3); rank 2 waits there, so 0 waits for 2 in (0, 2), and 1 for 0."""
    tensor, data = Call(((0, 1), (2, 3)), count=10, waits=True), Call(((0, 2), (1, 3)), count=500, waits=True)
    verdict = only(report_of(hung(Gone(3, 30, 1), program=(tensor, tensor, data))))
    assert (verdict.kind, verdict.ranks) == ("hang", [3])
    assert set(verdict.victims) == {0, 1, 2}


@pytest.mark.parametrize("state", [Category.SLEEP, Category.ON_CPU, Category.LOCK, Category.NET])
def test_a_missing_rank_is_named_whatever_it_does(state):
    tensor, data = Call(((0, 1), (2, 3)), count=10, waits=True), Call(((0, 2), (1, 3)), count=500, waits=True)
    verdict = only(report_of(hung(Gone(1, 30, 2, state), program=(tensor, tensor, data))))
    assert verdict.ranks == [1]


def test_calls_in_crossed_order_are_a_circle():
    """Ranks 0 and 1 share two communicators and enter them in a different order at the end."""
    both = ((0, 1),)  # rank 2 has a communicator of its own, so that all have as much to do
    a, b = Call((*both, (2,)), count=1, waits=True), Call(((0, 1, 2),), count=2, waits=True)
    trace = trace_of(Job((a, b), n_ranks=3, n_steps=30, quiet_ns=LONG_NS))
    rows = trace.collectives
    last = {hash_: rows["seq"][rows["comm_hash"] == hash_].max() for hash_ in np.unique(rows["comm_hash"])}
    is_pair = rows["nranks"] <= 2
    is_last = rows["seq"] == np.array([last[hash_] for hash_ in rows["comm_hash"].tolist()])
    lost = is_last & (((rows["pid"] == 1000) & ~is_pair) | ((rows["pid"] == 1001) & is_pair))
    trace.snapshots["in_call"], trace.snapshots["category"] = Op.SYNC, Category.WAIT_GPU
    assert lost.sum() == 2
    verdict = only(report_of(replace(trace, collectives=rows[~lost])))
    assert (verdict.kind, verdict.ranks) == ("hang", [0, 1])
    assert verdict.evidence.is_circle is True
    assert verdict.confidence < 0.8


def test_without_snapshots_the_missing_rank_is_still_named():
    trace = hung(Gone(2, 30, 1))
    verdict = only(report_of(replace(trace, snapshots=trace.snapshots[:0])))
    assert verdict.ranks == [2]


def test_a_rank_that_was_never_traced_is_not_a_hang():
    """A recording of one host of two: half of the ranks of every round are missing from the start."""
    trace = dp_trace(n_ranks=4, quiet_ns=LONG_NS)
    here = trace.collectives["pid"] < 1002
    report = report_of(replace(trace, collectives=trace.collectives[here]))
    assert report.verdicts == []
    assert "not in this trace" in report.gaps[0].reason


@pytest.mark.parametrize("n_missed", [3, 40, 100])
def test_a_rank_with_lower_round_numbers_that_makes_progress_does_not_hang(n_missed):
    """The capture came late to rank 2: its rounds are numbered from there, while the job runs on."""
    trace = trace_of(Job(data_parallel(work_ns=700 * MS)))
    own_rows = trace.collectives["pid"] == 1002
    trace.collectives["seq"][own_rows] -= n_missed
    trace.collectives["flags"][own_rows] |= np.uint32(CollectiveFlag.LATE_ATTACH)
    kept = trace.collectives[trace.collectives["seq"] >= 0]
    assert not [v for v in report_of(replace(trace, collectives=kept)).verdicts if v.kind == "hang"]


def test_a_waiting_point_to_point_receiver_is_not_the_missing_rank():
    program = (
        Call(((0, 1), (2, 3)), op=Op.SEND, count=7, waits=True),
        Call(((0, 1, 2, 3),), count=9, waits=True),
    )
    verdict = only(report_of(hung(Gone(0, 20), program=program)))
    assert verdict.ranks == [0]


def killed_within_a_round(status: int | None, *, quiet_ns: int = LIMITS.dead_after_ns + 50 * MS):
    """All have entered the last round, in which rank 2 dies; the others wait for it."""
    trace = dp_trace(quiet_ns=quiet_ns)
    at_ns = int(trace.collectives["ts_ns"].max()) + 5 * MS
    trace.processes["ended_ns"][trace.processes["pid"] == 1002] = at_ns
    trace.snapshots["category"] = Category.WAIT_GPU
    trace.snapshots["alive"] = trace.snapshots["pid"] != 1002
    ends = empty(HOST_EVENTS, 0 if status is None else 1)
    ends["kind"], ends["pid"], ends["ts_ns"], ends["value"] = HostKind.EXIT, 1002, at_ns, status or 0
    return replace(trace, host_events=ends)


def test_a_rank_that_died_within_a_round_is_named():
    verdict = only(report_of(killed_within_a_round(137)))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("hang", [2], [0, 1, 3])
    assert "has not completed round" in verdict.summary and "SIGKILL" in verdict.summary
    assert verdict.advice and "the SIGKILL" in verdict.advice[0]


@pytest.mark.parametrize("status", [0, None])
def test_a_rank_that_ended_with_status_zero_or_unknown_caused_no_hang(status):
    assert report_of(killed_within_a_round(status)).healthy


def test_a_moment_is_given_to_those_whom_the_dead_left():
    assert report_of(killed_within_a_round(137, quiet_ns=LIMITS.dead_after_ns // 2)).healthy


def test_ranks_that_compute_do_not_wait_for_an_ended_rank():
    trace = killed_within_a_round(137)
    trace.snapshots["category"][trace.snapshots["pid"] == 1000] = Category.ON_CPU
    assert report_of(trace).healthy


def test_of_two_ranks_that_cross_none_is_named_and_the_fabric_is_not_blamed():
    """One rank calls on the first communicator, then on the second; the other rank in the opposite order."""
    trace = hung(program=(Call(((0, 1),), count=7), Call(((0, 1),), count=8, waits=True)), n_ranks=2)
    rows = trace.collectives.copy()
    rows["comm_hash"][rows["count"] == 8] ^= np.uint64(5)
    for count in (7, 8):
        for rank in range(2):
            own_rows = (rows["count"] == count) & (rows["pid"] == 1000 + rank)
            rows["seq"][own_rows] = np.arange(own_rows.sum())
    last = np.flatnonzero(rows["pid"] == 1001)[-2:]
    rows[last[::-1]] = rows[last]
    rows["ts_ns"][last] = np.sort(rows["ts_ns"][last])
    rows["wait_leave_ns"][last] = rows["wait_leave_ns"][last].min()
    trace.snapshots["category"], trace.snapshots["in_call"] = Category.WAIT_GPU, Op.SYNC
    verdict = only(report_of(replace(trace, collectives=rows)))
    assert (verdict.kind, verdict.ranks) == ("hang", [])
    assert "different orders" in str(verdict.abstained_because)
    assert "same order" in verdict.advice[0]
