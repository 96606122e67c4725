"""Engines that no longer answer: process, line and time without progress."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.builders import dp_trace
from tests.diagnose.test_job_separation import another, side_by_side

from stallscope.diagnose import diagnose
from stallscope.events.names import Category

sys.path.insert(0, str(Path(__file__).parent))
from engine_traces import MS, PID, SECOND, THREAD, EngineTrace

WAITED_NS = 8 * SECOND


def dead_engine(category: Category, *, waited_ns: int = WAITED_NS, n_full: int = 0) -> EngineTrace:
    """After its last response, the engine makes no progress in one request."""
    engine = EngineTrace()
    since_ns = int(engine.requests["end_ns"].max()) + 10 * MS
    for at_ns in range(since_ns, since_ns + waited_ns + 1, SECOND):
        engine.state(at_ns, category, at_ns - since_ns)
    engine.server(
        since_ns + waited_ns,
        n_open=1,
        n_full=n_full,
        oldest_ns=since_ns,
        oldest_progress_ns=since_ns,
        progress_ns=since_ns,
        oldest_path=b"/v1/completions",
    )
    return engine


def last_second_ns(engine: EngineTrace) -> int:
    """A second before the end of the capture."""
    return int(engine.servers[-1]["ts_ns"][0]) - SECOND


def blocked_at(engine: EngineTrace, *frames: str, tid: int = THREAD) -> None:
    """A thread of the engine has this stack before the end."""
    engine.position(last_second_ns(engine), *frames, tid=tid)


def verdicts(engine: EngineTrace):
    trace = engine.trace()
    return diagnose(replace(trace, ends_ns=(int(trace.servers["ts_ns"].max()),))).verdicts


def test_a_deadlocked_thread_is_named_with_its_line():
    engine = dead_engine(Category.LOCK)
    blocked_at(engine, "/usr/lib/python3.11/selectors.py:468 select", "/srv/app.py:40 <module>")
    blocked_at(engine, "/srv/app.py:12 wedge", "/srv/app.py:9 handler", tid=PID + 1)
    (verdict,) = verdicts(engine)
    assert (verdict.kind, verdict.pids) == ("dead_server", [PID])
    assert verdict.evidence.line == "/srv/app.py:12 wedge"
    assert verdict.evidence.waited_s == WAITED_NS / 1e9
    assert verdict.severity == "critical"


def test_the_thread_that_holds_the_lock_is_named_and_not_the_threads_that_wait_for_it():
    engine = dead_engine(Category.LOCK)
    waits = "0x90d8f (libc.so.6)", "/srv/app.py:20 with_lock", "/srv/app.py:9 handler"
    for tid in range(PID + 2, PID + 5):
        blocked_at(engine, *waits, tid=tid)
    shared = engine.positions[-3]["stack"][0]
    for row in engine.positions[-2:]:
        row["stack"] = shared
    blocked_at(engine, "epoll_pwait+0x6e (libc.so.6)", "uv_run+0x1 (loop.so)", "/srv/app.py:3 serve")
    blocked_at(engine, "0x90d8f (libc.so.6)", "/srv/app.py:12 wedge", "/srv/app.py:9 handler", tid=PID + 1)
    (verdict,) = verdicts(engine)
    assert verdict.evidence.line == "/srv/app.py:12 wedge"


def test_python_code_is_named_before_native_threads_that_wait_for_it():
    engine = dead_engine(Category.LOCK)
    blocked_at(engine, "0x85f16 (libc.so.6)", "main+0xf73 (tritonserver)")
    blocked_at(engine, "0x85f16 (libc.so.6)", "/srv/app.py:12 wedge", tid=PID + 1)
    (verdict,) = verdicts(engine)
    assert verdict.evidence.line == "/srv/app.py:12 wedge"


def test_a_thread_that_waits_for_a_lock_on_a_file_is_named():
    engine = dead_engine(Category.OTHER_OFF)
    blocked_at(engine, "flock+0x7 (libc.so.6)", "/srv/app.py:12 take")
    (verdict,) = verdicts(engine)
    assert (verdict.causes[0].cause.name, verdict.evidence.line) == ("file_lock", "/srv/app.py:12 take")


def test_a_background_thread_that_sleeps_is_not_the_blocked_thread():
    engine = dead_engine(Category.LOCK)
    blocked_at(engine, "clock_nanosleep+0x65 (libc.so.6)", "/srv/app.py:80 report_often", tid=PID + 1)
    blocked_at(engine, "0x85f16 (libc.so.6)", "/srv/app.py:12 wedge", "/srv/app.py:9 handler")
    (verdict,) = verdicts(engine)
    assert verdict.evidence.line == "/srv/app.py:12 wedge"
    engine.positions.pop()
    (verdict,) = verdicts(engine)
    assert verdict.evidence.line == "/srv/app.py:80 report_often"


def test_an_answer_to_a_health_check_is_no_progress():
    engine = dead_engine(Category.LOCK)
    engine.requests["path"][-1] = b"/health"
    engine.requests["ts_ns"][-1] = engine.requests["end_ns"][-1] = last_second_ns(engine)
    assert [verdict.kind for verdict in verdicts(engine)] == ["dead_server"]


def test_clients_that_give_up_and_try_again_are_no_progress():
    engine = dead_engine(Category.LOCK)
    last = engine.servers[-1]
    begin_ns, end_ns = int(last["oldest_ns"][0]), int(last["ts_ns"][0])
    last["oldest_ns"] = last["oldest_progress_ns"] = end_ns - SECOND // 2
    last["progress_ns"] = -1
    rows = engine.requests[-2:]
    for name in ("first_ns", "last_ns", "gap_at_ns"):
        rows[name] = -1
    rows["flags"], rows["ts_ns"], rows["end_ns"] = 2, (begin_ns, begin_ns + 3 * SECOND), end_ns - SECOND
    (verdict,) = verdicts(engine)
    assert (verdict.kind, verdict.evidence.waited_s) == ("dead_server", WAITED_NS / 1e9)
    engine.requests["last_ns"][-1] = engine.requests["first_ns"][-1] = end_ns - SECOND
    assert verdicts(engine) == []


def test_a_stopped_engine_is_dead():
    (verdict,) = verdicts(dead_engine(Category.STOPPED))
    assert verdict.causes[0].cause.name == "process_stopped"


@pytest.mark.parametrize("category", [Category.ON_CPU, Category.CHILD])
def test_an_engine_that_works_or_waits_for_a_compiler_is_not_dead(category):
    assert verdicts(dead_engine(category)) == []


@pytest.mark.parametrize(
    "waits",
    [
        ("/usr/lib/python3.11/threading.py:327 Condition.wait", "/usr/lib/python3.11/queue.py:171 Queue.get"),
        ("/usr/lib/python3.11/threading.py:629 Event.wait", "/srv/engine.py:395 SignalCallback._run"),
        ("/usr/lib/python3.11/multiprocessing/connection.py:947 wait", "/srv/engine.py:80 monitor"),
    ],
)
def test_a_thread_that_waits_for_work_is_not_the_blocked_thread(waits):
    engine = dead_engine(Category.LOCK)
    blocked_at(engine, "0x85f16 (libc.so.6)", "0x90d8f (libc.so.6)", *waits, tid=PID + 2)
    (verdict,) = verdicts(engine)
    assert verdict.evidence.line is None


def test_an_engine_whose_client_takes_no_data_is_not_dead():
    assert verdicts(dead_engine(Category.NET, n_full=1)) == []


def test_a_short_pause_is_not_the_end():
    assert verdicts(dead_engine(Category.LOCK, waited_ns=4 * SECOND)) == []


def test_a_pause_as_long_as_earlier_pauses_is_not_the_end():
    engine = dead_engine(Category.LOCK)
    for i in (3, 4):
        engine.late_first(i, 4 * SECOND)
    assert [verdict.kind for verdict in verdicts(engine) if verdict.kind == "dead_server"] == []


def test_an_engine_next_to_two_jobs_is_one_verdict():
    trace = dead_engine(Category.LOCK).trace()
    jobs = [dp_trace(), another(dp_trace(), pids_from=100, later_ns=5 * MS)]
    whole = side_by_side(*jobs)
    whole = replace(
        whole,
        servers=trace.servers,
        requests=trace.requests,
        snapshots=trace.snapshots,
        ends_ns=(int(trace.servers["ts_ns"].max()),),
    )
    report = diagnose(whole)
    assert report.examined["n_jobs"] == len(jobs)
    assert [verdict.pids for verdict in report.verdicts if verdict.kind == "dead_server"] == [[PID]]


WEDGED = "0x90d8f (libc.so.6)", "/srv/app.py:12 wedge", "/srv/app.py:9 handler"
IDLE = "0x90d8f (libc.so.6)", "/usr/lib/python3.11/multiprocessing/queues.py:102 get", "/srv/app.py:30 work"


def engine_with_a_dead_process(
    category: Category, *frames: str, holder: int = PID + 1, suspect: int = PID + 1, n_full: int = 0
) -> EngineTrace:
    """The engine answers requests until the end; an early request of one process makes no progress.

    holder: the process with this request. suspect: the process in this state.
    """
    engine = EngineTrace(150)
    since_ns, last_ns = 2 * SECOND, int(engine.requests["end_ns"].max())
    for pid in (PID, PID + 1, PID + 2):
        engine.server(SECOND, pid=pid)
        for at_ns in range(since_ns, last_ns, SECOND):
            state = category if pid == suspect else Category.NET
            engine.state(at_ns, state, at_ns - since_ns, pid=pid)
    open_at = {"oldest_ns": since_ns, "oldest_progress_ns": since_ns, "oldest_path": b"/v1/completions"}
    progress_ns = since_ns if holder != PID else last_ns
    engine.server(last_ns, pid=holder, n_open=1 + n_full, n_full=n_full, progress_ns=progress_ns, **open_at)
    engine.position(last_ns - SECOND, *frames, pid=suspect, tid=suspect)
    return engine


def dead_processes(engine: EngineTrace) -> list[tuple[list[int], str, str | None]]:
    return [
        (each.pids, each.causes[0].cause.name, each.evidence.line)
        for each in verdicts(engine)
        if each.kind == "dead_server"
    ]


def test_a_deadlocked_process_is_named_while_other_processes_answer():
    engine = engine_with_a_dead_process(Category.LOCK, *WEDGED)
    assert dead_processes(engine) == [([PID + 1], "blocked", "/srv/app.py:12 wedge")]


def test_a_stopped_process_is_named_while_other_processes_answer():
    engine = engine_with_a_dead_process(Category.STOPPED)
    assert dead_processes(engine) == [([PID + 1], "process_stopped", None)]


def test_a_deadlocked_worker_without_connections_is_named_while_other_workers_answer():
    engine = engine_with_a_dead_process(Category.LOCK, *WEDGED, holder=PID)
    assert dead_processes(engine) == [([PID + 1], "blocked", "/srv/app.py:12 wedge")]


@pytest.mark.parametrize("holder", [PID, PID + 1])
@pytest.mark.parametrize(
    ("category", "frames"),
    [
        (Category.ON_CPU, WEDGED),
        (Category.NET, ("epoll_wait+0x6e (libc.so.6)", "/srv/app.py:3 serve")),
        (Category.NET, ("recv+0x1e (libc.so.6)", "/srv/app.py:3 ask")),
        (Category.LOCK, ("recv+0x1e (libc.so.6)", "/srv/app.py:3 ask")),
        (Category.LOCK, ("0x90d8f (libc.so.6)", "0x4d2a (engine)")),
        (Category.LOCK, IDLE),
    ],
)
def test_a_process_that_works_or_waits_for_work_or_an_answer_is_not_dead(category, frames, holder):
    assert dead_processes(engine_with_a_dead_process(category, *frames, holder=holder)) == []


def test_a_process_whose_other_requests_make_progress_is_not_dead():
    engine = engine_with_a_dead_process(Category.LOCK, *WEDGED)
    engine.servers[-1]["progress_ns"] = last_second_ns(engine)
    assert dead_processes(engine) == []


def test_a_process_whose_client_takes_no_data_is_not_dead():
    engine = engine_with_a_dead_process(Category.LOCK, *WEDGED, n_full=1)
    engine.servers[-1]["n_open"] = 1
    assert dead_processes(engine) == []
