"""Faults of one process by its time budget: constant from the start, judged from complete data and samples."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.processes.activity import activities
from stallscope.diagnose.processes.buckets import (
    CLIENT,
    INTERPRETER_LOCK,
    LEFT,
    NEW_CONNECTIONS,
    SHARED_LOCK,
    TIMER,
)
from stallscope.diagnose.processes.budget_summary import as_data, lines
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Answer, as_json
from stallscope.events import layout
from stallscope.events.names import LOWERED_POWER_LIMIT, Category, Direction, HostMemory, Op, SampleRole
from stallscope.events.trace import Trace

from .builders import MS, START_NS, dp_trace
from .process_traces import N_SECONDS, PID, SAMPLES_PER_S, SECOND_NS, TORCH, Sampled, gpu, process
from .reports import only, report_of

BLOCKED = {Category.ON_CPU: 0.05, Category.DEVICE: 0.25}

CASES: dict[str, tuple[dict[Category, float], list[Sampled], str, str]] = {
    "computing": (
        {Category.ON_CPU: 0.7, Category.DEVICE: 0.3},
        [gpu(Category.ON_CPU, "/usr/lib/python3.12/json/encoder.py:5 encode", "/job/train.py:4 log_json")],
        "host_compute",
        "log_json",
    ),
    "a full pipe": (
        BLOCKED | {Category.CHILD: 0.7},
        [gpu(Category.NET, "/job/train.py:5 log", nr=1, waits_for="full pipe read by tee 12")],
        "full_pipe",
        "log",
    ),
    "a file lock": (
        BLOCKED | {Category.CHILD: 0.7},
        [
            gpu(
                Category.OTHER_OFF,
                "/job/train.py:6 take",
                nr=73,
                waits_for="lock on /data/x held by python 5",
            )
        ],
        "file_lock",
        "take",
    ),
    "a program": (
        BLOCKED | {Category.CHILD: 0.7},
        [gpu(Category.OTHER_OFF, "/job/train.py:7 ask", nr=61, waits_for="end of git 33")],
        "child_program",
        "ask",
    ),
    "the network": (
        BLOCKED | {Category.NET: 0.7},
        [gpu(Category.NET, "/job/train.py:8 upload", nr=45, waits_for="connection to 10.0.0.1:80")],
        "network_wait",
        "upload",
    ),
    "a sleep": (
        BLOCKED | {Category.SLEEP: 0.7},
        [gpu(Category.SLEEP, "/job/train.py:9 back_off", nr=230)],
        "host_sleep",
        "back_off",
    ),
    "a disk": (
        BLOCKED | {Category.IO: 0.7},
        [gpu(Category.IO, "/job/train.py:11 read", nr=0, waits_for="/data/shard")],
        "block_io",
        "read",
    ),
    "a checkpoint": (
        {Category.ON_CPU: 0.4, Category.IO: 0.3, Category.DEVICE: 0.3},
        [
            gpu(
                Category.ON_CPU,
                "/usr/lib/python3.12/site-packages/torch/serialization.py:9 _save",
                "/job/a.py:1 ep",
            ),
            gpu(Category.IO, "/job/a.py:2 save_model", nr=74, waits_for="/data/model.pt"),
        ],
        "checkpoint",
        "",
    ),
    "allocations": (
        {Category.ALLOC: 0.6, Category.DEVICE: 0.4},
        [gpu(Category.ALLOC, "/job/train.py:12 churn")],
        "cuda_alloc",
        "churn",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_constant_fault_is_named_with_its_line(name):
    budget, samples, cause, function = CASES[name]
    verdict = only(report_of(process(budget, [*samples, gpu(Category.DEVICE)])))
    assert (verdict.kind, verdict.causes[0].cause.name) == ("process", cause)
    assert function in str(verdict.evidence.line)
    assert verdict.causes[0].share == pytest.approx(1 - budget[Category.DEVICE], abs=0.06)
    assert verdict.evidence.gain_at_most == pytest.approx(1 / (1 - verdict.causes[0].share), rel=0.02)


def test_a_gpu_that_is_busy_makes_a_process_healthy_whatever_its_host_does():
    samples = [gpu(Category.ON_CPU, "/job/train.py:4 log_json")]
    report = report_of(process({Category.ON_CPU: 0.9, Category.DEVICE: 0.1}, samples, gpu_busy=97))
    assert report.healthy
    assert report.activity[0]["budget"]["on_cpu"] == pytest.approx(0.9)
    assert "on the CPU" in text.report(report)


def test_a_fault_of_the_host_costs_at_most_the_time_in_which_the_gpu_was_idle():
    samples = [gpu(Category.ON_CPU, "/job/train.py:4 log_json")]
    verdict = only(report_of(process({Category.ON_CPU: 0.9, Category.DEVICE: 0.1}, samples, gpu_busy=60)))
    assert verdict.causes[0].share == pytest.approx(0.9)
    assert verdict.evidence.gain_at_most == pytest.approx(1 / 0.6, rel=0.01)


def test_without_steps_or_a_fault_a_process_is_not_healthy():
    parts = (Category.ON_CPU, Category.COPY, Category.NET, Category.IO, Category.LOCK)
    verdict = only(report_of(process({Category.DEVICE: 0.7} | dict.fromkeys(parts, 0.06))))
    assert verdict.kind == "inconclusive"
    assert "no peers and no known steps" in str(verdict.abstained_because)


def test_seconds_without_gpu_calls_in_which_the_process_sleeps_are_idle():
    trace = process({Category.DEVICE: 0.97, Category.ON_CPU: 0.03}, gpu_busy=97, idle_s=(2, 3, 4))
    (activity,) = activities(trace)
    assert activity.idle_seconds == pytest.approx(3)
    assert activity.budget["sleep"] == 0
    assert report_of(trace).healthy


def test_the_pause_at_the_end_of_a_trace_of_a_process_that_pauses_is_idle():
    """A sleep is recorded at its end."""
    trace = process({Category.DEVICE: 1.0}, [gpu(Category.DEVICE)], idle_s=(3, 4))
    trace.snapshots["ledger_ns"][-1, [Category.DEVICE - 1, Category.SLEEP - 1]] += [
        -SECOND_NS // 2,
        SECOND_NS // 2,
    ]
    pauses = layout.empty(layout.OFFCPU, 1)
    pauses["pid"], pauses["category"] = PID, Category.SLEEP
    pauses["ts_ns"], pauses["duration_ns"] = START_NS + 3 * SECOND_NS, 2 * SECOND_NS
    (activity,) = activities(replace(trace, offcpu=pauses))
    assert activity.budget["sleep"] == pytest.approx(0, abs=0.01)


def test_the_holder_of_the_interpreter_lock_is_named():
    spin = SampleRole.SAME_PROCESS, Category.ON_CPU, -1, "", ("/job/train.py:77 spin",), SAMPLES_PER_S
    samples = [gpu(Category.LOCK, "/job/train.py:5 step", nr=202), spin]
    verdict = only(report_of(process(BLOCKED | {Category.LOCK: 0.7}, samples)))
    assert verdict.causes[0].cause.name == "gil"
    assert "spin" in str(verdict.evidence.line)


def test_a_thread_that_sleeps_while_it_holds_the_interpreter_lock_is_named():
    held = "/job/train.py:81 poll_device"
    samples = [
        gpu(Category.LOCK, "/job/train.py:5 step", nr=202),
        (SampleRole.SAME_PROCESS, Category.SLEEP, 230, INTERPRETER_LOCK, (held,), SAMPLES_PER_S - 3),
        (SampleRole.SAME_PROCESS, Category.ON_CPU, -1, "", ("/job/train.py:90 heartbeat",), 3),
    ]
    verdict = only(report_of(process(BLOCKED | {Category.LOCK: 0.7}, samples)))
    assert (verdict.causes[0].cause.name, verdict.evidence.line) == ("gil", held)


CALL = "/job/train.py:12 main"


def preempted(budget: dict[Category, float], *work: Sampled, n: int) -> Trace:
    """A process that waits for a CPU in n of its samples a second, all at the call that leads to the work."""
    waits = gpu(Category.PREEMPTED, "/job/train.py:31 churn", CALL, n=n)
    return process(budget, [*work, waits, gpu(Category.DEVICE, "/job/train.py:11 main", n=2)])


def test_a_fault_has_the_waits_for_a_cpu_in_its_function():
    allocation = gpu(Category.ALLOC, "/job/train.py:30 churn", CALL, n=2)
    trace = preempted({Category.ALLOC: 0.2, Category.PREEMPTED: 0.5, Category.DEVICE: 0.3}, allocation, n=6)
    verdict = only(report_of(trace))
    (first,) = verdict.causes
    assert (first.cause.name, first.share) == ("cuda_alloc", pytest.approx(0.7, abs=0.01))
    assert first.evidence.cpu_wait == pytest.approx(0.5, abs=0.01)
    assert "including 50% in which it waits for a CPU" in text.summary(verdict)


def test_necessary_computation_that_waits_for_a_cpu_is_not_the_first_fault():
    compute = gpu(Category.ON_CPU, "/job/train.py:30 churn", CALL, n=2)
    trace = preempted({Category.ON_CPU: 0.2, Category.PREEMPTED: 0.5, Category.DEVICE: 0.3}, compute, n=6)
    causes = only(report_of(trace)).causes
    assert [each.cause.name for each in causes] == ["cpu_preemption", "host_compute"]
    assert causes[1].share == pytest.approx(0.2, abs=0.02)


def test_waits_for_a_cpu_at_other_calls_are_not_part_of_a_fault():
    sleep = gpu(Category.SLEEP, "/job/train.py:40 back_off", "/job/train.py:13 main", nr=230, n=3)
    compute = gpu(Category.ON_CPU, "/job/train.py:32 churn", CALL, n=1)
    budget = {Category.SLEEP: 0.3, Category.ON_CPU: 0.1, Category.PREEMPTED: 0.4, Category.DEVICE: 0.2}
    causes = only(report_of(preempted(budget, sleep, compute, n=4))).causes
    assert [each.cause.name for each in causes][:2] == ["cpu_preemption", "host_sleep"]
    assert causes[1].evidence.cpu_wait is None


def test_a_thread_that_waits_for_a_cpu_while_it_touches_new_memory_is_in_page_faults():
    touch = "/job/train.py:30 touch", CALL
    on_cpu = gpu(Category.ON_CPU, *touch, waits_for="page faults of new memory", n=2)
    waits = gpu(Category.PREEMPTED, *touch, waits_for="page faults of new memory", n=6)
    budget = {Category.ON_CPU: 0.2, Category.PREEMPTED: 0.6, Category.DEVICE: 0.2}
    verdict = only(report_of(process(budget, [on_cpu, waits, gpu(Category.DEVICE, n=2)])))
    assert (verdict.causes[0].cause.name, verdict.causes[0].share) == (
        "page_fault",
        pytest.approx(0.8, abs=0.02),
    )


def test_a_thread_that_is_never_sampled_on_the_cpu_runs_where_it_waits_for_a_cpu():
    touch = "/job/train.py:30 touch", CALL
    waits = gpu(Category.PREEMPTED, *touch, waits_for="page faults of new memory", n=8)
    budget = {Category.ON_CPU: 0.1, Category.PREEMPTED: 0.7, Category.DEVICE: 0.2}
    verdict = only(report_of(process(budget, [waits, gpu(Category.DEVICE, n=2)])))
    assert (verdict.causes[0].cause.name, verdict.evidence.line) == ("page_fault", touch[0])
    assert verdict.causes[0].share == pytest.approx(0.8, abs=0.01)


def test_launches_that_wait_for_a_cpu_do_not_wait_for_the_gpu():
    counts = [(Op.SYNC, 20, 0.0, {}), (Op.LAUNCH, 200, 2_500.0, {})]
    compute = gpu(Category.ON_CPU, "/job/train.py:30 encode", n=2)
    (activity,) = activities(
        process({Category.ON_CPU: 0.2, Category.PREEMPTED: 0.6, Category.DEVICE: 0.2}, [compute], counts)
    )
    in_launches = activity.budget["launches"] + activity.budget["gpu_wait"] - 0.2
    assert in_launches == pytest.approx(0.5 * 0.2 / 0.8, abs=0.01)
    assert activity.budget["on_cpu"] == pytest.approx(0.2 - in_launches, abs=0.01)


def test_other_programs_do_not_hide_a_fault():
    budget = {Category.SLEEP: 0.05, Category.PREEMPTED: 0.6, Category.DEVICE: 0.35}
    sleep = gpu(Category.SLEEP, "/job/train.py:40 back_off", "/job/train.py:13 main", nr=230, n=3)
    causes = only(report_of(preempted(budget, sleep, n=4))).causes
    assert [each.cause.name for each in causes] == ["cpu_preemption", "host_sleep"]


def test_a_loop_in_a_function_that_is_named_after_checkpoints_does_not_save_all_the_time():
    loop = "/job/train.py:60 train_with_checkpoints"
    samples = [gpu(Category.DEVICE, loop), gpu(Category.ON_CPU, "/job/train.py:7 encode", loop)]
    verdict = only(report_of(process({Category.DEVICE: 0.4, Category.ON_CPU: 0.6}, samples)))
    assert [cause.cause.name for cause in verdict.causes] == ["host_compute"]


@pytest.mark.parametrize("waits_for", [f"{CLIENT} 10.0.0.1:80", NEW_CONNECTIONS])
def test_a_server_that_waits_for_requests_has_no_fault(waits_for):
    request = gpu(Category.NET, "/job/serve.py:5 next_request", nr=45, waits_for=waits_for, n=9)
    trace = process({Category.NET: 0.9, Category.DEVICE: 0.1}, [request, gpu(Category.DEVICE)])
    assert {verdict.kind for verdict in report_of(trace).verdicts} <= {"inconclusive"}


def test_a_lock_whose_holder_sleeps_is_not_the_interpreter_lock():
    """`with lock` has no frame of its own, and the holder runs for a moment between two sleeps."""
    flush = "/job/train.py:38 flush"
    samples = [
        gpu(Category.LOCK, "/job/train.py:42 update", nr=202),
        (SampleRole.SAME_PROCESS, Category.SLEEP, 230, "", (flush,), SAMPLES_PER_S - 1),
        (SampleRole.SAME_PROCESS, Category.ON_CPU, -1, "", (flush,), 1),
    ]
    verdict = only(report_of(process(BLOCKED | {Category.LOCK: 0.7}, samples)))
    assert verdict.causes[0].cause.name == "lock_contention"
    assert verdict.evidence.line == flush


def test_a_wait_for_a_queue_of_threads_is_not_the_interpreter_lock():
    helper = SampleRole.SAME_PROCESS, Category.SLEEP, 230, "", ("/job/train.py:80 helper",), SAMPLES_PER_S
    samples = [
        gpu(Category.LOCK, "/usr/lib/python3.12/threading.py:355 wait", "/job/train.py:5 step"),
        helper,
    ]
    verdict = only(report_of(process(BLOCKED | {Category.LOCK: 0.7}, samples)))
    assert verdict.causes[0].cause.name == "lock_contention"
    assert "helper" in str(verdict.evidence.line)


def test_a_sample_that_was_read_after_its_wait_does_not_name_another_reason():
    waiting = gpu(Category.OTHER_OFF, "/job/train.py:7 ask", nr=61, waits_for="end of git 33", n=3)
    late = gpu(Category.NET, "/job/train.py:9 synchronise", nr=LEFT, n=7)
    verdict = only(report_of(process(BLOCKED | {Category.CHILD: 0.7}, [waiting, late])))
    assert [cause.cause.name for cause in verdict.causes] == ["child_program"]


SELECT = "/usr/lib/python3.12/selectors.py:468 select"
RUN_ONCE = "/usr/lib/python3.12/asyncio/base_events.py:1949 _run_once"


@pytest.mark.parametrize(
    ("others", "waits_for", "cause"),
    [
        ([], TIMER, "host_sleep"),
        ([(Category.ON_CPU, -1, "/job/train.py:60 tokenise")], TIMER, "lock_contention"),
        (
            [(Category.OTHER_OFF, 61, "/usr/lib/python3.12/asyncio/unix_events.py:9 wait")],
            TIMER,
            "child_program",
        ),
        ([], "end of git 33", "child_program"),
        ([], "connection to 10.0.0.1:80", "network_wait"),
    ],
)
def test_the_reason_of_an_event_loop_s_wait_is_named(others, waits_for, cause):
    waiting = gpu(Category.NET, SELECT, RUN_ONCE, "/job/train.py:9 run", nr=232, waits_for=waits_for)
    threads = [
        (SampleRole.SAME_PROCESS, state, nr, "", (frame,), SAMPLES_PER_S) for state, nr, frame in others
    ]
    verdict = only(report_of(process(BLOCKED | {Category.NET: 0.7}, [waiting, *threads])))
    assert verdict.causes[0].cause.name == cause
    assert TIMER not in str(verdict.causes[0].title)


@pytest.mark.parametrize(("waits_for", "item"), [(TIMER, "sleep"), ("connection to 10.0.0.1:80", "network")])
def test_the_budget_has_an_event_loop_s_wait_for_a_timer_as_sleep(waits_for, item):
    frames = (SELECT, RUN_ONCE, "/job/train.py:9 run")
    waiting = gpu(Category.NET, *frames, nr=232, waits_for=waits_for)
    left = gpu(Category.NET, *frames, nr=LEFT, n=1)
    trace = process(BLOCKED | {Category.NET: 0.7}, [waiting, left])
    (data,) = as_data(trace, activities(trace))
    assert data["budget"] == pytest.approx({"on_cpu": 0.05, "gpu_wait": 0.25, item: 0.7})
    assert [at["state"] for at in data["locations"]] == [item]


MANAGER = "/usr/lib/python3.12/concurrent/futures/process.py:400 wait_result_broken_or_wakeup"
FUTURE = "/usr/lib/python3.12/concurrent/futures/_base.py:450 result"
CONDITION = "/usr/lib/python3.12/threading.py:355 wait"


def test_a_save_that_has_few_samples_is_a_checkpoint():
    """Any function may be in all of a few samples: it does not contain the loop."""
    budget = {Category.IO: 0.7, Category.DEVICE: 0.3}
    samples = [gpu(Category.IO, "/job/train.py:5 save", nr=74, waits_for="/data/m.zip", n=1)]
    late = gpu(Category.DEVICE, "/job/train.py:3 save", n=1)
    verdict = only(report_of(process(budget, [*samples, late], n_seconds=4)))
    assert verdict.causes[0].cause.name == "checkpoint"


def test_a_wait_for_a_child_process_without_samples_is_not_a_program():
    budget = {Category.CHILD: 0.4, Category.DEVICE: 0.6}
    report = report_of(process(budget, [gpu(Category.DEVICE, "/job/train.py:6 step")]))
    assert [verdict.kind for verdict in report.verdicts] == ["inconclusive"]
    assert report.verdicts[0].evidence.largest_item == "child"


def test_a_compiler_s_line_with_a_state_that_has_no_time_is_judged():
    frames = ("/usr/lib/python3.12/subprocess.py:2 wait", "/job/kernels.py:5 build")
    samples = [
        gpu(Category.CHILD, *frames, nr=61, waits_for="end of nvcc 99", n=1),
        gpu(Category.OTHER_OFF, *frames, nr=61, waits_for="end of git 98", n=1),
        gpu(Category.DEVICE, "/job/train.py:6 step"),
    ]
    report = report_of(process({Category.CHILD: 0.01, Category.DEVICE: 0.99}, samples))
    assert not [verdict for verdict in report.verdicts if verdict.kind == "process"]


def test_a_write_to_a_full_terminal_is_named():
    line = "/job/train.py:7 show_progress"
    samples = [
        gpu(Category.NET, line, nr=1, waits_for="/dev/pts/3"),
        gpu(Category.DEVICE, "/job/train.py:6 step"),
    ]
    verdict = only(report_of(process({Category.NET: 0.6, Category.DEVICE: 0.4}, samples)))
    assert (verdict.causes[0].cause.name, verdict.evidence.line) == ("full_pipe", line)
    assert "terminal" in verdict.causes[0].title


def test_a_lock_shared_with_other_processes_is_not_held_by_a_thread():
    line = "/job/train.py:7 enter"
    other = (SampleRole.SAME_PROCESS, Category.ON_CPU, -1, "", ("/job/train.py:9 log",), 8)
    samples = [
        gpu(Category.LOCK, line, nr=202, waits_for=SHARED_LOCK),
        gpu(Category.DEVICE, "/job/train.py:6 step"),
        other,
    ]
    verdict = only(report_of(process({Category.LOCK: 0.6, Category.DEVICE: 0.4}, samples)))
    assert (verdict.causes[0].cause.name, verdict.evidence.line) == ("lock_contention", line)
    assert SHARED_LOCK in verdict.causes[0].title


def test_the_whole_wait_at_a_line_that_starts_a_compiler_is_compilation():
    line = "/job/kernels.py:5 build"
    frames = ("/usr/lib/python3.12/subprocess.py:2 wait", line)
    samples = [
        gpu(Category.CHILD, *frames, nr=61, waits_for="end of nvcc 99", n=4),
        gpu(Category.CHILD, *frames, nr=61, waits_for="end of a child process", n=6),
        gpu(Category.DEVICE, "/job/train.py:6 step"),
    ]
    verdict = only(report_of(process({Category.CHILD: 0.8, Category.DEVICE: 0.2}, samples)))
    assert [cause.cause.name for cause in verdict.causes] == ["recompilation"]
    assert verdict.causes[0].share == pytest.approx(0.8, abs=0.05)
    assert verdict.evidence.line == line


@pytest.mark.parametrize(("n_locked", "cause"), [(9, "file_lock"), (3, "host_sleep")])
def test_a_sleep_while_another_process_holds_a_lock_polls_the_lock(n_locked, cause):
    line, lock = "/job/train.py:5 record", "lock on /job/runs.db held by python3 99"
    budget = {Category.SLEEP: 0.6, Category.DEVICE: 0.4}
    samples = [
        gpu(Category.SLEEP, line, nr=230, waits_for=lock, n=n_locked),
        gpu(Category.SLEEP, line, nr=230, n=10 - n_locked),
        gpu(Category.DEVICE, "/job/train.py:6 step"),
    ]
    verdict = only(report_of(process(budget, samples)))
    assert (verdict.causes[0].cause.name, verdict.evidence.line) == (cause, line)
    assert ("runs.db" in str(verdict.causes[0].evidence)) == (cause == "file_lock")
    assert verdict.causes[0].share == pytest.approx(0.6, abs=0.05)


def test_a_wait_for_a_future_of_worker_processes_is_a_wait_for_input():
    worker = (
        SampleRole.CHILD,
        Category.ON_CPU,
        -1,
        "",
        ("/job/data.py:3 decode", "/usr/lib/python3.12/multiprocessing/process.py:108 run"),
        SAMPLES_PER_S,
    )
    manager = SampleRole.SAME_PROCESS, Category.NET, 7, "pipe", (MANAGER,), SAMPLES_PER_S
    waiting = SampleRole.GPU, Category.LOCK, 202, "", (CONDITION, FUTURE, "/job/train.py:9 next_batch"), 10
    verdict = only(report_of(process(BLOCKED | {Category.LOCK: 0.7}, [waiting, manager, worker])))
    assert verdict.causes[0].cause.name == "input_starvation"
    assert "decode" in str(verdict.evidence.line)


def test_a_thread_without_code_of_the_user_is_not_named():
    other = SampleRole.SAME_PROCESS, Category.NET, 7, "", (MANAGER,), SAMPLES_PER_S
    waiting = SampleRole.GPU, Category.LOCK, 202, "", (CONDITION, "/job/train.py:9 wait_for_it"), 10
    verdict = only(report_of(process(BLOCKED | {Category.LOCK: 0.7}, [waiting, other])))
    assert verdict.causes[0].cause.name == "lock_contention"
    assert "wait_for_it" in str(verdict.evidence.line)


def test_a_wait_for_a_write_to_the_file_of_a_checkpoint_is_a_checkpoint():
    writing = gpu(Category.IO, "/job/train.py:8 keep_weights", nr=74, waits_for="/data/run3/ckpt_100.bin")
    verdict = only(report_of(process(BLOCKED | {Category.IO: 0.7}, [writing])))
    assert verdict.causes[0].cause.name == "checkpoint"


LOADER = "/usr/lib/python3.12/site-packages/torch/utils/data/dataloader.py:1 _next_data"
WORKER = "/usr/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py:2 _worker_loop"


@pytest.mark.parametrize(
    ("category", "waits_for", "words"),
    [
        (Category.ON_CPU, "", "compute without a pause"),
        (Category.IO, "/data/x", "wait for a disk"),
        (Category.OTHER_OFF, "lock on /data/x", "file lock"),
        (Category.LOCK, "", "wait for a lock"),
    ],
)
def test_input_starvation_names_the_state_of_the_workers(category, waits_for, words):
    worker = SampleRole.CHILD, category, -1, waits_for, ("/job/data.py:3 load", WORKER), SAMPLES_PER_S
    samples = [gpu(Category.NET, LOADER, nr=7), worker]
    verdict = only(report_of(process(BLOCKED | {Category.CHILD: 0.7}, samples)))
    assert verdict.causes[0].cause.name == "input_starvation"
    assert words in verdict.causes[0].title
    assert "load" in str(verdict.evidence.line)


def test_only_frequent_short_synchronisations_are_excessive():
    samples = [gpu(Category.DEVICE, "/job/train.py:5 layers"), gpu(Category.ON_CPU, TORCH)]
    budget = {Category.DEVICE: 0.6, Category.ON_CPU: 0.4}
    many = process(budget, samples, [(Op.SYNC, 2000, 300, {}), (Op.LAUNCH, 8000, 5, {})], gpu_busy=50)
    assert only(report_of(many)).causes[0].cause.name == "excessive_sync"
    few = process(budget, samples, [(Op.SYNC, 20, 30_000, {}), (Op.LAUNCH, 800, 5, {})], gpu_busy=50)
    assert only(report_of(few)).causes[0].cause.name != "excessive_sync"


def test_waits_in_which_the_gpu_works_are_not_excessive():
    budget = {Category.DEVICE: 0.85, Category.ON_CPU: 0.15}
    samples = [gpu(Category.DEVICE, "/job/decode.py:5 token"), gpu(Category.ON_CPU, "/job/decode.py:6 token")]
    decoding = process(budget, samples, [(Op.SYNC, 9000, 95, {}), (Op.LAUNCH, 9000, 5, {})])
    assert only(report_of(decoding)).kind == "inconclusive"


def test_allocations_cost_time_in_which_the_driver_reports_the_gpu_as_busy():
    budget = {Category.ALLOC: 0.2, Category.DEVICE: 0.65, Category.ON_CPU: 0.15}
    samples = [gpu(Category.ALLOC, "/job/train.py:12 churn"), gpu(Category.DEVICE), gpu(Category.ON_CPU)]
    verdict = only(report_of(process(budget, samples, gpu_busy=92)))
    assert [cause.cause.name for cause in verdict.causes] == ["cuda_alloc"]
    assert "churn" in str(verdict.evidence.line)


def test_copies_from_pageable_memory_are_named_with_their_speed():
    copies = {
        "direction": Direction.HOST_TO_DEVICE,
        "host_memory": HostMemory.PAGEABLE,
        "count_bytes": 50 * (64 << 20),
    }
    trace = process(
        {Category.COPY: 0.6, Category.DEVICE: 0.4},
        [gpu(Category.COPY, "/job/train.py:5 load_batch"), gpu(Category.DEVICE)],
        [(Op.COPY, 50, 12_000, copies), (Op.SYNC, 50, 8_000, {})],
    )
    verdict = only(report_of(trace))
    assert verdict.causes[0].cause.name == "pageable_copy"
    assert verdict.causes[0].evidence.gb_per_second == pytest.approx((64 << 20) / 12e-3 / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("function", "cause"), [("cudaMemcpyAsync", "pageable_copy"), ("cudaMemcpy", "host_device_copy")]
)
def test_an_asynchronous_copy_to_the_host_that_blocks_goes_to_pageable_memory(function, cause):
    """As after a late attach, when pinned memory is not known."""
    copies = {
        "direction": Direction.DEVICE_TO_HOST,
        "host_memory": HostMemory.UNKNOWN,
        "count_bytes": 50 * (64 << 20),
        "symbol": 1,
    }
    trace = process(
        {Category.COPY: 0.6, Category.DEVICE: 0.4},
        [gpu(Category.COPY, "/job/train.py:5 fetch"), gpu(Category.DEVICE)],
        [(Op.COPY, 50, 12_000, copies), (Op.SYNC, 50, 8_000, {})],
    )
    verdict = only(report_of(replace(trace, symbols=("", function))))
    assert verdict.causes[0].cause.name == cause


@pytest.mark.parametrize("size_bytes", [64, 1 << 20])
@pytest.mark.parametrize("host_memory", [HostMemory.PAGEABLE, HostMemory.PINNED, HostMemory.UNKNOWN])
def test_a_copy_of_few_bytes_that_takes_long_is_a_wait_for_the_gpu(size_bytes, host_memory):
    copies = {
        "direction": Direction.DEVICE_TO_HOST,
        "host_memory": host_memory,
        "count_bytes": 50 * size_bytes,
    }
    trace = process(
        {Category.COPY: 0.95, Category.ON_CPU: 0.05},
        [gpu(Category.COPY, "/job/serve.py:5 next_tokens")],
        [(Op.COPY, 50, 19_000, copies), (Op.GRAPH_LAUNCH, 50, 20, {})],
    )
    assert only(report_of(trace)).kind == "inconclusive"


def test_many_launches_of_a_busy_host_bind_the_gpu():
    samples = [gpu(Category.ON_CPU, TORCH)]
    counts = [(Op.LAUNCH, 60_000, 4, {}), (Op.SYNC, 10, 100, {})]
    verdict = only(
        report_of(process({Category.ON_CPU: 0.98, Category.DEVICE: 0.02}, samples, counts, gpu_busy=40))
    )
    assert verdict.causes[0].cause.name == "launch_bound"


def test_an_estimate_from_few_calls_is_not_reported():
    counts = [(Op.SYNC, 20, 100, {}), (Op.LAUNCH, 5, 4, {"n": 5000, "n_seen": 3, "is_estimate": 1})]
    report = report_of(process({Category.ON_CPU: 0.6, Category.DEVICE: 0.4}, [], counts))
    assert "launch" not in report.activity[0]["calls"]


def test_the_activity_is_part_of_the_json():
    data = as_json(report_of(process({Category.DEVICE: 1.0}, gpu_busy=99)))
    assert data["activity"][0]["gpu"]["busy"] == pytest.approx(0.99)


def test_the_start_and_the_end_of_a_process_are_left_out():
    trace = process({Category.DEVICE: 0.97, Category.ON_CPU: 0.03}, counts=[(Op.SYNC, 200, 100, {})])
    early = trace.operations["ts_ns"] <= START_NS + 3 * SECOND_NS
    trace.operations["n"][early] = 2  # three seconds of loading
    (activity,) = activities(trace)
    assert activity.start_seconds == pytest.approx(3)
    assert activity.seconds == pytest.approx(N_SECONDS - 3)
    assert activity.calls["synchronise"].per_second == pytest.approx(200)


def test_only_a_lowered_power_limit_is_a_fault():
    for reasons, is_named in ((0x4, False), (0x4 | LOWERED_POWER_LIMIT, True)):
        trace = process({Category.DEVICE: 0.96, Category.ON_CPU: 0.04}, gpu_busy=96)
        trace.gpus["clock_reasons"], trace.gpus["sm_mhz"], trace.gpus["sm_max_mhz"] = reasons, 1300, 1980
        assert report_of(trace).healthy is not is_named


def test_work_on_the_cpu_at_the_line_of_a_longer_wait_belongs_to_the_wait():
    samples = [
        gpu(Category.IO, "/job/train.py:11 read", nr=0, n=7),
        gpu(Category.ON_CPU, "/job/train.py:11 read", n=3),
        gpu(Category.ON_CPU, "/job/train.py:12 parse", n=3),
    ]
    (fault, other) = only(
        report_of(process({Category.IO: 0.4, Category.ON_CPU: 0.4, Category.DEVICE: 0.2}, samples))
    ).causes
    assert (fault.cause.name, fault.share) == ("block_io", pytest.approx(0.4 + 0.4 * 3 / 6))
    assert (other.cause.name, other.share) == ("host_compute", pytest.approx(0.4 * 3 / 6))


def test_short_waits_are_attributed_to_their_line_despite_long_waits():
    samples = [
        gpu(Category.DEVICE, "/job/train.py:20 wait_for_step", n=2),
        gpu(Category.ON_CPU, "/job/train.py:30 select", n=8),
    ]
    trace = process(
        {Category.DEVICE: 0.2, Category.ON_CPU: 0.8},
        samples,
        [(Op.SYNC, 10_000, 20, {})],
    )
    long_waits = layout.empty(layout.CALLS, 10 * N_SECONDS)
    long_waits["pid"], long_waits["op"], long_waits["stack"] = PID, Op.SYNC, 1
    long_waits["ts_ns"] = START_NS + np.arange(len(long_waits)) * 100 * MS
    long_waits["duration_ns"] = 20 * MS
    verdict = only(report_of(replace(trace, calls=long_waits)))
    assert verdict.causes[0].cause.name == "excessive_sync"
    assert verdict.causes[0].share == pytest.approx(0.8)
    assert "select" in str(verdict.causes[0].evidence.line)


def test_seconds_of_imports_are_start():
    imports = gpu(Category.ON_CPU, "<frozen importlib._bootstrap>:488 _call_with_frames_removed")
    work = gpu(Category.ON_CPU, "/job/train.py:4 log_json")
    trace = process({Category.ON_CPU: 0.9, Category.DEVICE: 0.1}, [imports, work])
    n_imports = 4
    is_early = trace.samples["ts_ns"] <= START_NS + n_imports * SECOND_NS
    rows = trace.samples[is_early == (trace.samples["stack"] == 1)]
    (activity,) = activities(replace(trace, samples=rows))
    assert activity.start_seconds == pytest.approx(n_imports)
    assert activity.seconds == pytest.approx(N_SECONDS - n_imports)


@pytest.mark.parametrize("n_last", [0, 1, 3])
def test_a_module_that_is_loaded_in_each_step_is_work(n_last):
    """n_last: seconds at the end in which the samples show other work."""
    imports = gpu(
        Category.ON_CPU, "<frozen importlib._bootstrap>:866 _exec", "/job/train.py:7 load_config", n=8
    )
    work = gpu(Category.ON_CPU, "/job/train.py:4 log_json", n=2)
    trace = process({Category.ON_CPU: 0.9, Category.DEVICE: 0.1}, [imports, work])
    is_late = trace.samples["ts_ns"] > START_NS + (N_SECONDS - n_last) * SECOND_NS
    trace = replace(trace, samples=trace.samples[~is_late | (trace.samples["stack"] == 2)])
    report = report_of(trace)
    verdict = only(report)
    assert verdict.causes[0].share > 0.4
    assert "load_config" in str(verdict.causes[0].evidence.line)


def test_a_rate_covers_the_time_in_which_the_probes_were_on():
    estimate = {"is_estimate": 1, "n_seen": 1000}
    trace = process({Category.ON_CPU: 0.9, Category.DEVICE: 0.1}, (), [(Op.LAUNCH, 50_000, 5, estimate)])
    is_covered = trace.operations["ts_ns"] == START_NS + 3 * SECOND_NS
    (activity,) = activities(replace(trace, operations=trace.operations[is_covered]))
    assert activity.calls["launch"].per_second == pytest.approx(50_000)


def test_the_share_of_other_processes_on_a_gpu_covers_the_second_before_each_reading():
    trace = process({Category.DEVICE: 0.96, Category.ON_CPU: 0.04}, gpu_busy=96)
    rows = layout.empty(layout.GPU_USE, 2 * N_SECONDS)
    rows["ts_ns"] = START_NS + np.repeat(np.arange(1, N_SECONDS + 1), 2) * SECOND_NS
    rows["pid"] = np.tile([PID, PID + 1], N_SECONDS)
    rows["sm_percent"] = np.tile([60, 40], N_SECONDS)
    processes = layout.empty(layout.GPU_PROCESSES, 2)
    processes["pid"], processes["ts_ns"], processes["alive"] = [PID, PID + 1], START_NS + SECOND_NS, 1
    (activity,) = activities(replace(trace, gpu_use=rows, gpu_processes=processes))
    assert activity.gpu is not None and activity.gpu.others_busy == pytest.approx(0.4)


def test_the_next_process_on_the_gpu_does_not_share_it():
    """The reading after the end of a process is of the process that came next, and covers its last part as well."""
    trace = process({Category.DEVICE: 0.96, Category.ON_CPU: 0.04}, gpu_busy=96)
    rows = layout.empty(layout.GPU_USE, N_SECONDS + 1)
    rows["ts_ns"] = START_NS + SECOND_NS // 2 + np.arange(N_SECONDS + 1) * SECOND_NS
    rows["pid"] = [PID] * N_SECONDS + [PID + 1]
    rows["sm_percent"] = 99
    (activity,) = activities(replace(trace, gpu_use=rows))
    assert activity.gpu is not None and activity.gpu.others_busy == 0


def test_a_process_that_ended_before_does_not_share_the_gpu_although_its_last_row_is_later():
    """The list of processes on a GPU is read less often than processes end."""
    trace = process({Category.DEVICE: 0.96, Category.ON_CPU: 0.04}, gpu_busy=96)
    rows = layout.empty(layout.GPU_PROCESSES, 3)
    rows["pid"], rows["alive"] = (PID, PID + 1, PID + 1), (1, 1, 0)
    rows["ts_ns"] = START_NS + np.array([-5, -5, 2]) * SECOND_NS
    earlier = trace.processes[:1].copy()
    earlier["pid"], earlier["ended_ns"] = PID + 1, START_NS - SECOND_NS
    processes = np.concatenate([trace.processes, earlier])
    (activity, *_) = activities(replace(trace, gpu_processes=rows, processes=processes))
    assert activity.gpu is not None and activity.gpu.others == ()


@pytest.mark.parametrize(
    ("begin_s", "ended_s", "is_named"),
    [(-5, None, True), (-5, -1, False), (-5, 2, True), (-300, None, False)],
)
def test_a_process_that_used_the_gpu_before_the_trace_of_this_process_counts(
    begin_s: int, ended_s: int | None, is_named: bool
):
    """It has a row each half minute and one at its end, unless no agent ran then."""
    trace = process({Category.DEVICE: 0.96, Category.ON_CPU: 0.04}, gpu_busy=96)
    rows = layout.empty(layout.GPU_PROCESSES, 2 if ended_s is None else 3)
    rows["pid"][:2], rows["alive"][:2] = (PID, PID + 1), 1
    rows["ts_ns"] = START_NS + begin_s * SECOND_NS
    rows["comm"] = b"other"
    if ended_s is not None:
        rows["pid"][2], rows["ts_ns"][2] = PID + 1, START_NS + ended_s * SECOND_NS
    (activity,) = activities(replace(trace, gpu_processes=rows))
    assert activity.gpu is not None
    assert activity.gpu.others == ((f"other {PID + 1}",) if is_named else ())


@pytest.mark.parametrize(
    ("n_silent", "alive", "state", "is_reported"),
    [
        (12, 1, Category.DEVICE, True),
        (12, 0, Category.DEVICE, False),
        (5, 1, Category.DEVICE, False),
        (12, 1, Category.ON_CPU, False),
    ],
)
def test_a_process_that_makes_no_gpu_call_any_more_is_reported_with_its_state(
    n_silent: int, alive: int, state: Category, is_reported: bool
):
    """A hang has no end that would make it a slow call. A process on the CPU may poll by uncounted functions."""
    n_seconds = 30
    trace = process(
        {state: 0.8, Category.SLEEP: 0.2},
        [gpu(state, "/job/serve.py:7 answer")],
        n_seconds=n_seconds,
    )
    trace.snapshots["alive"][-1] = alive
    is_before = trace.operations["ts_ns"] <= START_NS + (n_seconds - n_silent) * SECOND_NS
    report = report_of(replace(trace, operations=trace.operations[is_before]))
    if is_reported:
        assert report.activity[0]["silence"] == {
            "seconds": n_silent,
            "state": "gpu_wait",
            "line": "/job/serve.py:7 answer",
        }
        assert (
            "no counted GPU call in the last 12 s: waiting for its GPU at serve.py:7 answer"
            in text.report(report)
        )
    else:
        assert report.activity[0]["silence"] is None


def test_page_faults_of_the_function_that_writes_a_checkpoint_are_part_of_it():
    """As zipfile and pickle cause them, in a function with any name."""
    faults = gpu(Category.ON_CPU, "/job/train.py:62 write_state", waits_for="page faults of new memory", n=6)
    writes = gpu(Category.IO, "/job/train.py:64 write_state", nr=74, waits_for="/tmp/state.pt", n=5)
    trace = process(
        {Category.ON_CPU: 0.3, Category.IO: 0.25, Category.DEVICE: 0.45},
        [faults, writes, gpu(Category.DEVICE, n=9)],
    )
    verdict = only(report_of(trace))
    assert [cause.cause.name for cause in verdict.causes] == ["checkpoint"]
    assert verdict.evidence.share == pytest.approx(0.55, abs=0.01)


def test_other_work_of_the_function_that_writes_a_checkpoint_is_not_part_of_it():
    """A script in which main() prepares the data and saves."""
    prepares = gpu(Category.ON_CPU, "/job/train.py:30 main", n=8)
    writes = gpu(Category.IO, "/job/train.py:64 main", nr=74, waits_for="/tmp/state.pt", n=3)
    trace = process(
        {Category.ON_CPU: 0.4, Category.IO: 0.15, Category.DEVICE: 0.45},
        [prepares, writes, gpu(Category.DEVICE, "/job/train.py:50 main", n=9)],
    )
    (verdict,) = report_of(trace).verdicts
    assert verdict.causes[0].cause.name == "host_compute"
    assert verdict.causes[0].share == pytest.approx(0.4, abs=0.01)


def test_the_budget_states_how_many_multiprocessors_work():
    trace = process({Category.DEVICE: 0.96, Category.ON_CPU: 0.04}, gpu_busy=96)
    rows = layout.empty(layout.GPU_COUNTERS, 3)
    rows["ts_ns"], rows["interval_ns"] = START_NS + np.array([1, 5, 9]) * SECOND_NS, 4 * SECOND_NS
    rows["sm_percent"] = [90, 10, 20]  # the first row is about the time before
    (activity,) = activities(replace(trace, gpu_counters=rows))
    assert activity.gpu is not None and activity.gpu.sm_active == pytest.approx(0.15)
    assert activity.gpu.memory_bandwidth is None
    assert "15% of its multiprocessors at work" in "\n".join(lines(as_data(trace, [activity])))


def ranks_of(*budgets: tuple[dict[Category, float], list[Sampled]]) -> Trace:
    """Ranks of one job without a collective, each with its own budget and samples."""
    parts = [process(budget, samples) for budget, samples in budgets]
    stacks: dict[int, tuple[str, ...]] = {}
    for rank, part in enumerate(parts):
        for table in (part.snapshots, part.operations, part.samples, part.processes):
            table["pid"] += rank
        part.processes["rank"], part.processes["nranks"] = rank, len(parts)
        part.samples["stack"] += 100 * rank
        stacks |= {number + 100 * rank: frames for number, frames in part.stacks.items()}
    tables = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("snapshots", "operations", "samples", "processes")
    }
    return replace(parts[0], stacks=stacks, **tables)


def test_ranks_without_nccl_that_wait_for_another_rank_are_not_accused():
    waits = {Category.NET: 0.7, Category.DEVICE: 0.2, Category.ON_CPU: 0.1}
    receives = [gpu(Category.NET, "/job/train.py:8 all_reduce", nr=232)]
    computes = {Category.ON_CPU: 0.75, Category.DEVICE: 0.2, Category.NET: 0.05}
    encodes = [gpu(Category.ON_CPU, "/job/train.py:4 log_json")]
    report = report_of(ranks_of((waits, receives), (waits, receives), (computes, encodes), (waits, receives)))
    verdict = only(report)
    assert (verdict.ranks, verdict.victims, verdict.causes[0].cause.name) == ([2], [0, 1, 3], "host_compute")
    assert any("wait for rank 2" in str(remark["what"]) for remark in report.benign)


@pytest.mark.parametrize(("category", "nr"), [(Category.NET, 232), (Category.ON_CPU, -1)])
def test_ranks_that_wait_for_a_rank_without_a_fault_are_not_healthy(category, nr):
    line = "/job/train.py:8 exchange"
    computes = {category: 0.04, Category.DEVICE: 0.96}
    waits = {category: 0.4, Category.DEVICE: 0.6}
    waiting = [gpu(category, line, nr=nr, n=8), gpu(Category.DEVICE, n=12)]
    computing = [gpu(category, line, nr=nr, n=1), gpu(Category.DEVICE, n=19)]
    report = report_of(ranks_of((computes, computing), (waits, waiting), (waits, waiting)))
    verdict = only(report)
    assert report.answer is Answer.INCONCLUSIVE
    assert (verdict.ranks, verdict.victims, verdict.evidence.wait_share) == ([0], [1, 2], pytest.approx(0.4))
    assert f"wait 40% of the time for messages or other threads at {line}" in verdict.summary


def test_ranks_that_poll_for_messages_on_the_cpu_wait_for_the_rank_that_polls_less():
    """MPI polls shared memory, so that the ledger has no wait."""
    line = "/job/train.py:8 exchange"
    polls = {Category.ON_CPU: 0.8, Category.DEVICE: 0.2}
    sleeps = {Category.SLEEP: 0.4, Category.ON_CPU: 0.4, Category.DEVICE: 0.2}
    polling, writing = gpu(Category.ON_CPU, line, n=8), gpu(Category.SLEEP, "/job/train.py:4 write_log", n=4)
    report = report_of(
        ranks_of((polls, [polling]), (sleeps, [writing, gpu(Category.ON_CPU, line, n=4)]), (polls, [polling]))
    )
    verdict = only(report)
    assert (verdict.ranks, verdict.victims) == ([1], [0, 2])
    assert [cause.cause.name for cause in verdict.causes] == ["host_sleep"]
    assert (verdict.evidence.share, verdict.evidence.line) == (
        pytest.approx(0.4),
        "/job/train.py:4 write_log",
    )


def test_the_late_rank_need_not_have_been_sampled_at_the_line_of_the_wait():
    """Its waits are short, and its start was longer: 18 and 19 synchronise calls a second."""
    line = "/job/train.py:8 exchange"
    polls = {Category.PREEMPTED: 0.8, Category.DEVICE: 0.2}
    sleeps = {Category.SLEEP: 0.8, Category.DEVICE: 0.2}
    polling, writing = (
        gpu(Category.PREEMPTED, line, n=8),
        gpu(Category.SLEEP, "/job/train.py:4 write_log", n=8),
    )
    trace = ranks_of((polls, [polling]), (sleeps, [writing]), (polls, [polling]))
    is_late = trace.operations["pid"] == PID + 1
    trace.operations["n"][is_late] = trace.operations["n"][is_late] * 18 // 19
    verdict = only(report_of(trace))
    assert (verdict.ranks, verdict.victims) == ([1], [0, 2])
    assert verdict.evidence.line == "/job/train.py:4 write_log"


def test_a_root_that_receives_at_a_line_of_its_own_is_not_the_late_rank():
    polls = {Category.ON_CPU: 0.6, Category.DEVICE: 0.4}
    root = [gpu(Category.ON_CPU, f"/job/train.py:{line} gather", n=3) for line in (10, 12, 14)]
    worker = [gpu(Category.ON_CPU, "/job/train.py:20 send", n=8)]
    report = report_of(ranks_of((polls, root), (polls, worker), (polls, worker), (polls, worker)))
    assert not any("wait for rank" in str(remark["what"]) for remark in report.benign)


def test_ranks_at_different_rates_do_not_wait_for_each_other():
    """Several jobs that the launcher gave the variables of one."""
    line = "/job/train.py:8 encode"
    samples = [gpu(Category.ON_CPU, line, n=8)]
    trace = ranks_of(
        ({Category.ON_CPU: 0.8, Category.DEVICE: 0.2}, samples),
        ({Category.ON_CPU: 0.5, Category.DEVICE: 0.5}, [gpu(Category.ON_CPU, line, n=5)]),
    )
    trace.operations["n"][trace.operations["pid"] == PID + 1] *= 2
    report = report_of(trace)
    assert {verdict.causes[0].cause.name for verdict in report.verdicts} == {"host_compute"}


def test_ranks_without_nccl_that_all_wait_are_reported_as_they_are():
    waits = {Category.NET: 0.7, Category.DEVICE: 0.2, Category.ON_CPU: 0.1}
    receives = [gpu(Category.NET, "/job/train.py:8 all_reduce", nr=232)]
    report = report_of(ranks_of((waits, receives), (waits, receives)))
    assert {verdict.causes[0].cause.name for verdict in report.verdicts} == {"network_wait"}
    assert any("make no NCCL call" in str(remark["what"]) for remark in report.benign)


def test_the_libraries_that_connect_ranks_without_nccl_are_named():
    waits = {Category.NET: 0.7, Category.DEVICE: 0.2, Category.ON_CPU: 0.1}
    receives = [gpu(Category.NET, "/job/train.py:8 all_reduce", nr=232)]
    trace = ranks_of((waits, receives), (waits, receives))
    trace.processes["libraries"] = b"nccl, mpich, ucx"
    report = report_of(trace)
    assert any("messages of MPICH and UCX are not traced" in str(remark["what"]) for remark in report.benign)
    assert [each["libraries"] for each in report.activity] == [["nccl", "mpich", "ucx"]] * 2
    assert "library nccl, mpich, ucx" in text.report(report)


@pytest.mark.parametrize("n_ranks", [2, 4, 12, 64])
def test_the_costliest_verdict_is_on_a_small_terminal(n_ranks):
    line = "/job/train.py:8 encode"
    shares = [0.3 + 0.005 * rank for rank in range(n_ranks)]
    budgets = [{Category.ON_CPU: share, Category.DEVICE: 0.5 - share / 3} for share in shares]
    report = report_of(ranks_of(*((budget, [gpu(Category.ON_CPU, line, n=8)]) for budget in budgets)))
    words = text.report(report).splitlines()
    costliest = max(report.verdicts, key=lambda verdict: verdict.cost.may_be_gpu_seconds)
    rows = [line[at : at + 80] for line in words for at in range(0, max(len(line), 1), 80)]
    assert costliest.summary[:50] in "\n".join(rows[-22:])
    assert next(n for n, each in enumerate(words) if report.verdicts[0].summary in each) <= 14


def test_a_process_alone_next_to_a_job_is_judged():
    job = dp_trace()
    budget, samples, cause, _ = CASES["a sleep"]
    alone = process(budget, [*samples, gpu(Category.DEVICE)])
    for table in (alone.snapshots, alone.operations, alone.samples, alone.processes):
        table["pid"] = 9999
    tables = {
        name: np.concatenate([getattr(job, name), getattr(alone, name)])
        for name in ("snapshots", "operations", "samples", "processes")
    }
    report = report_of(replace(job, stacks=alone.stacks, **tables))
    (verdict,) = [verdict for verdict in report.verdicts if verdict.kind == "process"]
    assert (verdict.evidence.pid, verdict.causes[0].cause.name) == (9999, cause)
    assert [verdict.kind for verdict in report_of(job).verdicts] == []
