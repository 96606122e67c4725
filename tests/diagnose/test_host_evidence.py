"""Host events in a verdict: file and disk, quota, sender of a signal, reason of an exit."""

import signal
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from stallscope.diagnose.causes import Excess, explained
from stallscope.diagnose.report import text
from stallscope.diagnose.stream import Stream
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events import layout
from stallscope.events.layout import ARRAYS, Array
from stallscope.events.names import N_CATEGORIES, Category, HostKind, OffCpuFlag
from stallscope.events.trace import Trace

from .builders import MS, Gone, Job, data_parallel, dp_trace, every, trace_of
from .reports import only, report_of

VICTIM = 2


def told(trace: Trace, *rows: dict[str, Any]) -> Trace:
    """The trace with these HOST_EVENTS, of the victim's process unless they name another process."""
    events = layout.empty(layout.HOST_EVENTS, len(rows))
    pid = trace.processes["pid"][trace.processes["rank"] == VICTIM][0]
    for event, row in zip(events, rows, strict=True):
        for name, value in {"pid": pid, **row}.items():
            event[name] = value
    return replace(trace, host_events=events)


def late_begins(trace: Trace) -> list[int]:
    """When the victim's longest intervals between two calls began."""
    own = np.sort(trace.collectives["ts_ns"][trace.collectives["comm_rank"] == VICTIM])
    gaps = np.diff(own)
    return sorted(own[:-1][gaps > 40 * MS].tolist())


def slow(category: Category) -> Trace:
    return dp_trace(every(VICTIM, 7, 50 * MS, category=category))


def test_a_driver_wait_is_reported_with_its_ioctls():
    trace = slow(Category.DRIVER)
    call = {"kind": HostKind.DRIVER_CALL, "duration_ns": 45 * MS, "detail": b"ioctl:UVM_MIGRATE"}
    short = call | {"duration_ns": 2 * MS, "detail": b"ioctl:NV_ESC_RM_CONTROL"}
    rows = [entry | {"ts_ns": at} for at in late_begins(trace) for entry in (short, call)]
    verdict = only(report_of(told(trace, *rows)))
    assert verdict.causes[0].evidence.ioctls == ["UVM_MIGRATE", "NV_ESC_RM_CONTROL"]
    assert ", blocked in the GPU driver (UVM_MIGRATE)" in verdict.summary
    assert "blocked in the GPU driver (ioctl)" in only(report_of(trace)).summary


def test_an_io_wait_is_reported_with_disk_and_file():
    trace = slow(Category.IO)
    begins = late_begins(trace)
    assert len(begins) >= 3
    waits = [
        {
            "kind": HostKind.FILE_WAIT,
            "ts_ns": at,
            "duration_ns": 45 * MS,
            "device": b"sdb1",
            "file": b"/ckpt/step-7.pt",
        }
        for at in begins
    ]
    other = {"kind": HostKind.FILE_WAIT, "duration_ns": 90 * MS, "device": b"sda1", "file": b"/var/log/else"}
    elsewhere = [other | {"ts_ns": at, "pid": 4242} for at in begins]
    too_early = other | {"ts_ns": begins[0] - 2000 * MS}
    verdict = only(report_of(told(trace, *waits, *elsewhere, too_early)))
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([VICTIM], "block_io")
    assert verdict.causes[0].evidence.devices == ["sdb1"]
    assert verdict.causes[0].evidence.files == ["/ckpt/step-7.pt"]
    assert ", waiting for disk or file I/O (sdb1, file /ckpt/step-7.pt)" in verdict.summary


def test_the_sender_of_a_stop_signal_is_reported():
    trace = slow(Category.STOPPED)
    stops = [
        {
            "kind": HostKind.SIGNAL,
            "ts_ns": at + MS,
            "value": signal.SIGSTOP,
            "by_pid": 77,
            "by_comm": b"suspend.sh",
        }
        for at in late_begins(trace)
    ]
    goes_on = [
        stop | {"value": signal.SIGCONT, "by_pid": 78, "ts_ns": stop["ts_ns"] + 9 * MS} for stop in stops
    ]
    verdict = only(report_of(told(trace, *stops, *goes_on)))
    assert verdict.causes[0].evidence.stopped_by == ["suspend.sh (pid 77)"]
    assert "stopped by a signal from suspend.sh (pid 77)" in verdict.summary


def test_without_host_events_only_the_category_is_reported():
    for category, title in (
        (Category.IO, "waiting for disk or file I/O."),
        (Category.STOPPED, ", stopped (SIGSTOP"),
    ):
        assert title in only(report_of(slow(category))).summary


def preempted(flags: list[int]) -> Array:
    off = layout.empty(layout.OFFCPU, len(flags))
    off["category"], off["duration_ns"], off["flags"] = Category.PREEMPTED, 10 * MS, flags
    off["by_pid"], off["by_comm"] = 9, b"stress"
    return off


def explained_by(off: Array, *host: dict[str, Any], category: Category = Category.PREEMPTED):
    ledger = np.zeros(N_CATEGORIES)
    ledger[category - 1] = 100 * MS
    rows = layout.empty(layout.HOST_EVENTS, len(host))
    for row, entry in zip(rows, host, strict=True):
        for name, value in entry.items():
            row[name] = value
    return explained(Excess(total_ns=100.0 * MS, ledger_ns=ledger, n_steps=5, offcpu=off, host=rows))[0]


QUOTA = {
    "kind": HostKind.THROTTLED,
    "duration_ns": 300 * MS,
    "value": 9,
    "detail": b"cpu.max 50000/100000",
    "file": b"/kubepods/pod7",
}


def test_cpu_quota_throttling_is_not_attributed_to_a_neighbour():
    part = explained_by(preempted([OffCpuFlag.THROTTLED | OffCpuFlag.PREEMPTED] * 3 + [1]), QUOTA)
    assert part.evidence.quota == "cpu.max 50000/100000"
    assert part.evidence.control_group == "/kubepods/pod7"
    assert part.evidence.by is None
    assert part.state == "kept off the CPU by the quota of its control group (cpu.max 50000/100000)"
    assert "CPU limit" in part.cause.advice(part.evidence)[0]


def test_preemption_by_a_neighbour_is_not_attributed_to_a_quota():
    part = explained_by(preempted([1, 1, 1, OffCpuFlag.THROTTLED | 1]), QUOTA)
    assert part.evidence.by == ["stress"] and part.evidence.quota is None
    assert part.state == part.cause.state


def test_retransmits_are_counted_with_whom_they_were_for():
    row = {"kind": HostKind.RETRANSMIT, "value": 4, "file": b"10.0.0.9:29500", "device": b"eth0"}
    part = explained_by(layout.empty(layout.OFFCPU), row, row, category=Category.NET)
    assert (part.evidence.n_retransmits, part.evidence.to) == (8, ["10.0.0.9:29500"])
    assert "loses packets (8 retransmits)" in part.state
    assert "ethtool" in part.cause.advice(part.evidence)[0]


def test_reclaim_and_compaction_are_reported_with_their_durations():
    rows = [
        {"kind": HostKind.RECLAIM, "duration_ns": 40 * MS},
        {"kind": HostKind.RECLAIM, "duration_ns": 2 * MS, "detail": b"short ones", "value": 30},
        {"kind": HostKind.COMPACTION, "duration_ns": 7 * MS},
    ]
    part = explained_by(layout.empty(layout.OFFCPU), *rows, category=Category.FAULT)
    assert (part.evidence.reclaim_ms, part.evidence.compaction_ms) == (42.0, 7.0)


@pytest.mark.parametrize(
    ("resent", "is_told"),
    [
        ({}, True),
        ({"detail": b"from port 40001"}, False),
        ({"file": b"10.0.0.2:29501"}, False),
        ({"ts_ns": 0}, False),
    ],
    ids=["of this connection", "from another port", "to another port", "at another time"],
)
def test_retransmits_of_the_peer_during_the_wait_are_reported(resent: dict[str, Any], is_told: bool):
    """The packets to the late rank were lost: its peer counts them."""
    trace = slow(Category.NET)
    rows = []
    for at in late_begins(trace):
        own_rows = {"kind": HostKind.SOCKET_WAIT, "ts_ns": at, "duration_ns": 45 * MS}
        rows.append(own_rows | {"file": b"10.0.0.1:40000", "detail": b"from port 29500"})
        other_rows = {"kind": HostKind.RETRANSMIT, "pid": 1001, "ts_ns": at, "value": 2, "device": b"eth0"}
        rows.append(other_rows | {"file": b"10.0.0.2:29500", "detail": b"from port 40000"} | resent)
    (verdict,) = report_of(told(trace, *rows)).verdicts
    part = verdict.causes[0]
    assert (verdict.ranks, part.cause.name) == ([VICTIM], "network_wait")
    assert part.evidence.n_retransmits == (len(rows) if is_told else None)
    assert ("loses packets" in verdict.summary) == is_told


def dead(*rows: dict[str, Any]):
    limits = Thresholds()
    gone = (Gone(VICTIM, 30, 1, Category.NONE),)
    trace = trace_of(Job(data_parallel(), gone=gone, quiet_ns=limits.dead_after_ns + 100 * MS))
    ended = trace.processes["ended_ns"][trace.processes["rank"] == VICTIM][0]
    return only(report_of(told(trace, *({"ts_ns": ended} | row for row in rows))))


EXIT_9 = {"kind": HostKind.EXIT, "value": 128 + signal.SIGKILL}
KILL = {"kind": HostKind.SIGNAL, "value": signal.SIGKILL}
INTERRUPT = {"kind": HostKind.SIGNAL, "value": signal.SIGINT, "by_pid": 66, "by_comm": b"bash"}


@pytest.mark.parametrize(
    ("rows", "message", "advice"),
    [
        (
            [{"kind": HostKind.OOM_KILL, "by_pid": 55, "by_comm": b"loader"}, KILL, EXIT_9],
            "ended by the kernel's out-of-memory killer, while loader (pid 55) asked for memory (exit status 137)",
            "more host memory",
        ),
        (
            [KILL | {"by_pid": 66, "by_comm": b"slurmstepd"}, EXIT_9],
            "ended by SIGKILL from slurmstepd (pid 66) (exit status 137)",
            "the SIGKILL",
        ),
        ([{"kind": HostKind.EXIT, "value": 1}], "its process has ended (exit status 1)", "the rank's log"),
        (
            [INTERRUPT, {"kind": HostKind.EXIT, "value": 0}],
            "its process has ended after SIGINT from bash (pid 66) (exit status 0)",
            "the rank's log",
        ),
        (
            [
                {"kind": HostKind.FORK, "pid": 4242, "by_pid": 1000 + VICTIM},
                {"kind": HostKind.OOM_KILL, "pid": 4242, "comm": b"pt_data_worker"},
                {"kind": HostKind.EXIT, "value": 1},
            ],
            "ended by the loss of its child pt_data_worker (pid 4242), which the kernel's out-of-memory killer ended",
            "more host memory",
        ),
        (
            [
                {"kind": HostKind.FORK, "pid": 4242, "by_pid": 3},
                {"kind": HostKind.OOM_KILL, "pid": 4242, "comm": b"other"},
                {"kind": HostKind.EXIT, "value": 1},
            ],
            "its process has ended (exit status 1)",
            "the rank's log",
        ),
        ([{"kind": HostKind.EXIT, "value": 139}], "ended by SIGSEGV (exit status 139)", "core file"),
        ([EXIT_9 | {"pid": 4242}, KILL | {"pid": 4242, "by_pid": 3}], "its process has ended.", "exit code"),
    ],
    ids=[
        *(
            "out of memory",
            "killed",
            "exited",
            "interrupted",
            "worker out of memory",
            "other worker out of memory",
        ),
        *("crashed", "of another process"),
    ],
)
def test_the_end_of_a_missing_rank_is_reported_with_its_reason(
    rows: list[dict[str, Any]], message: str, advice: str
):
    verdict = dead(*rows)
    assert (verdict.kind, verdict.ranks) == ("hang", [VICTIM])
    assert message in verdict.summary
    assert advice in verdict.advice[0]


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_sender_of_a_stop_is_reported_only_while_the_rank_is_stopped(goes_on: bool):
    trace = trace_of(
        Job(
            data_parallel(),
            gone=(Gone(VICTIM, 30, 1, Category.STOPPED),),
            quiet_ns=2 * Thresholds().hang_after_ns,
        )
    )
    stop = {"kind": HostKind.SIGNAL, "ts_ns": 1, "value": signal.SIGSTOP, "by_pid": 5, "by_comm": b"bash"}
    rows = [stop, stop | {"ts_ns": 2, "value": signal.SIGCONT}] if goes_on else [stop]
    summary = only(report_of(told(trace, *rows))).summary
    assert ("SIGSTOP from bash (pid 5)" in summary) != goes_on


def test_words_and_data_agree():
    trace = slow(Category.IO)
    wait = {"kind": HostKind.FILE_WAIT, "duration_ns": 45 * MS, "device": b"nvme0n1", "file": b"/data/x"}
    report = report_of(told(trace, *(wait | {"ts_ns": at} for at in late_begins(trace))))
    assert "devices nvme0n1" in text.report(report) and "files /data/x" in text.report(report)


def test_a_truncated_file_name_is_merged_with_its_full_path():
    rows = [
        {"kind": HostKind.FILE_WAIT, "duration_ns": 9 * MS, "file": b"a-very-long-name-that-i"},
        {"kind": HostKind.FILE_WAIT, "duration_ns": 5 * MS, "file": b"/data/a-very-long-name-that-is-cut"},
        {"kind": HostKind.FILE_WAIT, "duration_ns": 1 * MS, "file": b"other"},
    ]
    part = explained_by(layout.empty(layout.OFFCPU), *rows, category=Category.IO)
    assert part.evidence.files == ["/data/a-very-long-name-that-is-cut", "other"]


def test_a_stream_reports_the_same_host_evidence():
    trace = slow(Category.IO)
    wait = {"kind": HostKind.FILE_WAIT, "duration_ns": 45 * MS, "device": b"sdb1", "file": b"/data/x"}
    strange = wait | {"pid": 4242, "device": b"other"}
    at = late_begins(trace)
    trace = told(trace, *(entry | {"ts_ns": begin} for begin in at for entry in (wait, strange)))
    stream = Stream()
    edges = np.linspace(0, trace.collectives["ts_ns"].max() + 1, 30).astype(np.int64)
    for begin, end in pairwise(edges.tolist()):
        parts = {
            table.name: rows[(rows["ts_ns"] >= begin) & (rows["ts_ns"] < end)]
            for table in ARRAYS
            for rows in [getattr(trace, table.name)]
        }
        stream.feed(replace(trace, **parts))
    verdict = only(stream.report())
    assert (verdict.ranks, verdict.causes[0].evidence.devices) == ([VICTIM], ["sdb1"])
    assert stream.report().examined["n_ranks"] == 4
