"""The path of a late request through the threads and processes of its engine."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stallscope.diagnose import diagnose
from stallscope.diagnose.report.text import report as text_of
from stallscope.diagnose.serving.engine_threads import with_times
from stallscope.diagnose.serving.request_path import Segment, Waits, path
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import Category, SampleRole

sys.path.insert(0, str(Path(__file__).parent))
from engine_traces import LATE, MS, PID, SECOND, THREAD, EngineTrace

CORE, CORE_THREAD, SENDER = 200, 200, 201
DELAY_NS = 300 * MS
SENDTO = 44


def wait(begin_ms: int, end_ms: int, category: Category, **values: object) -> Array:
    row = layout.empty(layout.OFFCPU, 1)
    row["ts_ns"], row["duration_ns"] = begin_ms * MS, (end_ms - begin_ms) * MS
    row["pid"], row["tid"], row["category"] = PID, THREAD, category
    for name, value in values.items():
        row[name] = value
    return row


def path_of(*rows: Array, begin_ms: int = 0, end_ms: int = 100) -> list[Segment]:
    waits = Waits(np.concatenate([layout.empty(layout.OFFCPU), *rows]))
    return path(waits, (PID, CORE), (PID, THREAD), begin_ms * MS, end_ms * MS)


def short(segments: list[Segment]) -> list[tuple[int, int, str, int]]:
    return [(each.pid, each.tid, each.category.name, each.ns // MS) for each in segments]


def test_a_thread_without_waits_has_no_known_state():
    assert short(path_of()) == [(PID, THREAD, "NONE", 100)]


def test_a_thread_runs_between_its_waits():
    sleeps = [wait(-20, -10, Category.SLEEP), wait(20, 50, Category.SLEEP)]
    assert short(path_of(*sleeps)) == [
        (PID, THREAD, "ON_CPU", 20),
        (PID, THREAD, "SLEEP", 30),
        (PID, THREAD, "ON_CPU", 50),
    ]


def test_a_wait_for_another_process_leads_to_its_threads():
    front = wait(5, 90, Category.NET, waker_pid=CORE, waker_tid=SENDER, runnable_ns=10 * MS)
    sender = wait(
        6, 75, Category.LOCK, pid=CORE, tid=SENDER, waker_pid=CORE, waker_tid=CORE_THREAD, runnable_ns=0
    )
    core = wait(10, 60, Category.IO, pid=CORE, tid=CORE_THREAD)
    assert short(path_of(front, sender, core, begin_ms=20)) == [
        (CORE, CORE_THREAD, "IO", 40),
        (CORE, CORE_THREAD, "ON_CPU", 15),
        (CORE, SENDER, "ON_CPU", 5),
        (PID, THREAD, "PREEMPTED", 10),
        (PID, THREAD, "ON_CPU", 10),
    ]


def test_only_the_time_after_a_message_of_another_process_is_a_pickup():
    front = wait(5, 90, Category.NET, waker_pid=CORE, waker_tid=SENDER, runnable_ns=10 * MS)
    own = wait(5, 90, Category.NET, waker_pid=PID, waker_tid=THREAD + 1, runnable_ns=10 * MS)
    assert [each.ns // MS for each in path_of(front) if each.is_pickup] == [10]
    assert not any(each.is_pickup for each in path_of(own))


def test_a_wait_that_a_program_outside_the_engine_ends_stays_with_the_thread():
    segments = path_of(wait(0, 100, Category.NET, waker_pid=999, waker_tid=999))
    assert short(segments) == [(PID, THREAD, "NET", 100)]


def test_two_threads_that_wake_each_other_at_a_moment_end_the_path():
    rows = [
        wait(0, 100, Category.LOCK, waker_pid=CORE, waker_tid=CORE_THREAD),
        wait(0, 100, Category.LOCK, pid=CORE, tid=CORE_THREAD, waker_pid=PID, waker_tid=THREAD),
    ]
    assert sum(each.ns for each in path_of(*rows)) == 100 * MS


@pytest.mark.parametrize("begin_ms", [0, 7, 33, 99])
def test_the_segments_cover_the_interval_once(begin_ms):
    rows = [
        wait(5, 90, Category.NET, waker_pid=CORE, waker_tid=CORE_THREAD, runnable_ns=3 * MS),
        wait(30, 60, Category.SLEEP, pid=CORE, tid=CORE_THREAD),
        wait(-9, 2, Category.LOCK, pid=CORE, tid=CORE_THREAD, waker_pid=PID, waker_tid=THREAD),
    ]
    segments = path_of(*rows, begin_ms=begin_ms)
    assert segments[0].begin_ns == begin_ms * MS
    assert segments[-1].end_ns == 100 * MS
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(segments))


def two_processes() -> EngineTrace:
    """The API server waits for the core in each late gap."""
    engine = EngineTrace()
    engine.server(SECOND, pid=CORE)
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(
            begin_ns,
            end_ns - 20 * MS,
            Category.NET,
            waker_pid=CORE,
            waker_tid=CORE_THREAD,
            runnable_ns=10 * MS,
        )
    return engine


def test_the_late_time_is_split_along_the_path():
    engine = two_processes()
    for i in LATE:
        begin_ns = int(engine.requests["gap_at_ns"][i])
        core = {"pid": CORE, "tid": CORE_THREAD}
        engine.off(begin_ns + 20 * MS, begin_ns + 220 * MS, Category.FAULT, **core)
        engine.off(begin_ns - 50 * MS, begin_ns - 40 * MS, Category.SLEEP, **core)
    report = diagnose(engine.trace())
    (verdict,) = report.verdicts
    assert verdict.causes[0].cause.name == "page_fault"
    assert verdict.pids == [CORE]
    assert [(each.part, each.ms, each.pid) for each in verdict.evidence.parts or []] == [
        ("front_end", 20, PID),
        ("hand_over", 10, PID),
        ("decode", 270, CORE),
    ]
    assert (verdict.evidence.parts or [])[2].states == {"fault": 200, "on_cpu": 70}
    assert "decode 270 ms in process 200: fault 200 ms, on cpu 70.0 ms" in text_of(report)


def test_the_advice_names_a_front_end_that_holds_the_requests():
    engine = EngineTrace()
    engine.server(SECOND, pid=CORE)
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        token_ns = begin_ns + 10 * MS
        engine.off(begin_ns, token_ns, Category.NET, waker_pid=CORE, waker_tid=CORE_THREAD)
        engine.off(token_ns, end_ns - 10 * MS, Category.SLEEP)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert verdict.causes[0].cause.name == "host_sleep"
    assert any("front end" in each for each in verdict.advice)
    assert not any("rank" in each for each in verdict.advice)


def test_a_process_that_works_while_a_request_waits_for_it_is_named():
    engine = two_processes()
    for i in LATE:
        begin_ns = int(engine.requests["gap_at_ns"][i])
        engine.off(
            begin_ns - 50 * MS, begin_ns + 10 * MS, Category.SLEEP, pid=CORE, tid=CORE_THREAD, waker_pid=0
        )
        engine.sample(
            begin_ns, Category.ON_CPU, "/srv/core.py:5 schedule", pid=CORE, owner_pid=CORE, tid=CORE_THREAD
        )
    (verdict,) = diagnose(engine.trace()).verdicts
    assert verdict.causes[0].cause.name == "host_compute"
    assert verdict.pids == [CORE]
    assert verdict.evidence.line == "/srv/core.py:5 schedule"


def test_a_thread_that_the_ledger_does_not_follow_hides_the_next_process():
    """The path ends in the server at a thread without rows; a thread of the model's process runs in that time."""
    engine = EngineTrace()
    engine.server(SECOND, pid=CORE)
    model = {"pid": CORE, "tid": CORE_THREAD}
    idle_since_ns = 0
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns - MS, Category.NET, waker_pid=PID, waker_tid=THREAD + 9)
        engine.off(idle_since_ns, begin_ns, Category.NET, **model)
        idle_since_ns = end_ns
    engine.off(idle_since_ns, idle_since_ns + SECOND, Category.NET, **model)
    engine.sample(
        SECOND * 2,
        Category.ON_CPU,
        "/srv/model.py:8 merge",
        pid=CORE,
        owner_pid=CORE,
        tid=CORE_THREAD,
        n=1,
    )
    for second in range(8):
        engine.sample(SECOND * second, Category.NET, pid=CORE, owner_pid=CORE, tid=CORE_THREAD, n=1)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert verdict.causes[0].cause.name == "host_compute"
    assert verdict.pids == [CORE]
    assert verdict.evidence.line == "/srv/model.py:8 merge"


def test_a_thread_with_the_interpreter_lock_that_also_takes_the_cpu_is_named():
    """The core waits 5 ms for the lock, then 45 ms for a CPU, again and again; its background thread runs."""
    engine = two_processes()
    spin = {"pid": CORE, "tid": CORE_THREAD + 5}
    idle_since_ns = 0
    for i in LATE:
        begin_ns = int(engine.requests["gap_at_ns"][i])
        for at_ns in range(begin_ns - 10 * MS, begin_ns + 270 * MS, 50 * MS):
            values = {"pid": CORE, "tid": CORE_THREAD, "waker_pid": -1, "runnable_ns": 45 * MS}
            engine.off(at_ns, at_ns + 50 * MS, Category.LOCK, **values)
        engine.off(idle_since_ns, begin_ns, Category.SLEEP, **spin)
        idle_since_ns = begin_ns + DELAY_NS
    engine.off(idle_since_ns, idle_since_ns + SECOND, Category.SLEEP, **spin)
    engine.sample(SECOND, Category.ON_CPU, "/srv/stats.py:3 squares", owner_pid=CORE, **spin)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert verdict.causes[0].cause.name == "gil"
    assert verdict.pids == [CORE]
    assert verdict.evidence.line == "/srv/stats.py:3 squares"


def test_a_preempted_thread_with_the_interpreter_lock_is_not_the_cause():
    """The serving thread waits for the lock of a thread whose CPU another program has."""
    engine = EngineTrace()
    holder = {"tid": THREAD + 1}
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.LOCK, waker_pid=PID, waker_tid=THREAD + 1)
        engine.off(
            begin_ns + 5 * MS, begin_ns + 180 * MS, Category.PREEMPTED, by_pid=9, by_comm=b"hog", **holder
        )
        engine.off(
            begin_ns + 185 * MS, end_ns - 5 * MS, Category.PREEMPTED, by_pid=9, by_comm=b"hog", **holder
        )
        engine.off(begin_ns - 20 * MS, begin_ns - 10 * MS, Category.SLEEP, **holder)
        engine.sample(begin_ns, Category.PREEMPTED, "/srv/engine.py:79 step", **holder)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert verdict.causes[0].cause.name == "cpu_preemption"
    assert verdict.causes[0].evidence.by == ["hog"]


def test_a_thread_of_a_pool_that_reads_a_request_late_is_not_at_work_before():
    """The thread is followed only since it has read the request; the other threads show that the CPU was taken."""
    engine = EngineTrace()
    for i in LATE:
        ts_ns = int(engine.requests["ts_ns"][i])
        engine.late_first(i, DELAY_NS + 20 * MS)
        engine.requests["read_ns"][i] = ts_ns + DELAY_NS
        engine.off(ts_ns - 50 * MS, ts_ns - 40 * MS, Category.NET)
        engine.off(ts_ns + DELAY_NS - MS // 10, ts_ns + DELAY_NS, Category.PREEMPTED, by_pid=PID)
        engine.off(ts_ns, ts_ns + DELAY_NS, Category.PREEMPTED, by_pid=9, by_comm=b"hog", tid=THREAD + 1)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert verdict.causes[0].cause.name == "cpu_preemption"
    assert verdict.evidence.part == "pickup"
    assert (verdict.evidence.parts or [])[0].states == {
        "unknown": pytest.approx(DELAY_NS / MS, abs=0.2),
        "preempted": 0.1,
    }


def test_a_slow_client_is_a_part_of_the_path():
    engine = EngineTrace()
    for i in LATE:
        engine.off(*engine.late_gap(i, DELAY_NS), Category.NET, syscall_nr=SENDTO)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert [(each.part, each.ms) for each in verdict.evidence.parts or []] == [("client", 300)]


def test_requests_that_wait_for_earlier_requests_are_in_the_queue():
    engine = EngineTrace(40)
    rows = engine.requests
    rows["ts_ns"] = rows["read_ns"] = rows["complete_ns"] = SECOND + 10 * MS * np.arange(40)
    rows["first_ns"] = SECOND + 200 * MS * np.arange(40) + 20 * MS
    rows["gap_at_ns"] = rows["last_ns"] = rows["first_ns"]
    rows["end_ns"] = rows["first_ns"] + 100 * MS
    (verdict,) = diagnose(engine.trace()).verdicts
    parts = {each.part: each.ms for each in verdict.evidence.parts or []}
    assert parts["queue"] > 10 * parts["prefill"] > 0


def sampled(n: int, *, ts_ns: int, tid: int = THREAD, role: SampleRole = SampleRole.GPU) -> Array:
    row = layout.empty(layout.SAMPLES, 1)
    row["ts_ns"], row["pid"], row["owner_pid"], row["tid"], row["role"], row["n"] = (
        ts_ns,
        PID,
        PID,
        tid,
        role,
        n,
    )
    return row


def test_a_sample_stands_for_the_time_since_the_sample_before_it():
    rows = [sampled(20, ts_ns=SECOND), sampled(5, ts_ns=2 * SECOND), sampled(1, ts_ns=4 * SECOND)]
    rare = sampled(1, ts_ns=4 * SECOND, role=SampleRole.SAME_PROCESS, tid=THREAD + 1)
    rows = with_times(np.concatenate([*rows, rare]))
    assert rows["ns"].tolist() == [SECOND, SECOND, 2 * SECOND, SECOND]
    assert rows["begin_ns"].tolist() == [0, SECOND, 2 * SECOND, 3 * SECOND]
