"""Stacks of the traced processes: stacks of events, by number in the trace, and present stacks of hanging threads.

    stacks = Stacks(node, keep, report, walk)         # keep(pid, frames) stores a stack and returns its number
    stacks.follow(pids)                               # the kernel walks their stacks from now on: walk(pid, row)
    stacks.take(probes.natives.drain(), probes.stacks.drain())   # the stacks that it has walked
    numbers = stacks.numbers(calls["stack"])          # of the events that refer to them
    rows = stacks.silent_positions(probes.processes(), now, members=joined)  # once a second: rows of POSITIONS

A process is examined from outside if it has made no collective for some seconds, or none since it joined others: its
main thread and its GPU threads. That costs a few ms per process and examination, and nothing while the job makes
progress.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stallscope.capture.probes.program import State
from stallscope.capture.stacks.code_map import Files, MappedCode
from stallscope.capture.stacks.codes import Codes
from stallscope.capture.stacks.frames import InvalidFrames
from stallscope.capture.stacks.interpreter import interpreter_in
from stallscope.capture.stacks.layouts import UnknownLayout
from stallscope.capture.stacks.memory import Memory, Unreadable
from stallscope.capture.stacks.native import shape, thread_from_copy
from stallscope.capture.stacks.peek_abi import Peek
from stallscope.capture.stacks.stack_target import CUT, Target, Words
from stallscope.capture.stacks.walker_abi import python_row, words
from stallscope.events import kernel, layout
from stallscope.events.layout import UNKNOWN, Array

SILENT_NS = 2 * 10**9
"""A process without a collective for this long is examined ..."""
_BACKOFF_FACTOR = 2
_MAX_INTERVAL_NS = 30 * 10**9
"""... and examined again after twice the time each, at most this long."""

_MAX_HASHES = 1 << 17
_MAX_WALKS = 100
"""Native stacks at a time, 0.5 ms each; a stack beyond this limit comes again with a later event."""
_MAX_THREADS = 64
Keep = Callable[[int, Words], int]


@dataclass
class _Silence:
    """The progress of a process, the time since its last progress, and the time of the next examination."""

    n_collectives: int
    since_ns: int
    next_ns: int


@dataclass
class Stacks:
    """node: this machine's number. keep: stores a stack. report: shows each reason for missing stacks, once.

    walk: lets the kernel walk the stacks of a process, by a row of kernel.PYTHON. peek: Program.peek; without it
    hanging threads have no native frames. register_shape: Program.know_native.
    """

    node: int
    keep: Keep
    report: Callable[[str], None]
    walk: Callable[[int, Array], None]
    peek: Peek | None = None
    register_shape: Callable[[int, Array | None], None] = lambda _stack, _shape: None
    proc: Path = Path("/proc")
    _numbers: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)
    _silent: dict[int, _Silence] = field(default_factory=dict)
    _targets: dict[int, Target | None] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)
    _by_hash: dict[int, int] = field(default_factory=dict)
    _words: dict[int, Words] = field(default_factory=dict)
    _files: Files = field(default_factory=Files)

    def follow(self, pids: Iterable[int]) -> None:
        """Let the kernel walk the stacks of these processes; cheap for processes that are already known."""
        for pid in pids:
            if pid not in self._targets and (target := self.target(pid)):
                self.walk(pid, python_row(target.python) if target.python else np.zeros(1, kernel.PYTHON))

    def take(self, natives: Array, walked: Array) -> None:
        """Name the stacks that the kernel has walked: rows of kernel.NATIVE, drained first, and of kernel.STACK."""
        for row in walked:
            target = self._targets.get(int(row["pid"]))
            if target is None or target.codes is None or target.python is None:
                continue
            try:
                frame_names = words(row, target.codes, target.python.layout)
            except (InvalidFrames, Unreadable):
                continue
            frame_names += (CUT,) * bool(row["is_cut"])
            self._keep_hash(int(row["hash"]), int(row["pid"]), frame_names)
        for row in natives[:_MAX_WALKS]:
            self._take_native(row)
        for row in natives[_MAX_WALKS:]:
            self.register_shape(int(row["hash"]), None)

    def _take_native(self, row: Array) -> None:
        """Walk the copy of a stack, and let the kernel recognise the stack."""
        pid, stack = int(row["pid"]), int(row["hash"])
        target = self._targets.get(pid)
        if target is None:
            return
        python = self._words.get(self._by_hash.get(int(row["python"]), UNKNOWN), ())
        calls = target.calls(thread_from_copy(row), has_python=bool(python))
        self._keep_hash(stack, pid, target.names(calls, python))
        self.register_shape(stack, shape(row, calls))

    def _keep_hash(self, stack: int, pid: int, words: Words) -> None:
        if len(self._by_hash) >= _MAX_HASHES:
            self._by_hash.clear()
        self._by_hash[stack] = self.number(pid, words)

    def numbers(self, hashes: Array) -> Array:
        """The numbers of stacks by their hashes in events (int64); UNKNOWN for stacks that have no names."""
        mask = (1 << 64) - 1
        return np.array([self._by_hash.get(stack & mask, UNKNOWN) for stack in hashes.tolist()], np.int64)

    def silent_positions(self, state: State, now_ns: int, *, members: Container[int] = ()) -> Array:
        """Rows of POSITIONS for the threads of processes that have long made no collective.

        members: processes that share a communicator with others and may wait for their first collective.
        """
        pids = state.pids.tolist()
        alive = set(pids)
        self._silent = {pid: silence for pid, silence in self._silent.items() if pid in alive}
        self._targets = {pid: target for pid, target in self._targets.items() if pid in alive}
        positions: list[tuple[int, int, int, int, int]] = []
        for pid, row in zip(pids, state.rows, strict=True):
            n_collectives = int(row["n_collectives"])
            if self._is_due(pid, n_collectives, now_ns) and (n_collectives or pid in members):
                tids = [pid, *(tid for tid in row["slots"]["tid"].tolist() if tid not in (0, pid))]
                positions += [
                    (now_ns, self.node, pid, tid, number)
                    for tid, number in self.current_stacks(pid, tids).items()
                ]
        return _rows(positions)

    def all_thread_positions(self, pid: int, now_ns: int) -> Array:
        """Rows of POSITIONS for the Python threads of a process, or for its main thread without Python."""
        tids = self.python_threads(pid)[:_MAX_THREADS] or [pid]
        stacks = self.current_stacks(pid, tids)
        return _rows([(now_ns, self.node, pid, tid, number) for tid, number in stacks.items()])

    def current_stacks(self, pid: int, tids: list[int]) -> dict[int, int]:
        """The present stacks of these threads of a process: numbers of stacks by thread, where they are known."""
        target = self.target(pid)
        if target is None:
            return {}
        try:
            stacks = target.current_stacks(tids, peek=self.peek, proc=self.proc)
        except Unreadable as error:
            self._note(f"no stacks of process {pid}: its memory cannot be read ({error})")
            return {}
        return {tid: self.number(pid, words) for tid, words in stacks.items()}

    def python_threads(self, pid: int) -> list[int]:
        """The threads of a process that Python knows; empty where that is unknown."""
        target = self.target(pid)
        try:
            return target.python_threads(self.proc) if target else []
        except Unreadable:
            return []

    def number(self, pid: int, words: Words) -> int:
        """The number of a stack of a process, stored when it is new."""
        key = pid, words
        if key not in self._numbers:
            if len(self._numbers) >= 65536:
                self._numbers.clear()
                self._words.clear()
            self._numbers[key] = self.keep(pid, words)
            self._words[self._numbers[key]] = words
        return self._numbers[key]

    def target(self, pid: int) -> Target | None:
        """The interpreter and code of a process, read at the first request; None if its stacks cannot be read."""
        if pid not in self._targets:
            self._targets[pid] = self._open_target(pid)
        return self._targets[pid]

    def forget(self, pid: int) -> None:
        """The process has ended, or become another program."""
        self._silent.pop(pid, None)
        self._targets.pop(pid, None)
        self._numbers = {key: number for key, number in self._numbers.items() if key[0] != pid}
        self._words = {number: words for (_, words), number in self._numbers.items()}

    def _open_target(self, pid: int) -> Target | None:
        memory, code = Memory(pid, self.peek), MappedCode(pid, self._files, self.proc)
        try:
            python = interpreter_in(pid, self.proc)
        except UnknownLayout as error:
            self._note(f"no Python stacks of process {pid}: {error}")
            python = None
        return Target(pid, memory, code, python, Codes(memory, python) if python else None)

    def _is_due(self, pid: int, n_collectives: int, now_ns: int) -> bool:
        silence = self._silent.get(pid)
        if silence is None or silence.n_collectives != n_collectives:
            self._silent[pid] = _Silence(n_collectives, now_ns, now_ns + SILENT_NS)
            return False
        if now_ns < silence.next_ns:
            return False
        interval_ns = min(_BACKOFF_FACTOR * (now_ns - silence.since_ns), _MAX_INTERVAL_NS)
        silence.next_ns = now_ns + interval_ns
        return True

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.report(text)


def _rows(positions: list[tuple[int, int, int, int, int]]) -> Array:
    rows = layout.empty(layout.POSITIONS, len(positions))
    for i, position in enumerate(positions):
        rows[i] = position
    return rows
