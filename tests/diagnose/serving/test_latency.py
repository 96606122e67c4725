"""The reason for late requests: each fault has its cause, process and line, and healthy engines have no verdict."""

import sys
from pathlib import Path

import numpy as np
import pytest

from stallscope.diagnose import diagnose
from stallscope.diagnose.report.text import report as text_of
from stallscope.diagnose.report.verdict import Answer, Report
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, OffCpuFlag, SampleRole
from stallscope.events.request_clients import clients

sys.path.insert(0, str(Path(__file__).parent))
from engine_traces import FIRST_NS, GAP_NS, LATE, MS, PID, SECOND, THROTTLED, EngineTrace

DELAY_NS = 300 * MS
SENDTO, WRITE = 44, 1


def late_engine(category: Category, **values: object) -> EngineTrace:
    """The serving thread is off the CPU in the late gaps, for one reason."""
    engine = EngineTrace()
    for i in LATE:
        engine.off(*engine.late_gap(i, DELAY_NS), category, **values)
    return engine


def sampled_engine(
    category: Category, frame: str = "", *, waits_for: bytes = b"", **values: object
) -> EngineTrace:
    """As late_engine(), and the serving thread is sampled in each late gap."""
    engine = late_engine(category, **values)
    for i in LATE:
        engine.sample(int(engine.requests["gap_at_ns"][i]), category, frame, object=waits_for)
    return engine


def the_verdict(engine: EngineTrace, *, typical_ns: int = GAP_NS):
    report = diagnose(engine.trace())
    (verdict,) = report.verdicts
    assert verdict.kind == "latency"
    assert verdict.evidence.n_late_requests == len(LATE)
    assert verdict.late_ms is not None
    assert verdict.late_ms["median"] == pytest.approx((DELAY_NS - typical_ns) / MS, rel=0.1)
    assert text_of(report)
    return verdict


@pytest.mark.parametrize(
    ("category", "values", "cause"),
    [
        (Category.STOPPED, {}, "process_stopped"),
        (Category.PREEMPTED, {"flags": THROTTLED, "by_pid": 0}, "cpu_quota"),
        (
            Category.PREEMPTED,
            {"flags": OffCpuFlag.PREEMPTED, "by_pid": 7, "by_comm": b"hog"},
            "cpu_preemption",
        ),
        (Category.IO, {}, "block_io"),
        (Category.FAULT, {}, "page_fault"),
    ],
)
def test_the_machine_delays_the_serving_thread(category, values, cause):
    verdict = the_verdict(late_engine(category, **values))
    assert [part.cause.name for part in verdict.causes] == [cause]
    assert verdict.pids == [PID]


def test_the_program_that_took_the_cpu_is_named():
    engine = late_engine(Category.PREEMPTED, flags=OffCpuFlag.PREEMPTED, by_pid=7, by_comm=b"hog")
    assert the_verdict(engine).causes[0].evidence.by == ["hog"]


def test_a_thread_that_is_awake_and_does_not_run_lacks_the_cpu():
    verdict = the_verdict(late_engine(Category.NET, runnable_ns=DELAY_NS - 5 * MS))
    assert verdict.causes[0].cause.name == "cpu_preemption"


def test_work_that_also_waits_for_the_cpu_is_named_as_work():
    engine = EngineTrace()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        flags = OffCpuFlag.PREEMPTED
        engine.off(begin_ns + DELAY_NS // 2 - 20 * MS, end_ns, Category.PREEMPTED, flags=flags, by_pid=7)
        engine.sample(begin_ns, Category.ON_CPU, "/srv/tokens.py:7 encode")
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "host_compute"
    assert verdict.evidence.line == "/srv/tokens.py:7 encode"


def test_threads_of_the_engine_that_share_a_cpu_are_not_another_program():
    verdict = the_verdict(late_engine(Category.PREEMPTED, flags=OffCpuFlag.PREEMPTED, by_pid=PID))
    assert verdict.causes[0].cause.name == "unknown"
    assert verdict.abstained_because


def test_a_sleep_in_the_writer_of_the_response_is_named_with_its_line():
    engine = EngineTrace()
    stack = engine.stack("/srv/app.py:12 write_slowly", "/usr/lib/python3.11/asyncio/runners.py:1 run")
    for i in LATE:
        engine.off(*engine.late_gap(i, DELAY_NS), Category.SLEEP, stack=stack)
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "host_sleep"
    assert verdict.evidence.line == "/srv/app.py:12 write_slowly"


def test_computation_in_the_serving_thread_is_named_with_its_line():
    engine = EngineTrace()
    for i in LATE:
        engine.sample(engine.late_gap(i, DELAY_NS)[0], Category.ON_CPU, "/srv/tokens.py:7 encode")
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "host_compute"
    assert verdict.evidence.line == "/srv/tokens.py:7 encode"


def test_a_compilation_in_the_engine_is_named():
    engine = EngineTrace()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.CHILD)
        stack = engine.stack(
            "/usr/lib/python3.11/subprocess.py:1 run", "/lib/torch/_inductor/codecache.py:9 load"
        )
        engine.sample(begin_ns, Category.CHILD, stack=stack)
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "recompilation"
    assert "each shape" in verdict.advice[0]


def test_a_program_that_the_engine_starts_is_named():
    verdict = the_verdict(late_engine(Category.CHILD))
    assert verdict.causes[0].cause.name == "child_program"


def test_threads_that_get_the_cpu_from_each_other_and_do_not_run_lack_the_cpu():
    engine = EngineTrace()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.LOCK, waker_pid=PID, waker_tid=PID + 1)
        flags = OffCpuFlag.PREEMPTED
        engine.off(begin_ns, end_ns - 5 * MS, Category.PREEMPTED, tid=PID + 1, flags=flags, by_pid=PID)
        engine.sample(begin_ns, Category.PREEMPTED, "/srv/app.py:3 work", tid=PID + 1)
    assert the_verdict(engine).causes[0].cause.name == "cpu_preemption"


@pytest.mark.parametrize("is_own_thread_running", [True, False])
def test_a_thread_of_the_engine_that_has_the_only_cpu_is_not_another_program(is_own_thread_running):
    engine = EngineTrace()
    spins = {"tid": PID + 1}
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, begin_ns + 25 * MS, Category.LOCK, waker_pid=PID, waker_tid=PID + 9)
        engine.off(
            begin_ns + 25 * MS,
            end_ns,
            Category.PREEMPTED,
            flags=OffCpuFlag.PREEMPTED,
            by_pid=7,
            by_comm=b"client",
        )
        engine.off(begin_ns - 500 * MS, begin_ns + 5 * MS, Category.SLEEP, **spins)
        if not is_own_thread_running:
            engine.off(begin_ns + 5 * MS, end_ns, Category.PREEMPTED, by_pid=7, by_comm=b"client", **spins)
        engine.off(end_ns, end_ns + 200 * MS, Category.SLEEP, **spins)
        # On the only CPU, the sampler has taken the CPU from the thread.
        engine.sample(
            begin_ns, Category.PREEMPTED, "/srv/stats.py:3 spin", role=SampleRole.SAME_PROCESS, **spins
        )
    (part,) = the_verdict(engine).causes
    expected = ("gil", "/srv/stats.py:3 spin") if is_own_thread_running else ("cpu_preemption", None)
    assert (part.cause.name, part.evidence.line) == expected


def test_a_thread_that_holds_the_interpreter_lock_is_named_with_its_line():
    engine = EngineTrace()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.LOCK)
        engine.sample(
            begin_ns, Category.ON_CPU, "/srv/stats.py:3 spin", role=SampleRole.SAME_PROCESS, tid=PID + 1
        )
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "gil"
    assert verdict.evidence.line == "/srv/stats.py:3 spin"


@pytest.mark.parametrize("has_loop", [True, False])
def test_a_thread_that_runs_for_a_small_part_of_the_delay_does_not_hold_the_interpreter_lock(has_loop):
    engine = EngineTrace()
    loop = {"role": SampleRole.SAME_PROCESS, "tid": PID + 1}
    background = {"role": SampleRole.SAME_PROCESS, "tid": PID + 2, "n": 1}
    for second in range(1, 7):
        at_ns = second * SECOND
        engine.sample(at_ns, Category.ON_CPU if has_loop else Category.NET, "/srv/engine.py:9 step", **loop)
        if 1 < second < 6:
            engine.sample(at_ns, Category.ON_CPU, "/srv/stats.py:3 count", **background)
    for i in LATE:
        engine.off(*engine.late_gap(i, DELAY_NS), Category.LOCK)
    (part,) = the_verdict(engine).causes
    line = "/srv/engine.py:9 step" if has_loop else None
    assert (part.cause.name == "gil", part.evidence.line) == (has_loop, line)


def test_a_full_pipe_is_named_with_its_reader():
    engine = sampled_engine(Category.NET, waits_for=b"full pipe read by logger", syscall_nr=WRITE)
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "full_pipe"
    assert verdict.causes[0].evidence.reader == "logger"


def test_a_write_before_the_response_does_not_wait_for_the_client():
    engine = EngineTrace()
    for i in LATE:
        engine.off(*engine.late_first(i, DELAY_NS), Category.NET, syscall_nr=WRITE)
    verdict = the_verdict(engine, typical_ns=FIRST_NS)
    assert verdict.causes[0].cause.name == "full_pipe"
    assert verdict.pids == [PID]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_client_that_takes_data_slowly_is_named_as_the_client(blocks):
    engine = EngineTrace()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        if blocks:
            engine.off(begin_ns, end_ns, Category.NET, syscall_nr=SENDTO)
        else:
            engine.requests["blocked_ns"][i] = DELAY_NS
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "slow_client"
    assert verdict.pids == []
    assert "clients" in verdict.summary


def test_a_long_prompt_delays_the_tokens_of_other_requests():
    engine = EngineTrace()
    for i in LATE:
        begin_ns, _ = engine.late_gap(i, DELAY_NS)
        other = engine.requests[i - 1 : i]
        other["ts_ns"] = other["read_ns"] = begin_ns
        other["request_bytes"] = 50_000
        for name in ("first_ns", "gap_at_ns", "last_ns", "end_ns"):
            other[name] = begin_ns + DELAY_NS
    verdict = the_verdict(engine)
    assert verdict.causes[0].cause.name == "long_prompt"
    assert "50,000 bytes" in str(verdict.causes[0].evidence.work)


def test_requests_that_wait_behind_others_are_load_beyond_capacity():
    engine = EngineTrace(40)
    rows = engine.requests
    rows["ts_ns"] = rows["read_ns"] = rows["complete_ns"] = 10**9 + 10 * MS * np.arange(40)
    rows["first_ns"] = 10**9 + 200 * MS * np.arange(40) + 20 * MS
    rows["gap_at_ns"] = rows["last_ns"] = rows["first_ns"]
    rows["end_ns"] = rows["first_ns"] + 100 * MS
    report = diagnose(engine.trace())
    assert [verdict.causes[0].cause.name for verdict in report.verdicts] == ["capacity"]
    assert report.verdicts[0].causes[0].evidence.calls_per_second == pytest.approx(5, rel=0.2)
    assert "no fault" in report.verdicts[0].summary


def full_engine(n: int, *, first_ns: Array, whole_ns: int) -> EngineTrace:
    engine = EngineTrace(n)
    rows = engine.requests
    rows["read_ns"] = rows["complete_ns"] = rows["ts_ns"]
    rows["first_ns"] = rows["gap_at_ns"] = rows["last_ns"] = first_ns
    rows["end_ns"] = first_ns + whole_ns
    return engine


def test_a_queue_that_lasts_as_long_as_the_trace_is_load_beyond_capacity():
    """Eight clients, two requests at once: each request waits as long as the others."""
    n, jitter_ns = 160, np.random.default_rng(0).integers(0, 5 * MS, 160)
    first_ns = 10**9 + 175 * MS * (np.arange(n) // 2) + jitter_ns
    engine = full_engine(n, first_ns=first_ns, whole_ns=160 * MS)
    rows = engine.requests
    rows["ts_ns"] = rows["read_ns"] = np.concatenate([np.full(8, 10**9 - 150 * MS), rows["end_ns"][:-8]])
    rows["complete_ns"] = rows["read_ns"]
    report = diagnose(engine.trace())
    assert [verdict.causes[0].cause.name for verdict in report.verdicts] == ["capacity"]
    assert report.verdicts[0].causes[0].evidence.calls_per_second == pytest.approx(2 / 0.175, rel=0.1)


def test_a_queue_that_is_not_answered_in_order_is_load_beyond_capacity():
    """Two requests at once; each end makes room for the request that came last, or for the oldest request."""
    n, chance = 160, np.random.default_rng(0)
    arrivals_ns, first_ns, free_ns = [10**9 + MS * i for i in range(12)], np.zeros(n, np.int64), [10**9] * 2
    waiting = list(range(12))
    for _ in range(n):
        at_ns = free_ns.pop(0)
        i = waiting.pop(-1 if chance.random() < 0.5 else 0)
        first_ns[i] = max(at_ns, arrivals_ns[i]) + 15 * MS + chance.integers(0, 5 * MS)
        free_ns = sorted([*free_ns, int(first_ns[i]) + 160 * MS])
        if len(arrivals_ns) < n:
            waiting.append(len(arrivals_ns))
            arrivals_ns.append(int(first_ns[i]) + 160 * MS)
    engine = full_engine(n, first_ns=first_ns, whole_ns=160 * MS)
    rows = engine.requests
    rows["ts_ns"] = rows["read_ns"] = rows["complete_ns"] = arrivals_ns
    report = diagnose(engine.trace())
    assert [verdict.causes[0].cause.name for verdict in report.verdicts] == ["capacity"]


@pytest.mark.parametrize("every_ms", [80, 200])
def test_requests_that_overlap_at_a_steady_rate_do_not_queue(every_ms):
    """The engine answers 520 ms after each arrival, however many other requests it has."""
    n, jitter_ns = 160, np.random.default_rng(0).integers(0, 5 * MS, 160)
    arrivals_ns = 10**9 + every_ms * MS * np.arange(n)
    engine = full_engine(n, first_ns=arrivals_ns + 520 * MS + jitter_ns, whole_ns=160 * MS)
    rows = engine.requests
    rows["ts_ns"] = rows["read_ns"] = rows["complete_ns"] = arrivals_ns
    report = diagnose(engine.trace())
    assert report.verdicts == []


def test_requests_that_are_often_answered_before_earlier_requests_do_not_queue():
    """The engine works on all requests at once, for different times; only the first few requests are fast."""
    waits_ns = np.random.default_rng(0).permutation(np.linspace(100, 500, 160)) * MS
    waits_ns[:3] = 60 * MS
    arrivals_ns = 10**9 + 40 * MS * np.arange(160)
    engine = full_engine(160, first_ns=arrivals_ns + waits_ns.astype(np.int64), whole_ns=900 * MS)
    rows = engine.requests
    rows["ts_ns"] = rows["read_ns"] = rows["complete_ns"] = arrivals_ns
    assert diagnose(engine.trace()).verdicts == []


def test_a_healthy_engine_has_no_verdict():
    report = diagnose(EngineTrace().trace())
    assert report.verdicts == []
    assert report.answer is Answer.HEALTHY
    assert "50 requests" in text_of(report)


def test_an_idle_engine_is_neither_faulty_nor_healthy():
    report = diagnose(EngineTrace(0).trace())
    assert report.verdicts == []
    assert report.answer is Answer.INCONCLUSIVE
    assert "0 requests are too few" in report.gaps[0].reason


def test_a_long_prompt_may_take_longer_until_its_first_token():
    engine = EngineTrace()
    for i in LATE:
        engine.late_first(i, DELAY_NS)
        engine.requests["request_bytes"][i] = 50_000
    assert diagnose(engine.trace()).verdicts == []


def test_two_late_requests_are_chance():
    engine = EngineTrace()
    for i in LATE[:2]:
        engine.off(*engine.late_gap(i, DELAY_NS), Category.STOPPED)
    assert diagnose(engine.trace()).verdicts == []


def percentile_remark(report: Report) -> dict[str, object]:
    return report.benign[0]


def test_the_report_lists_rate_and_percentiles_of_each_endpoint():
    remark = percentile_remark(diagnose(EngineTrace().trace()))
    assert remark["n_requests"] == 50
    assert remark["first_ms_p50"] == 20
    assert remark["between_ms_p99"] == 10
    assert remark["per_second"] == pytest.approx(10, rel=0.1)


def test_an_engine_that_stood_still_for_a_while_and_recovered_is_healthy():
    engine = EngineTrace()
    engine.position(3 * 10**9, "/srv/app.py:3 compile_model", "/srv/app.py:40 main")
    assert diagnose(engine.trace()).answer is Answer.HEALTHY


def test_requests_that_wait_for_the_first_answer_are_not_late():
    engine = EngineTrace()
    rows = engine.requests
    rows["ts_ns"][:6] = rows["read_ns"][:6] = rows["ts_ns"][0] + MS * np.arange(6)
    for i in range(6):
        engine.late_first(i, 4000 * MS)
    assert diagnose(engine.trace()).verdicts == []


@pytest.mark.parametrize("blocked_ns, is_late", [(DELAY_NS, True), (0, False)])
def test_gaps_of_the_first_requests_are_late_after_the_first_complete_response(blocked_ns, is_late):
    engine = EngineTrace()
    rows = engine.requests
    begin_ns = int(rows["ts_ns"][0])
    rows["ts_ns"][:4] = rows["read_ns"][:4] = begin_ns
    for name in ("first_ns", "gap_at_ns"):
        rows[name][:4] = begin_ns + FIRST_NS
    for i in range(1, 4):
        engine.late_gap(i, DELAY_NS)
        rows["blocked_ns"][i] = blocked_ns
        # A slow client blocks the server later; an engine that compiles delays the first requests at once.
        rows["gap_at_ns"][i] = begin_ns + SECOND if is_late else rows["first_ns"][i]
    assert bool(diagnose(engine.trace()).verdicts) == is_late


def test_a_longer_prompt_may_take_longer_until_its_first_token():
    engine = EngineTrace()
    engine.requests["request_bytes"] = 200
    for i in range(5, 45, 4):
        engine.requests["request_bytes"][i] = 1800
        engine.late_first(i, 160 * MS + i * MS)
    assert diagnose(engine.trace()).verdicts == []


def test_a_longer_response_that_is_not_streamed_may_take_longer():
    engine = EngineTrace()
    rows = engine.requests
    rows["flags"], rows["gap_at_ns"], rows["gap_ns"], rows["response_bytes"] = 0, UNKNOWN, 0, 400
    for i in range(5, 45, 4):
        rows["response_bytes"][i] = 8000
        engine.late_first(i, 400 * MS + i * MS)
    assert diagnose(engine.trace()).verdicts == []


def test_a_request_that_is_late_for_its_length_is_late():
    engine = EngineTrace()
    engine.requests["request_bytes"] = 200
    for i in range(5, 45, 4):
        engine.requests["request_bytes"][i] = 1800
        engine.off(*engine.late_first(i, 900 * MS if i in (9, 21, 33) else 100 * MS), Category.STOPPED)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert verdict.evidence.n_late_requests == 3


def test_the_loop_of_an_engine_is_not_the_work_of_a_request():
    engine = EngineTrace()
    for second in range(1, 7):
        engine.sample(second * 10**9, Category.ON_CPU, "/srv/engine.py:9 step", tid=PID + 1)
    for i in LATE:
        begin_ns, _ = engine.late_first(i, DELAY_NS)
        flags = OffCpuFlag.PREEMPTED
        engine.off(begin_ns, begin_ns + 50 * MS, Category.PREEMPTED, flags=flags, by_pid=PID)
        if i != LATE[0]:  # threads of requests are sampled rarely
            engine.sample(begin_ns, Category.ON_CPU, "/srv/tokens.py:7 encode", tid=PID + 2, n=3)
    assert the_verdict(engine, typical_ns=FIRST_NS).evidence.line == "/srv/tokens.py:7 encode"


def test_the_line_of_a_sleep_without_a_stack_comes_from_samples():
    engine = sampled_engine(Category.SLEEP, "/srv/app.py:12 write_slowly")
    assert the_verdict(engine).evidence.line == "/srv/app.py:12 write_slowly"


@pytest.mark.parametrize(("n_late_clients", "severity"), [(1, "medium"), (4, "high"), (8, "critical")])
def test_the_severity_grows_with_the_clients_that_are_hit(n_late_clients, severity):
    engine = EngineTrace(n=120)
    engine.requests["client"] = 1 + np.arange(120) % 10
    for i in range(8):
        row = 10 * (i + 2) + i % n_late_clients
        engine.off(*engine.late_gap(row, DELAY_NS), Category.STOPPED)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert (verdict.evidence.n_late_clients, verdict.evidence.n_clients) == (n_late_clients, 10)
    assert f"of {n_late_clients} of 10 clients" in verdict.summary
    assert verdict.severity == severity


def test_few_clients_are_not_counted():
    engine = late_engine(Category.STOPPED)
    engine.requests["client"] = 1 + np.arange(len(engine.requests)) % 4
    assert the_verdict(engine).evidence.n_clients is None


def test_a_client_counts_once_if_the_agent_was_restarted():
    engine = EngineTrace(n=120)
    addresses = 1 + np.arange(120) % 10
    engine.requests["client"][:60] = clients(addresses[:60], 3)
    engine.requests["client"][60:] = clients(7 * addresses[60:], 4)  # another key: other hashes
    for row in (20, 31, 70, 81, 92):
        engine.off(*engine.late_gap(row, DELAY_NS), Category.STOPPED)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert (verdict.evidence.n_late_clients, verdict.evidence.n_clients) == (3, 10)
    assert "of 3 of 10 clients" in verdict.summary


def test_few_clients_are_not_counted_twice_if_the_agent_was_restarted():
    engine = late_engine(Category.STOPPED)
    addresses = 1 + np.arange(50) % 3
    engine.requests["client"] = np.where(np.arange(50) < 25, clients(addresses, 3), clients(7 * addresses, 4))
    assert the_verdict(engine).evidence.n_clients is None


FLOCK, RECVFROM, POLL, EPOLL_WAIT = 73, 45, 7, 232


@pytest.mark.parametrize("syscall_nr", [RECVFROM, POLL])
def test_a_thread_that_waits_for_another_service_is_named_with_its_line(syscall_nr):
    engine = sampled_engine(
        Category.NET,
        "/srv/app.py:12 look_up",
        waits_for=b"connection to 10.0.0.7:6379",
        syscall_nr=syscall_nr,
        waker_pid=0,
    )
    (part,) = the_verdict(engine).causes
    assert (part.cause.name, part.evidence.line) == ("network_wait", "/srv/app.py:12 look_up")
    assert part.evidence.peer == "connection to 10.0.0.7:6379"


def test_a_wait_for_a_process_of_the_engine_is_not_a_wait_for_another_service():
    engine = EngineTrace()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        worker = {"pid": PID + 1, "tid": PID + 1}
        engine.off(begin_ns, end_ns, Category.NET, syscall_nr=RECVFROM, waker_pid=PID + 1, waker_tid=PID + 1)
        engine.off(begin_ns, end_ns - MS, Category.IO, **worker)
    engine.server(10**9, pid=PID + 1)
    assert [part.cause.name for part in the_verdict(engine).causes] == ["block_io"]


def test_an_event_loop_that_waits_is_not_a_wait_for_another_service():
    engine = late_engine(Category.NET, syscall_nr=EPOLL_WAIT, waker_pid=0)
    assert [part.cause.name for part in the_verdict(engine).causes] == ["unknown"]


@pytest.mark.parametrize("waker_pid", [7, UNKNOWN])
def test_a_lock_on_a_file_is_named_with_its_line(waker_pid):
    engine = sampled_engine(
        Category.OTHER_OFF,
        "/srv/app.py:12 locked",
        waits_for=b"lock on /srv/cache.lock held by 7 (rsync)",
        syscall_nr=FLOCK,
        waker_pid=waker_pid,
    )
    (part,) = the_verdict(engine).causes
    assert (part.cause.name, part.evidence.line) == ("file_lock", "/srv/app.py:12 locked")
    assert part.evidence.lock == "lock on /srv/cache.lock held by 7 (rsync)"


def test_a_wait_for_a_file_lock_with_an_unknown_end_is_not_evidence_of_another_process():
    engine = late_engine(Category.OTHER_OFF, syscall_nr=FLOCK, waker_pid=UNKNOWN)
    assert [part.cause.name for part in the_verdict(engine).causes] == ["unknown"]


@pytest.mark.parametrize(("is_habit", "cause"), [(False, "file_lock"), (True, "unknown")])
def test_a_worker_that_often_waits_for_a_file_lock_does_not_delay_requests(is_habit, cause):
    engine = EngineTrace()
    worker = {"tid": PID + 2, "syscall_nr": FLOCK, "waker_pid": 7}
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.NET, waker_pid=PID, waker_tid=PID + 1)  # has no rows
        engine.off(begin_ns, end_ns - MS, Category.OTHER_OFF, **worker)
        if is_habit:
            engine.off(end_ns, end_ns + 500 * MS, Category.OTHER_OFF, **worker)
    assert [part.cause.name for part in the_verdict(engine).causes] == [cause]


def test_the_lines_of_short_sleeps_are_not_the_line_of_the_long_sleep():
    engine = EngineTrace()
    pause, flush = engine.stack("/srv/app.py:5 pause"), engine.stack("/srv/app.py:12 flush")
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, 8 * DELAY_NS)
        middle_ns = begin_ns + 5 * DELAY_NS
        engine.off(begin_ns, middle_ns, Category.SLEEP, stack=flush if i == LATE[0] else UNKNOWN)
        for at_ns in range(middle_ns, end_ns, 10 * MS):
            engine.off(at_ns, at_ns + 9 * MS, Category.SLEEP, stack=pause)
    (verdict,) = diagnose(engine.trace()).verdicts
    assert (verdict.causes[0].cause.name, verdict.evidence.line) == ("host_sleep", "/srv/app.py:12 flush")


def test_a_full_pipe_in_another_process_of_the_engine_is_named():
    engine = EngineTrace()
    worker = {"pid": PID + 1, "tid": PID + 1}
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.LOCK)
        engine.off(begin_ns, end_ns, Category.NET, syscall_nr=WRITE, **worker)
        names = {"owner_pid": PID + 1, "object": b"full pipe read by logger", **worker}
        engine.sample(begin_ns, Category.NET, "/srv/log.py:4 log", **names)
    engine.server(10**9, pid=PID + 1)
    verdict = the_verdict(engine)
    assert (verdict.causes[0].cause.name, verdict.pids) == ("full_pipe", [PID + 1])
    assert verdict.evidence.line == "/srv/log.py:4 log"


@pytest.mark.parametrize("is_loop_followed", [True, False])
def test_an_event_loop_that_has_just_been_woken_does_not_hold_the_interpreter_lock(is_loop_followed):
    engine = EngineTrace()
    engine.serves()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.LOCK)
        if is_loop_followed:
            engine.runs_between(begin_ns, end_ns, Category.NET, tid=PID + 1)
        spins = {"role": SampleRole.SAME_PROCESS, "tid": 100 * i}
        loop = {"role": SampleRole.SAME_PROCESS, "tid": PID + 1 if is_loop_followed else 100 * i + 1, "n": 20}
        engine.sample(begin_ns, Category.ON_CPU, "/srv/stats.py:3 spin", **spins)
        engine.sample(
            begin_ns, Category.ON_CPU, "/usr/lib/python3.11/selectors.py:468 EpollSelector.select", **loop
        )
    assert the_verdict(engine).evidence.line == "/srv/stats.py:3 spin"


def test_the_thread_that_ran_for_the_delay_holds_the_interpreter_lock():
    engine = EngineTrace()
    spins = {"role": SampleRole.SAME_PROCESS, "tid": PID + 1}
    others = {"role": SampleRole.SAME_PROCESS, "tid": PID + 2, "n": 20}
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        engine.off(begin_ns, end_ns, Category.LOCK)
        engine.runs_between(begin_ns, end_ns, Category.SLEEP, tid=PID + 1)
        engine.sample(begin_ns, Category.ON_CPU, "/srv/stats.py:3 spin", **spins)
        engine.sample(begin_ns, Category.ON_CPU, "/srv/app.py:5 write", **others)
    assert the_verdict(engine).evidence.line == "/srv/stats.py:3 spin"


@pytest.mark.parametrize("others_are_in_time", [True, False])
def test_a_thread_that_other_requests_do_not_wait_for_computes_the_late_request(others_are_in_time):
    engine = EngineTrace()
    computes = {"role": SampleRole.SAME_PROCESS, "tid": PID + 1}
    noise = {"role": SampleRole.SAME_PROCESS, "tid": PID + 2, "n": 20}
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        # A thread that the ledger does not follow wakes the serving thread.
        engine.off(begin_ns, end_ns, Category.NET, waker_pid=PID, waker_tid=PID + 9)
        engine.off(begin_ns, end_ns, Category.LOCK, tid=PID + 3)
        engine.runs_between(begin_ns, end_ns, Category.SLEEP, tid=PID + 1)
        engine.sample(begin_ns, Category.ON_CPU, "/srv/tokens.py:3 merge", **computes)
        engine.sample(begin_ns, Category.ON_CPU, "/srv/app.py:5 write", **noise)
        if others_are_in_time:
            engine.requests["end_ns"][i - 1] = end_ns
    (part,) = the_verdict(engine).causes
    assert part.cause.name == ("host_compute" if others_are_in_time else "gil")
    assert part.evidence.line == "/srv/tokens.py:3 merge"


@pytest.mark.parametrize("is_waker_known", [True, False])
def test_threads_that_run_for_short_times_without_the_interpreter_lock_do_not_hold_it(is_waker_known):
    engine = EngineTrace()
    engine.serves()
    for i in LATE:
        begin_ns, end_ns = engine.late_gap(i, DELAY_NS)
        holder, *others = range(100 * i, 100 * i + 13)
        # The ledger does not follow the thread that holds the lock.
        waker = {"waker_pid": PID, "waker_tid": holder} if is_waker_known else {}
        engine.off(begin_ns, end_ns, Category.LOCK, **waker)
        engine.sample(
            begin_ns, Category.ON_CPU, "/srv/app.py:5 match", role=SampleRole.SAME_PROCESS, tid=holder
        )
        for tid in others:
            computes = {"role": SampleRole.SAME_PROCESS, "tid": tid, "n": 1}
            engine.sample(begin_ns, Category.ON_CPU, "/srv/math.py:3 burn", **computes)
    (part,) = the_verdict(engine).causes
    assert (part.cause.name, part.evidence.line) == ("gil", "/srv/app.py:5 match")
