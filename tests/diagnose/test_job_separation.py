"""Several jobs in one trace: a restarted job, and jobs that run at the same time."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.stream import Stream
from stallscope.diagnose.timeline.job_separation import job_of, parts
from stallscope.diagnose.timeline.late_jobs import late_jobs
from stallscope.diagnose.views.by_process import process_rows
from stallscope.events import layout
from stallscope.events.layout import HOST_EVENTS, UNKNOWN, Array, empty
from stallscope.events.names import CollectiveFlag, HostKind
from stallscope.events.trace import Trace

from .builders import MS, dp_trace, every
from .cutting import Hand
from .reports import report_of

DELAY_NS = 40 * MS
KILL, TERM = 9, 15


def another(trace: Trace, *, pids_from: int, later_ns: int) -> Trace:
    """The same job under other process numbers, later."""
    moved = {}
    for table in ("collectives", "processes", "snapshots"):
        rows = getattr(trace, table).copy()
        rows["pid"] += pids_from
        rows["ts_ns"] += later_ns
        moved[table] = rows
    moved["collectives"]["tid"] += pids_from
    moved["collectives"]["comm_hash"] ^= np.uint64(pids_from)
    for name in ("wait_enter_ns", "wait_leave_ns"):
        known = moved["collectives"][name] != UNKNOWN
        moved["collectives"][name][known] += later_ns
    return replace(trace, **moved, ends_ns=tuple(end_ns + later_ns for end_ns in trace.ends_ns))


def side_by_side(entry: Trace, *others: Trace) -> Trace:
    tables = ("collectives", "processes", "snapshots")
    joined = {name: np.concatenate([getattr(trace, name) for trace in (entry, *others)]) for name in tables}
    joined["collectives"] = joined["collectives"][np.argsort(joined["collectives"]["ts_ns"], kind="stable")]
    return replace(entry, **joined, ends_ns=others[-1].ends_ns if others else entry.ends_ns)


def length_ns(trace: Trace) -> int:
    return int(trace.collectives["ts_ns"].max() - trace.collectives["ts_ns"].min())


def ended(trace: Trace, *, status: int = 128 + KILL) -> Trace:
    """All its processes have ended after their last calls, killed by one launcher."""
    rows = trace.processes.copy()
    rows["ended_ns"] = trace.collectives["ts_ns"].max() + MS
    events = np.concatenate(
        [trace.host_events]
        + [exited(int(row["pid"]), int(row["ended_ns"]), status, killer=77) for row in rows]
    )
    return replace(trace, processes=rows, host_events=events)


def exited(pid: int, at_ns: int, status: int, *, killer: int = UNKNOWN) -> Array:
    """Rows of HOST_EVENTS: the end of a process, and the signal that ended it."""
    rows = empty(HOST_EVENTS, 2)
    rows["pid"], rows["ts_ns"] = pid, at_ns
    rows["kind"], rows["value"] = (HostKind.SIGNAL, HostKind.EXIT), (max(status - 128, 0), status)
    rows["by_pid"] = killer
    return rows if status > 128 else rows[1:]


def restarted(gap_ns: int = 300 * MS) -> Trace:
    """A healthy job that is killed, then the same job again, with rank 1 late at times."""
    first = ended(dp_trace())
    again = another(dp_trace(every(1, 4, DELAY_NS)), pids_from=100, later_ns=length_ns(first) + gap_ns)
    return replace(side_by_side(first, again), host_events=first.host_events)


def test_each_run_of_a_restarted_job_is_diagnosed_separately():
    report = report_of(restarted())
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("straggler", [1], [0, 2, 3])
    assert verdict.evidence.job.number == 2
    assert verdict.evidence.n_steps <= 40
    assert (report.examined["n_jobs"], report.examined["n_nodes"]) == (2, 1)


def test_two_jobs_at_the_same_time_are_two():
    first = dp_trace(every(2, 5, DELAY_NS))
    both = side_by_side(first, another(dp_trace(), pids_from=100, later_ns=5 * MS))
    (verdict,) = report_of(both).verdicts
    assert (verdict.ranks, verdict.evidence.job.number) == ([2], 1)


def attached_late(trace: Trace) -> Trace:
    """Communicators that are older than the capture."""
    rows = trace.collectives.copy()
    rows["comm_hash"], rows["flags"] = 0, rows["flags"] | int(CollectiveFlag.LATE_ATTACH)
    return replace(trace, collectives=rows, communicators=trace.communicators[:0])


def test_two_jobs_of_one_size_that_were_attached_late_are_two():
    """Their processes take turns, and only their pids distinguish them."""
    both = side_by_side(
        attached_late(dp_trace(every(2, 5, DELAY_NS), n_steps=100)),
        attached_late(another(dp_trace(n_steps=100), pids_from=100, later_ns=MS)),
    )
    jobs = job_of(both)
    assert {jobs[0, pid] for pid in range(1000, 1004)} == {0}
    assert {jobs[0, pid] for pid in range(1100, 1104)} == {1}
    stream = Stream(clock=Hand())
    stream.feed(both)
    assert stream.n_jobs == 2
    expected = [("straggler", [2], [1002])]
    assert [(verdict.kind, verdict.ranks, verdict.pids) for verdict in report_of(both).verdicts] == expected
    found = [
        (change.verdict.kind, change.verdict.ranks, change.verdict.pids)
        for change in stream.finish()
        if change.kind == "opened"
    ]
    assert found == expected


def test_replicas_that_share_no_communicator_stay_together():
    """Their ranks differ, and they run at the same time."""
    first = dp_trace()
    second = another(dp_trace(), pids_from=100, later_ns=5 * MS)
    second.processes["rank"] += 4
    both = side_by_side(first, second)
    assert parts(both) == [both]
    assert report_of(both).examined["n_ranks"] == 8


def test_processes_with_the_same_rank_in_one_communicator_are_one_job():
    """Like workers that inherit the environment of the process that forked them."""
    trace = dp_trace(every(2, 5, DELAY_NS))
    trace.processes["rank"] = 0
    assert job_of(trace) == {}
    assert len(report_of(trace).verdicts) == 1


def test_process_rows_have_the_rank_and_job_of_the_process():
    trace = restarted()
    rows = process_rows(trace, report_of(trace))
    assert [(row.job, row.rank, row.pid) for row in rows] == [
        *((1, rank, 1000 + rank) for rank in range(4)),
        *((2, rank, 1100 + rank) for rank in range(4)),
    ]
    assert [row.pid for row in rows if row.part == "culprit"] == [1101]
    assert {row.part for row in rows if row.job == 1} == {""}


# ---- the rank that broke first ----


def broken(*ends: tuple[int, int, int, int]) -> Trace:
    """A job whose processes have ended: (rank, ms after the last call, exit status, who sent the signal)."""
    trace = dp_trace()
    last_ns = int(trace.collectives["ts_ns"].max())
    rows = [exited(1000 + rank, last_ns + ms * MS, status, killer=by) for rank, ms, status, by in ends]
    for rank, ms, _, _ in ends:
        trace.processes["ended_ns"][rank] = last_ns + ms * MS
    trace.snapshots["alive"] = 0
    return replace(trace, host_events=np.concatenate([trace.host_events, *rows]))


LAUNCHER = 77
THE_OTHERS = [(rank, 300, 128 + TERM, LAUNCHER) for rank in (0, 1, 3)]


@pytest.mark.parametrize(
    ("status", "by", "message"),
    [
        (1, UNKNOWN, "its process has ended (exit status 1)"),
        (139, UNKNOWN, "its process was ended by SIGSEGV"),
        (137, 66, "its process was ended by SIGKILL from"),
    ],
)
def test_the_rank_whose_failure_ended_the_job_is_named(status, by, message):
    (verdict,) = report_of(broken((2, 0, status, by), *THE_OTHERS)).verdicts
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("failure", [2], [0, 1, 3])
    assert message in verdict.summary


@pytest.mark.parametrize(
    "ends",
    [
        [(rank, 10 * rank, 128 + KILL, LAUNCHER) for rank in range(4)],
        [(rank, 10 * rank, 128 + TERM, LAUNCHER) for rank in range(4)],
        [(rank, 200 * rank, 0, UNKNOWN) for rank in range(4)],
        [(rank, 100 * rank, 1, UNKNOWN) for rank in range(4)],
        [(0, 0, 1, UNKNOWN), *((rank, 900, 0, UNKNOWN) for rank in (1, 2, 3))],
        [(0, 0, 1, UNKNOWN)],
    ],
    ids=["killed by one", "told to end", "ended well", "broke alike", "the others ended well", "others live"],
)
def test_no_rank_is_named_for_an_external_or_regular_end_of_a_job(ends):
    trace = broken(*ends)
    if len(ends) < 4:  # and they go on for less than a hang needs
        trace = replace(trace, ends_ns=(int(trace.collectives["ts_ns"].max()) + 500 * MS,))
    assert report_of(trace).healthy


def test_a_failed_run_is_reported_although_the_job_was_restarted():
    first = broken((2, 0, 139, UNKNOWN), *THE_OTHERS)
    again = another(dp_trace(), pids_from=100, later_ns=length_ns(first) + 600 * MS)
    report = report_of(replace(side_by_side(first, again), host_events=first.host_events))
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.ranks, verdict.evidence.job.number) == ("failure", [2], 1)


def test_a_stream_reports_the_failed_rank_after_the_end_of_the_job():
    trace = broken((2, 0, 139, UNKNOWN), *THE_OTHERS)
    stream = Stream(clock=Hand())
    changes = [*stream.feed(trace), *stream.finish()]
    (opened,) = [change for change in changes if change.kind == "opened"]
    assert (opened.verdict.kind, opened.verdict.ranks) == ("failure", [2])
    (verdict,) = stream.report().verdicts
    assert (verdict.kind, verdict.ranks) == ("failure", [2])


def test_a_trace_without_processes_is_one_job():
    assert job_of(replace(dp_trace(), processes=layout.empty(layout.PROCESSES))) == {}


def test_jobs_of_two_machines_that_were_attached_late_are_two():
    """Their ranks are equal, and no releases of theirs can be compared."""
    jobs = late_jobs(
        [(0, 10), (0, 11), (1, 10), (1, 11), (1, 12)],
        {(0, 10): 0, (0, 11): 1, (1, 10): 0, (1, 11): 1, (1, 12): 2},
        dict.fromkeys([(0, 10), (0, 11), (1, 10), (1, 11), (1, 12)], np.zeros(0, np.int64)),
    )
    assert sorted(map(sorted, jobs)) == [[(0, 10), (0, 11)], [(1, 10), (1, 11), (1, 12)]]


def test_the_most_severe_verdict_of_several_jobs_is_the_first():
    slight = another(dp_trace(every(1, 10, 4 * MS)), pids_from=100, later_ns=-5 * MS)
    verdicts = report_of(side_by_side(slight, dp_trace(every(2, 2, 90 * MS)))).verdicts
    assert [(verdict.severity, verdict.evidence.job.number) for verdict in verdicts] == [
        ("critical", 2),
        ("low", 1),
    ]


def test_releases_that_a_busy_machine_delays_are_still_of_one_job():
    """An eighth of them is 9 ms late; the process of the other job has almost the same pace."""
    step_ns, n = 20 * MS, 200
    first = np.arange(n) * step_ns
    second = first + np.where(np.arange(n) % 8 == 0, 9 * MS, MS // 2)
    other = np.arange(n) * (step_ns + MS // 2)
    processes = [(0, 10), (0, 11), (0, 12)]
    jobs = late_jobs(
        processes, dict.fromkeys(processes, 0), dict(zip(processes, (first, second, other), strict=True))
    )
    assert jobs == [[(0, 10), (0, 11)], [(0, 12)]]


@pytest.mark.parametrize("missing", [range(100, 130), range(3, 400, 12)], ids=["gap", "single waits"])
def test_missing_releases_do_not_separate_the_processes_of_a_job(missing: range):
    whole = np.arange(400) * 20 * MS
    processes = [(0, 10), (0, 11)]
    releases_ns = {(0, 10): whole, (0, 11): np.delete(whole + MS // 5, list(missing))}
    assert late_jobs(processes, dict.fromkeys(processes, 2), releases_ns) == [processes]
