"""The present stacks of ranks that have made no call since the capture began, perhaps because they already hung.

    silent = SilentRanks(node, stacks, gpu_processes)
    examined = silent.examine(traced, now_ns)     # once a second; traced: the processes that have made a traced call

A process is examined if it has a GPU library, a rank set by its launcher, and no ancestor with a GPU library and the
same rank: a data loader's worker is left out, the child of a launcher's script is not. Its main thread and its Python
threads are examined; a few ms per process each time.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stallscope.capture.process.process_identity import identity, parent_pid, stat_fields
from stallscope.capture.stacks.native import stopped_thread
from stallscope.capture.stacks.sampler import Stacks
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category
from stallscope.events.syscalls import blocked_category

_SILENT_NS = 3 * 10**9
_INTERVAL_NS = 5 * 10**9
_LATER_INTERVAL_NS = 30 * 10**9
_N_FREQUENT_EXAMINATIONS = 6
"""A process without a traced call is first examined after this time, then at this interval, and less often after this
many examinations.
"""
_MAX_PROCESSES = 64
_MAX_ANCESTORS = 16


class ExaminedProcesses(NamedTuple):
    """The examined processes, and rows of SNAPSHOTS and POSITIONS."""

    pids: list[int]
    snapshots: Array
    positions: Array


@dataclass
class _WatchedProcess:
    next_ns: int
    n_examinations: int = 0


@dataclass
class SilentRanks:
    """node: this machine's number. gpu_processes: the processes that have a GPU library mapped."""

    node: int
    stacks: Stacks
    gpu_processes: Callable[[], Iterable[int]]
    proc: Path = Path("/proc")
    _watched: dict[int, _WatchedProcess] = field(default_factory=dict)

    def examine(self, traced: Collection[int], now_ns: int) -> ExaminedProcesses:
        """Examine the processes that are due."""
        on_gpu = frozenset(self.gpu_processes())
        pids = sorted(on_gpu.difference(traced))
        self._watched = {
            pid: self._watched.get(pid) or _WatchedProcess(now_ns + _SILENT_NS)
            for pid in pids[:_MAX_PROCESSES]
        }
        judged = [pid for pid, watched in self._watched.items() if now_ns >= watched.next_ns]
        for pid in judged:
            watched = self._watched[pid]
            watched.n_examinations += 1
            watched.next_ns = now_ns + (
                _INTERVAL_NS if watched.n_examinations < _N_FREQUENT_EXAMINATIONS else _LATER_INTERVAL_NS
            )
        due = [pid for pid in judged if self._is_rank(pid, on_gpu)]
        numbers = [(pid, tid, number) for pid in due for tid, number in self._current_stacks(pid).items()]
        positions = layout.empty(layout.POSITIONS, len(numbers))
        positions["ts_ns"], positions["node"] = now_ns, self.node
        for i, (pid, tid, number) in enumerate(numbers):
            positions[i]["pid"], positions[i]["tid"], positions[i]["stack"] = pid, tid, number
        return ExaminedProcesses(due, self._states(due, now_ns), positions)

    def _current_stacks(self, pid: int) -> dict[int, int]:
        return self.stacks.current_stacks(pid, [pid, *self.stacks.python_threads(pid)])

    def _states(self, pids: list[int], now_ns: int) -> Array:
        """The states of the main threads: the present system call and its category."""
        rows = layout.empty(layout.SNAPSHOTS, len(pids))
        rows["ts_ns"], rows["node"], rows["pid"], rows["alive"] = now_ns, self.node, pids, 1
        rows["syscall_nr"], rows["in_call_since_ns"] = UNKNOWN, UNKNOWN
        for row, pid in zip(rows, pids, strict=True):
            state = stat_fields(f"{self.proc}/{pid}")[:1]
            thread = stopped_thread(self.stacks.peek, pid, n_pieces=0) if self.stacks.peek else None
            if state in ([b"T"], [b"t"]):
                row["category"] = Category.STOPPED
            elif thread and thread.syscall_nr >= 0:
                row["syscall_nr"] = thread.syscall_nr
                interruptible = np.array([state == [b"S"]])
                row["category"] = blocked_category(
                    np.array([thread.syscall_nr]), is_interruptible=interruptible
                )[0]
            elif state == [b"R"]:
                row["category"] = Category.ON_CPU
        return rows

    def _is_rank(self, pid: int, on_gpu: Collection[int]) -> bool:
        """Whether the process is a rank, and not a worker below one, perhaps with a server of forks in between."""
        rank, ancestor = identity(pid, self.proc).rank, pid
        if rank == UNKNOWN:
            return False
        for _ in range(_MAX_ANCESTORS):
            ancestor = parent_pid(ancestor, self.proc)
            if not ancestor or identity(ancestor, self.proc).rank != rank:
                return True
            if ancestor in on_gpu:
                return False
        return True
