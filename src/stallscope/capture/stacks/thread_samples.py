"""Samples of the code locations of traced processes: the GPU thread, and the threads that it waits for.

    samples = Samples(probes.processes, peek=probes.peek)
    samples.start()
    rows = samples.take_rows(node, now_ns, number)  # once a second; number(pid, frames) gives the number of a stack

A process is sampled up to twenty times a second from outside: its memory is read, and it does not stop. The most active
GPU thread is sampled each time. While it is blocked, its process's threads that run Python or woke it last are also
sampled, and child processes such as data-loader workers: their share of the sampler's time is limited, so that samples
of a blocked GPU thread come as often as samples of a running one. The sampler keeps its own CPU time below 2 % of a
core: with many processes samples come less often. A thread that is still in the wait of its last sample is not read
again. A thread that runs is read once, so its frames may mix two moments some microseconds apart.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stallscope.capture.probes.program import State, states_of_slots
from stallscope.capture.process.process_identity import small_file, stat_fields
from stallscope.capture.process.wait_objects import BlockedCall, WaitObjects
from stallscope.capture.stacks.code_map import Files, MappedCode
from stallscope.capture.stacks.codes import Codes
from stallscope.capture.stacks.frames import (
    InvalidFrames,
    frames_once,
    interpreter_lock_holder,
    thread_states,
    threads_of,
)
from stallscope.capture.stacks.interpreter import Interpreter, interpreter_in
from stallscope.capture.stacks.layouts import UnknownLayout
from stallscope.capture.stacks.memory import Memory, Unreadable
from stallscope.capture.stacks.peek_abi import Peek
from stallscope.capture.stacks.stack_target import Target
from stallscope.errors import CannotTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, SampleRole
from stallscope.events.syscalls import blocked_category

EVERY_S = 0.05
COST_SHARE = 0.01
"""Share of one core that samples of the GPU threads may cost, and also the samples of the threads they wait for."""

MANY_FAULTS_PER_S = 20_000  # of CPU time
_IN_KERNEL = 0.5
"""With this many page faults and this share of its CPU time in the kernel, a thread on the CPU is in page faults: each
costs 1 to 10 us, including clearing the page.
"""

_MIN_TICKS = 3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

INTERPRETER_LOCK = "holds the interpreter lock"
"""The object of a sample of a thread that holds Python's interpreter lock, while it runs or waits."""

LEFT = -2
"""System call of a sample whose thread left its wait before the call could be read; -1 is a page fault."""

_MAX_FRAMES = 48
_MAX_CHILDREN = 2  # at a time; the next children with the next sample
_MAX_THREADS = 4
_LIST_EVERY_NS = 10**9
_LIST_NEW_EVERY_NS = 10**8
_MAX_OTHERS_S = 1.0
_MAX_BLOCKED = (
    2  # processes at a time whose other threads are sampled; the least sampled processes come first
)
_BLOCKED = frozenset(
    (
        Category.LOCK,
        Category.OTHER_OFF,
        Category.SLEEP,
        Category.NET,
        Category.CHILD,
        Category.IO,
        Category.DRIVER,
    )
)

_CATEGORY_OF_STATE = {b"T": Category.STOPPED, b"t": Category.STOPPED, b"D": Category.IO}

Words = tuple[str, ...]


class _Key(NamedTuple):
    pid: int
    role: int
    owner_pid: int
    tid: int
    category: int
    nr: int
    object: str
    words: Words


class _Wait(NamedTuple):
    """A thread that has been off the CPU since a moment: its stack stays the same."""

    tid: int
    category: int
    off_ns: int


class _FaultRate(NamedTuple):
    """The page faults and CPU ticks of a thread so far; whether the rate of faults was high before."""

    n_faults: int
    user_ticks: int
    kernel_ticks: int
    is_high: bool = False


@dataclass
class _SampledProcess:
    """A process whose threads are sampled. by_own: its threads by their number in its own pid namespace."""

    target: Target
    by_own: dict[int, int] = field(default_factory=dict)
    by_tid: dict[int, int] = field(default_factory=dict)
    listed_ns: int = 0

    def python_states(self, now_ns: int, proc: Path, tid: int = 0) -> dict[int, int]:
        """The address of the Python state by thread, listed once a second: between the kernel's report of a thread's
        state and the reading of its stack there is then little time. Raises Unreadable.

        tid: a thread that is wanted. Servers with a thread for each connection have many new threads.
        """
        if self.target.python is None:
            return {}
        is_new = bool(tid) and tid not in self.by_tid
        if now_ns - self.listed_ns > (_LIST_NEW_EVERY_NS if is_new else _LIST_EVERY_NS):
            self.by_own = threads_of(self.target.pid, proc, self.by_own)
            self.by_tid = thread_states(self.target.memory, self.target.python, self.by_own)
            self.listed_ns = now_ns
        return self.by_tid

    def words(self, state: int) -> Words:
        """The Python frames of a thread, innermost first; empty if they are not valid."""
        target = self.target
        if target.python is None or target.codes is None:
            return ()
        try:
            stack = frames_once(target.memory, target.python, state)[:_MAX_FRAMES]
            return tuple(str(target.codes.name_frame(frame)) for frame in stack)
        except (InvalidFrames, Unreadable):
            return ()


class Samples:
    """processes: Program.processes. peek: Program.peek, for native frames of processes that do not run Python.

    is_complete: whether the states of threads are known; otherwise nothing is sampled.
    """

    def __init__(
        self,
        processes: Callable[[], State],
        *,
        peek: Peek | None = None,
        is_complete: Callable[[], bool] = lambda: True,
        proc: Path = Path("/proc"),
    ):
        self._is_complete = is_complete
        self._processes, self._peek, self._proc = processes, peek, proc
        self._counts: Counter[_Key] = Counter()
        self._names: dict[int, bytes] = {}
        self._sampled_processes: dict[int, _SampledProcess | None] = {}
        self._objects = WaitObjects(time.monotonic_ns, proc)
        self._files = Files()
        self._turn = 0
        self._faults: dict[int, _FaultRate] = {}
        self._wakers: dict[int, int] = {}
        self._waits: dict[int, tuple[_Wait, _Key]] = {}
        self._n_others: Counter[int] = Counter()
        self._others_due_s = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def take_rows(self, node: int, now_ns: int, number: Callable[[int, Words], int]) -> Array:
        """Rows of SAMPLES since the last call. number: returns the number of a stack."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        rows = layout.empty(layout.SAMPLES, len(counts))
        for row, (key, n) in zip(rows, counts.items(), strict=True):
            row["pid"], row["role"], row["owner_pid"], row["tid"] = key[:4]
            row["category"], row["syscall_nr"], row["object"] = (
                key.category,
                key.nr,
                key.object.encode()[:160],
            )
            row["owner_comm"] = self._names.get(key.owner_pid, b"")
            row["stack"], row["n"] = number(key.pid, key.words) if key.words else UNKNOWN, n
        rows["ts_ns"], rows["node"] = now_ns, node
        return rows

    def _run(self) -> None:
        pause_s, last_cost_s = EVERY_S, 0.0
        while not self._stop.wait(pause_s):
            if not self._is_complete():
                continue
            begin_s = time.thread_time()
            try:
                blocked = self._count(self.gpu_thread_samples())
                cost_s = time.thread_time() - begin_s
                if time.monotonic() >= self._others_due_s:
                    self._sample_other_threads(blocked)
                    others_s = time.thread_time() - begin_s - cost_s
                    self._others_due_s = time.monotonic() + min(others_s / COST_SHARE, _MAX_OTHERS_S)
            except CannotTrace:
                return
            # The first sample of a process costs more than the next ones: it reads the libraries of the process.
            pause_s = max(EVERY_S, min(cost_s, last_cost_s) / COST_SHARE)
            last_cost_s = cost_s

    def _sample_other_threads(self, blocked: list[tuple[int, int, int]]) -> None:
        """Sample the threads that some blocked GPU threads wait for."""
        for pid, tid, waker_tid in sorted(blocked, key=lambda sample: self._n_others[sample[0]])[
            :_MAX_BLOCKED
        ]:
            self._n_others[pid] += 1
            self._count(self.other_thread_samples(pid, tid, waker_tid))

    def _count(self, keys: Iterable[_Key]) -> list[tuple[int, int, int]]:
        """Count samples. Returns process, thread and last waker of each sample of a blocked GPU thread."""
        keys = list(keys)
        with self._lock:
            self._counts.update(keys)
        return [(key.pid, key.tid, self._wakers.get(key.tid, 0)) for key in keys if key.category in _BLOCKED]

    def gpu_thread_samples(self) -> Iterator[_Key]:
        """One sample of the most active GPU thread of each traced process."""
        state, now_ns = self._processes(), time.monotonic_ns()
        self._turn += 1
        alive = set(state.pids.tolist())
        if self._turn % 64 == 0:
            self._sampled_processes = {
                pid: process
                for pid, process in self._sampled_processes.items()
                if (self._proc / str(pid)).exists()
            }
            self._waits = {pid: wait for pid, wait in self._waits.items() if pid in alive}
        rows = zip(state.pids.tolist(), state.rows, states_of_slots(state.rows), strict=True)
        for pid, row, by_slot in rows:
            slot = row["slots"][int(by_slot.argmax())]
            category, tid = int(by_slot.max()), int(slot["tid"])
            if category and tid and pid in alive:
                self._wakers[tid] = int(slot["waker_tid"])
                wait = _Wait(tid, category, int(slot["off_ns"]))
                if wait.off_ns and self._waits.get(pid, (None,))[0] == wait:
                    yield self._waits[pid][1]
                    continue
                key = self._gpu_thread_sample(pid, tid, category, now_ns)
                if category in _BLOCKED and key.nr != LEFT:
                    self._waits[pid] = wait, key
                yield key

    def _gpu_thread_sample(self, pid: int, tid: int, category: int, now_ns: int) -> _Key:
        """The stack is read first, so that it belongs to the state that the kernel reported."""
        process, by_tid = self._python(pid, now_ns, tid)
        words = self._words(process, tid, by_tid)
        blocked = None
        if category in _BLOCKED:
            blocked = self._objects.blocked_call(
                pid, tid, process.target.memory if process else None
            ) or BlockedCall(LEFT, "")
        elif category in (Category.ON_CPU, Category.PREEMPTED) and self._is_in_faults(pid, tid):
            blocked = BlockedCall(UNKNOWN, "page faults of new memory")
        return self._key(pid, SampleRole.GPU, pid, tid, category, blocked, words)

    def _python(self, pid: int, now_ns: int, tid: int = 0) -> tuple[_SampledProcess | None, dict[int, int]]:
        """The sampled process, and the addresses of its Python thread states by thread. tid: a wanted thread."""
        process = self._sampled_process(pid)
        try:
            return process, process.python_states(now_ns, self._proc, tid) if process else {}
        except Unreadable:
            return process, {}

    def other_thread_samples(self, pid: int, tid: int, waker_tid: int) -> Iterator[_Key]:
        """Samples of the threads and child processes that a blocked GPU thread may wait for."""
        now_ns = time.monotonic_ns()
        process, by_tid = self._python(pid, now_ns)
        other_tids = [other_tid for other_tid in by_tid if other_tid != tid][:64]
        holder = _lock_holder(process, by_tid)
        sampled_tids = [holder] if holder and holder != tid else []
        sampled_tids += [
            other_tid
            for other_tid in other_tids
            if other_tid != holder and self._state(pid, other_tid) == b"R"
        ][:_MAX_THREADS]
        if not sampled_tids:
            sampled_tids = (
                [waker_tid] if waker_tid in by_tid and waker_tid != tid else other_tids[:_MAX_CHILDREN]
            )
        for other_tid in sampled_tids:
            blocked_on = self._objects.blocked_call(
                pid, other_tid, process.target.memory if process else None
            )
            category, words = _category(blocked_on), self._words(process, other_tid, by_tid)
            if other_tid == holder:
                blocked_on = BlockedCall(blocked_on.nr if blocked_on else UNKNOWN, INTERPRETER_LOCK)
            yield self._key(pid, SampleRole.SAME_PROCESS, pid, other_tid, category, blocked_on, words)
        yield from self._child_samples(pid, by_tid, now_ns)

    def _child_samples(self, pid: int, tids: Iterable[int], now_ns: int) -> Iterator[_Key]:
        children = self._objects.workers(pid, (tid for tid in tids if tid != pid))
        first = self._turn * _MAX_CHILDREN % max(len(children), 1)
        for child in (children + children)[first : first + min(_MAX_CHILDREN, len(children))]:
            process, by_tid = self._python(child, now_ns)
            blocked_on = self._objects.blocked_call(child, child, process.target.memory if process else None)
            letter = self._state(child, child)
            if letter in (b"", b"Z", b"X"):
                continue
            category = _CATEGORY_OF_STATE.get(letter) or _category(blocked_on)
            yield self._key(
                pid, SampleRole.CHILD, child, child, category, blocked_on, self._words(process, child, by_tid)
            )

    def _words(self, process: _SampledProcess | None, tid: int, by_tid: dict[int, int]) -> Words:
        if process is None:
            return ()
        if tid in by_tid:
            return process.words(by_tid[tid])
        if process.target.python is not None or self._peek is None:
            return ()
        try:
            stacks = process.target.current_stacks([tid], peek=self._peek, proc=self._proc)
        except Unreadable:
            return ()
        return stacks.get(tid, ())[:_MAX_FRAMES]

    def _key(
        self,
        pid: int,
        role: int,
        owner: int,
        tid: int,
        category: int,
        blocked: BlockedCall | None,
        words: Words,
    ) -> _Key:
        if owner not in self._names:
            self._names[owner] = small_file(f"{self._proc}/{owner}/comm").rstrip(b"\n")[:16]
        nr, name = blocked or (UNKNOWN, "")
        return _Key(pid, int(role), owner, tid, int(category), nr, name, words)

    def _is_in_faults(self, pid: int, tid: int) -> bool:
        """Whether a thread spends its CPU time mostly in page faults. They do not block it.

        Judged over at least _MIN_TICKS of its CPU time: a thread that competes for its CPU runs seldom.
        """
        fields = stat_fields(f"{self._proc}/{pid}/task/{tid}")
        if len(fields) < 13:
            return False
        now = int(fields[7]), int(fields[11]), int(fields[12])
        since = self._faults.setdefault(tid, _FaultRate(*now))
        n_faults, in_user, in_kernel = (a - b for a, b in zip(now, since[:3], strict=True))
        if in_user + in_kernel < _MIN_TICKS:
            return since.is_high
        per_s = n_faults / (in_user + in_kernel) * _TICKS_PER_S
        is_high = per_s >= MANY_FAULTS_PER_S and in_kernel >= _IN_KERNEL * (in_user + in_kernel)
        self._faults[tid] = _FaultRate(*now, is_high)
        return is_high

    def _state(self, pid: int, tid: int) -> bytes:
        """The kernel's letter for the state of a thread."""
        fields = stat_fields(f"{self._proc}/{pid}/task/{tid}")
        return fields[0] if fields else b""

    def _sampled_process(self, pid: int) -> _SampledProcess | None:
        if pid not in self._sampled_processes:
            self._sampled_processes[pid] = self._open_process(pid)
        return self._sampled_processes[pid]

    def _open_process(self, pid: int) -> _SampledProcess | None:
        memory, code = Memory(pid, self._peek), MappedCode(pid, self._files, self._proc)
        python: Interpreter | None
        try:
            python = interpreter_in(pid, self._proc)
        except UnknownLayout:
            return None
        return _SampledProcess(Target(pid, memory, code, python, Codes(memory, python) if python else None))


def _lock_holder(process: _SampledProcess | None, by_tid: dict[int, int]) -> int:
    """The thread that holds the interpreter lock of a process; 0 if there is none, or if it is not known."""
    if process is None or process.target.python is None:
        return 0
    try:
        holder = interpreter_lock_holder(process.target.memory, process.target.python)
    except Unreadable:
        return 0
    return next((tid for tid, state in by_tid.items() if state == holder), 0)


def _category(blocked: BlockedCall | None) -> Category:
    """The category of a thread that is not a GPU thread, by its system call."""
    if blocked is None:
        return Category.ON_CPU
    if blocked.object and not blocked.object.startswith(
        ("pipe", "full pipe", "connection", "a Unix", "lock", "end")
    ):
        return Category.IO
    return Category(int(blocked_category(np.array([blocked.nr]), is_interruptible=np.array([True]))[0]))
