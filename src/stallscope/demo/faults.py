"""The faults of one rank of the job, and the functions that inject them.

A fault from inside runs in the rank's own loop before a step's forward pass. Another process injects a fault from
outside: see `outside.py`. The libraries are independent of the faults.
"""

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stallscope.demo.gpu import HOST_TO_DEVICE, Gpu
from stallscope.demo.plan import Plan

Disturb = Callable[[int], None]
"""Called with the number of the current step, if the fault is due in it."""

MIB = 1 << 20
SLEEP_S = 0.29
COMPUTE_S = 0.08
DISK_S = 0.12
LOCK_S = 0.15
ANSWER_S = 0.13
LOADER_S = 0.15
N_SYNCS = 500
N_ALLOCATIONS = 16
ALLOCATION_BYTES = 512 * MIB
COPY_BYTES = 192 * MIB
COLD_S = 0.15
COLD_STEPS = 7
DISK_FILE_BYTES = 64 * MIB
DISK_BLOCK_BYTES = 4 * MIB


class Fault(NamedTuple):
    """One entry. every_steps: the fault is due in each such step, 0 for once; cause: the correct diagnosis.

    n_steps: the number of steps after which the fault ends; 0: never.
    """

    meaning: str
    cause: str
    every_steps: int
    prepare: Callable[[Gpu, Plan], Disturb] | None = None
    is_outside: bool = False
    n_steps: int = 0


def is_due(fault: Fault, plan: Plan, step: int) -> bool:
    """Whether a fault from inside is due in this step."""
    if not fault.prepare or step < plan.first_step:
        return False
    if fault.n_steps and step >= plan.first_step + fault.n_steps:
        return False
    if not fault.every_steps:
        return step == plan.first_step
    return (step - plan.first_step) % fault.every_steps == 0


def _sleep(gpu: Gpu, plan: Plan) -> Disturb:
    return lambda step: time.sleep(SLEEP_S)


def burn(seconds: float) -> None:
    """Uses this much CPU time of the calling thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _compute(gpu: Gpu, plan: Plan) -> Disturb:
    return lambda step: burn(COMPUTE_S)


def _disk(gpu: Gpu, plan: Plan) -> Disturb:
    path = Path(plan.scratch) / f"stallscope-demo-{os.getpid()}"
    with path.open("wb") as file:
        for _ in range(DISK_FILE_BYTES // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
    read = _direct_reader(path) or _synced_writer(path)
    path.unlink()

    def disturb(step: int) -> None:
        end = time.monotonic() + DISK_S
        while time.monotonic() < end:
            read()

    return disturb


def _direct_reader(path: Path) -> Callable[[], object] | None:
    """Reads a block past the page cache; None if the file system refuses."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        block = mmap.mmap(-1, DISK_BLOCK_BYTES)
        os.preadv(descriptor, [block], 0)
        offsets = _around(DISK_FILE_BYTES // DISK_BLOCK_BYTES)
        return lambda: os.preadv(descriptor, [block], next(offsets) * DISK_BLOCK_BYTES)
    return None


def _synced_writer(path: Path) -> Callable[[], object]:
    descriptor = os.open(path, os.O_WRONLY)
    block = os.urandom(MIB)

    def write() -> None:
        os.pwrite(descriptor, block, 0)
        os.fsync(descriptor)

    return write


def _around(n: int) -> Iterator[int]:
    while True:
        yield from range(n)


def _lock(gpu: Gpu, plan: Plan) -> Disturb:
    """Another thread of the process holds the lock that the loop needs, and sleeps."""
    lock, asked, held = threading.Lock(), threading.Semaphore(0), threading.Semaphore(0)

    def hold() -> None:
        while asked.acquire():
            with lock:
                held.release()
                time.sleep(LOCK_S)

    threading.Thread(target=hold, daemon=True, name="lock-holder").start()

    def disturb(step: int) -> None:
        asked.release()
        held.acquire()
        with lock:
            pass

    return disturb


def _sync(gpu: Gpu, plan: Plan) -> Disturb:
    value = gpu.new("cudaMalloc", 8)

    def disturb(step: int) -> None:
        for _ in range(N_SYNCS):
            gpu.launch(5_000)
            gpu.item(value)

    return disturb


def _alloc(gpu: Gpu, plan: Plan) -> Disturb:
    def disturb(step: int) -> None:
        blocks = [gpu.new("cudaMalloc", ALLOCATION_BYTES) for _ in range(N_ALLOCATIONS)]
        for block in blocks:
            gpu.call("cudaFree", block)

    return disturb


def _copy(gpu: Gpu, plan: Plan) -> Disturb:
    source = ctypes.create_string_buffer(COPY_BYTES)
    ctypes.memset(source, 1, COPY_BYTES)
    target = gpu.new("cudaMalloc", COPY_BYTES)
    return lambda step: gpu.call("cudaMemcpy", target, source, COPY_BYTES, HOST_TO_DEVICE)


def _cold(gpu: Gpu, plan: Plan) -> Disturb:
    """The extra work of first steps with cold caches: loading code and allocating GPU memory."""

    def disturb(step: int) -> None:
        gpu.new("cudaMalloc", MIB)
        burn(COLD_S)

    return disturb


def _net(gpu: Gpu, plan: Plan) -> Disturb:
    connection = socket.create_connection(("127.0.0.1", plan.answer_port))

    def disturb(step: int) -> None:
        connection.sendall(b"?")
        connection.recv(1)

    return disturb


def _input(gpu: Gpu, plan: Plan) -> Disturb:
    return lambda step: None  # the loader itself is late: see job.load_batches


def _spin(gpu: Gpu, plan: Plan) -> Disturb:
    """A second thread of pure Python: each return to the interpreter waits for it, up to 5 ms."""

    def spin() -> None:
        while True:
            sum(range(1000))

    threads: list[threading.Thread] = []

    def disturb(step: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=spin, daemon=True, name="spinner"))
            threads[0].start()

    return disturb


def _hang(gpu: Gpu, plan: Plan) -> Disturb:
    def disturb(step: int) -> None:
        while True:
            time.sleep(3600)

    return disturb


FAULTS: dict[str, Fault] = {
    "healthy": Fault("nothing", "", 0),
    "sleep": Fault("sleeps 290 ms every 14 steps", "host_sleep", 14, _sleep),
    "compute": Fault("computes 80 ms more on the CPU every 9 steps", "host_compute", 9, _compute),
    "cpu-hog": Fault("shares its CPU with other programs", "cpu_preemption", 0, is_outside=True),
    "stop": Fault("is stopped for 300 ms every 1.1 to 1.9 s", "process_stopped", 0, is_outside=True),
    "disk": Fault("reads from disk for 120 ms every 7 steps", "block_io", 7, _disk),
    "lock": Fault("waits 150 ms for a lock every 8 steps", "lock_contention", 8, _lock),
    "sync": Fault("reads 500 values back from the GPU, one by one, each step", "excessive_sync", 1, _sync),
    "alloc": Fault("allocates and frees 16 x 512 MiB every 5 steps", "cuda_alloc", 5, _alloc),
    "copy": Fault("copies 192 MiB of pageable memory to the GPU each step", "host_device_copy", 1, _copy),
    "net": Fault("waits 130 ms for an answer over TCP every 10 steps", "network_wait", 10, _net),
    "gil": Fault("shares its interpreter lock with a busy thread", "gil", 1, _spin),
    "input": Fault("waits 150 ms for its data loader every 10 steps", "input_starvation", 10, _input),
    "cold": Fault(
        "has 150 ms more to do than the others in its first 7 steps", "", 1, _cold, n_steps=COLD_STEPS
    ),
    "gpu-steal": Fault("shares its GPU with another program", "gpu_shared", 0, is_outside=True),
    "hang": Fault("sleeps and never enters another collective", "missing_rank", 0, _hang),
}
