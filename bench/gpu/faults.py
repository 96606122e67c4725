"""The faults of one rank of the training job, and how each is injected.

A fault is given as NAME:RANK:EVERY:MS, the last parts left out for the defaults; "*" as rank moves it to
another rank each time. It strikes before a step's forward pass. "stop" is done to the process from outside
(see job.py), "input" by the rank's data loader.
"""

import gc
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

FIRST_STEP = 20
EVERY_RANK = -1
MIB = 1 << 20
DISK_BLOCK_BYTES = 4 * MIB
N_DISK_BLOCKS = 48
ALLOCATION_BYTES = 512 * MIB
ALLOCATION_MS = 18  # about what one cudaMalloc and cudaFree of that size take together
ITEM_MS = 0.02  # about what one .item() takes on an idle GPU
COPY_MIB_PER_MS = 6
GARBAGE_PER_MS = 8_000

Disturb = Callable[[], None]


class Kind(NamedTuple):
    """A fault by name: the right diagnosis, the default period and delay, and its preparation."""

    cause: str
    every: int
    delay_ms: float
    prepare: Callable[[str, float], Disturb] | None = None


@dataclass(frozen=True)
class Fault:
    """One fault of a job. rank: EVERY_RANK moves it on each time. every: steps; 1 is each step."""

    name: str
    rank: int
    every: int
    delay_ms: float

    @property
    def kind(self) -> Kind:
        """The fault with this name."""
        return KINDS[self.name]

    def is_due(self, rank: int, step: int, *, n_ranks: int) -> bool:
        """Whether it strikes this rank in this step."""
        if step < FIRST_STEP or (step - FIRST_STEP) % self.every:
            return False
        return rank == (self.rank if self.rank >= 0 else (step - FIRST_STEP) // self.every % n_ranks)


def parsed(text: str) -> Fault:
    """A fault from NAME:RANK:EVERY:MS. Raises ValueError, KeyError."""
    name, rank, every, delay_ms = (*text.split(":"), "", "", "")[:4]
    kind = KINDS[name]
    number = EVERY_RANK if rank == "*" else int(rank or 2)
    return Fault(name, number, int(every or kind.every), float(delay_ms or kind.delay_ms))


def placed(chosen: Sequence[Fault], n_ranks: int) -> list[Fault]:
    """The faults in ranks that are there: rank 3 of 2 is rank 1."""
    return [replace(fault, rank=fault.rank % n_ranks if fault.rank >= 0 else fault.rank) for fault in chosen]


def _sleep(device: str, delay_ms: float) -> Disturb:
    return lambda: time.sleep(delay_ms / 1e3)


def _garbage(device: str, delay_ms: float) -> Disturb:
    """A collection of the Python heap, which looks at each of many objects."""
    objects = [[i] for i in range(int(delay_ms * GARBAGE_PER_MS))]

    def collect() -> None:
        gc.collect()
        objects[0][0] += 1

    return collect


def _allocate(device: str, delay_ms: float) -> Disturb:
    import torch

    n = max(1, round(delay_ms / ALLOCATION_MS))

    def churn() -> None:
        blocks = [torch.empty(ALLOCATION_BYTES, dtype=torch.uint8, device=device) for _ in range(n)]
        del blocks
        if device == "cuda":
            torch.cuda.empty_cache()

    return churn


def _lock(device: str, delay_ms: float) -> Disturb:
    """Another thread of the process holds the lock that the loop needs, and sleeps."""
    lock, asked, held = threading.Lock(), threading.Semaphore(0), threading.Semaphore(0)

    def hold() -> None:
        while asked.acquire():
            with lock:
                held.release()
                time.sleep(delay_ms / 1e3)

    threading.Thread(target=hold, daemon=True, name="lock-holder").start()

    def wait() -> None:
        asked.release()
        held.acquire()
        with lock:
            pass

    return wait


def _items(device: str, delay_ms: float) -> Disturb:
    import torch

    value, n = torch.zeros(8, device=device), round(delay_ms / ITEM_MS)

    def read_back() -> None:
        for _ in range(n):
            value[0].item()

    return read_back


def _copy(device: str, delay_ms: float) -> Disturb:
    import torch

    source = torch.ones(int(delay_ms * COPY_MIB_PER_MS) * MIB, dtype=torch.uint8)
    target = torch.empty_like(source, device=device)

    def send() -> None:
        target.copy_(source)

    return send


def _hang(device: str, delay_ms: float) -> Disturb:
    def forever() -> None:
        while True:
            time.sleep(3600)

    return forever


def _interpreter(device: str, delay_ms: float) -> Disturb:
    """A second thread of pure Python from the first time on: each return to the interpreter waits for it."""

    def spin() -> None:
        while True:
            sum(i * i for i in range(20_000))

    threads: list[threading.Thread] = []

    def begin() -> None:
        if not threads:
            threads.append(threading.Thread(target=spin, daemon=True, name="spinner"))
            threads[0].start()

    return begin


def _disk(device: str, delay_ms: float) -> Disturb:
    read = _reader()

    def go_on() -> None:
        end_s = time.monotonic() + delay_ms / 1e3
        while time.monotonic() < end_s:
            read()

    return go_on


def _reader() -> Callable[[], object]:
    """Reads the next block past the page cache; writes and syncs where the file system has no O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        data = os.urandom(DISK_BLOCK_BYTES)
        for _ in range(N_DISK_BLOCKS):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        writable = os.dup(file.fileno())
        try:
            direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            direct = -1
    offsets = _around(N_DISK_BLOCKS)
    if direct >= 0:
        block = mmap.mmap(-1, DISK_BLOCK_BYTES)
        return lambda: os.preadv(direct, [block], next(offsets) * DISK_BLOCK_BYTES)

    def write() -> None:
        os.pwrite(writable, data, next(offsets) * DISK_BLOCK_BYTES)
        os.fsync(writable)

    return write


def _around(n: int) -> Iterator[int]:
    while True:
        yield from range(n)


KINDS = {
    "sleep": Kind("host_sleep", 14, 290, _sleep),
    "alloc": Kind("cuda_alloc", 5, 290, _allocate),
    "lock": Kind("lock_contention", 8, 150, _lock),
    "sync": Kind("excessive_sync", 1, 10, _items),
    "copy": Kind("host_device_copy", 1, 40, _copy),
    "compute": Kind("host_compute", 10, 120, _garbage),
    "disk": Kind("block_io", 7, 120, _disk),
    "gil": Kind("lock_contention", 1, 0, _interpreter),
    "input": Kind("input_starvation", 10, 200),
    "stop": Kind("process_stopped", 1, 300),
    "hang": Kind("missing_rank", 1 << 40, 0, _hang),
}


def items(fault: Fault | None) -> Iterator["np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    """Batches for a data loader, each the number of its step; slow where the fault is due."""
    step = 0
    while True:
        if fault and fault.is_due(fault.rank, step, n_ranks=1):
            time.sleep(fault.delay_ms / 1e3)
        yield np.full(64, step, np.float32)
        step += 1
