"""Samples of a GPU thread and of the threads that it waits for, on a real Python process with a simulated GPU state."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallscope.capture.probes.program import State
from stallscope.capture.stacks.memory import Memory, Unreadable
from stallscope.capture.stacks.thread_samples import INTERPRETER_LOCK, Samples
from stallscope.events import kernel
from stallscope.events.names import Category, SampleRole

from ...patience import until
from .interpreters import running

_JOB = """
import threading

def spin():
    while True:
        pass

def wait_for_batch(lock):
    print("ready", flush=True)
    lock.acquire()

lock = threading.Lock()
lock.acquire()
threading.Thread(target=spin, daemon=True).start()
wait_for_batch(lock)
"""


@pytest.fixture
def job() -> Iterator[int]:
    """A process whose main thread waits for a lock while another thread runs."""
    with subprocess.Popen([sys.executable, "-c", _JOB], stdout=-1) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            Memory(process.pid).read(1 << 20, 1)
        except Unreadable as error:
            if error.errno == 1:
                pytest.skip("memory: other processes' memory may not be read")
        until(lambda: has_blocked(process.pid))
        yield process.pid
        process.kill()


def has_blocked(pid: int) -> bool:
    """Whether the main thread waits for the lock: a thread that waits for the interpreter wakes every 5 ms."""
    status = Path(f"/proc/{pid}/status")
    before = status.read_text()
    time.sleep(0.1)
    return "\nState:\tS" in before and _switches(before) == _switches(status.read_text())


def _switches(status: str) -> list[str]:
    return [line for line in status.splitlines() if "ctxt_switches" in line]


def state_of(pid: int, category: Category) -> State:
    """The kernel side's report on one process with one GPU thread."""
    rows = np.zeros(1, kernel.PROCESS)
    rows["word"] = int(category)
    rows["slots"]["tid"][0, 0] = pid
    return State(np.array([pid]), rows, np.zeros(1, np.int64))


def samples_of(samples: Samples) -> list[Any]:
    """One sample of each traced process and of the threads that its GPU thread waits for."""
    keys = list(samples.gpu_thread_samples())
    for blocked in samples._count(keys):
        keys += samples.other_thread_samples(*blocked)
    return keys


def test_a_blocked_gpu_thread_is_sampled_with_the_thread_that_runs(job: int):
    keys = samples_of(Samples(lambda: state_of(job, Category.LOCK)))
    gpu, *others = keys
    assert (gpu.role, gpu.category) == (SampleRole.GPU, Category.LOCK)
    assert any("wait_for_batch" in frame for frame in gpu.words)
    running = [
        key for key in others if key.role == SampleRole.SAME_PROCESS and key.category == Category.ON_CPU
    ]
    assert any("spin" in frame for key in running for frame in key.words)


def test_a_thread_that_sleeps_while_it_holds_the_interpreter_lock_is_sampled_as_its_holder():
    with running(sys.executable, "sleeping_holder.py") as process:
        samples = Samples(lambda: state_of(process.pid, Category.LOCK))

        def holders() -> list[Any]:
            return [key for key in samples_of(samples) if key.object == INTERPRETER_LOCK]

        until(lambda: holders())
        (holder,) = holders()
    assert (holder.role, holder.category) == (SampleRole.SAME_PROCESS, Category.SLEEP)
    assert any("poll_device" in frame for frame in holder.words)


def test_a_running_gpu_thread_is_sampled_alone(job: int):
    (key,) = samples_of(Samples(lambda: state_of(job, Category.ON_CPU)))
    assert (key.role, key.category, key.object) == (SampleRole.GPU, Category.ON_CPU, "")


def test_other_threads_of_the_least_sampled_processes_come_first():
    samples, pids = Samples(lambda: state_of(1, Category.NONE)), []
    samples.other_thread_samples = lambda pid, tid, waker: pids.append(pid) or iter(())  # type: ignore[method-assign]
    blocked = [(pid, pid, 0) for pid in (7, 8, 9)]
    for _ in range(3):
        samples._sample_other_threads(blocked)
    assert {pid: pids.count(pid) for pid in (7, 8, 9)} == {7: 2, 8: 2, 9: 2}


def test_a_thread_that_is_still_in_the_same_wait_is_not_read_again(job: int):
    state = state_of(job, Category.LOCK)
    samples, n_read = Samples(lambda: state), 0
    read = samples._gpu_thread_sample

    def counted(*words: Any) -> Any:
        nonlocal n_read
        n_read += 1
        return read(*words)

    samples._gpu_thread_sample = counted  # type: ignore[method-assign]
    state.rows["slots"]["off_ns"][0, 0] = 5
    first, again = samples_of(samples)[0], samples_of(samples)[0]
    assert (n_read, again) == (1, first)
    state.rows["slots"]["off_ns"][0, 0] = 6
    assert (samples_of(samples)[0], n_read) == (first, 2)
