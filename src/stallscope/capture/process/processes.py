"""The traced processes, from their first appearance to their end.

A process is identified by its number and its start time, so a reused number is another process. The end is detected at
the next reading; a process whose main thread has ended while other threads run is still alive.
"""

import os
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stallscope.capture.process.communication_libraries import communication_libraries
from stallscope.capture.process.process_identity import Identity, environment, identity, stat_fields
from stallscope.capture.process.visible_devices import GpuNumbers
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array

_START_ERROR_S = 1.0
"""A first record cannot precede the start of its process by more: ticks, and the error of the clocks."""


_FIRST_EXAMINED_NS = 10**9
"""The libraries of a process are examined at its start, after a second, and each time its age has doubled."""


class Member(NamedTuple):
    """The position of a process in the largest communicator it has joined. rank: -1 if it holds several ranks."""

    nranks: int
    rank: int
    comm_hash: int


@dataclass
class _Libraries:
    names: tuple[str, ...]
    since_ns: int
    next_ns: int


@dataclass
class Processes:
    """The processes that are being traced. proc: where /proc is mounted."""

    node: int
    proc: Path = Path("/proc")
    gpus: GpuNumbers = field(default_factory=GpuNumbers)
    _running: dict[int, Identity] = field(default_factory=dict)
    _largest_communicator: dict[int, Member] = field(default_factory=dict)
    _own_ranks: dict[int, set[int]] = field(default_factory=dict)
    _environments: dict[int, dict[str, str]] = field(default_factory=dict)
    _libraries: dict[int, _Libraries] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._running)

    def pids(self) -> list[int]:
        """The pids of the traced processes."""
        return list(self._running)

    def add(self, first_ns: Mapping[int, int]) -> Array:
        """Add new processes. Returns their rows of PROCESSES; -1: unknown value.

        first_ns: time of the first event of each process, by pid.
        """
        self._environments = {
            pid: environment(self.proc / str(pid)) for pid in first_ns if pid not in self._running
        }
        new_processes = [
            identity(pid, self.proc, variables=variables, gpus=self.gpus)
            for pid, variables in self._environments.items()
        ]
        self._running.update((process.pid, process) for process in new_processes)
        rows = layout.empty(layout.PROCESSES, len(new_processes))
        rows["node"], rows["ts_ns"] = self.node, [first_ns[process.pid] for process in new_processes]
        for name in ("pid", "rank", "local_rank", "nranks", "device"):
            rows[name] = [getattr(process, name) for process in new_processes]
        rows["comm"] = [process.comm.encode()[:16] for process in new_processes]
        for row in rows:
            pid, now_ns = int(row["pid"]), int(row["ts_ns"])
            names = communication_libraries(self.proc / str(pid))
            self._libraries[pid] = _Libraries(names, now_ns, now_ns + _FIRST_EXAMINED_NS)
            row["libraries"] = ", ".join(names).encode()
        return rows

    def update_libraries(self, now_ns: int) -> list[tuple[int, str]]:
        """Examine the processes that are due. Returns the processes with new libraries, and all names of each."""
        changed = []
        for pid, known in self._libraries.items():
            if now_ns < known.next_ns:
                continue
            known.next_ns = now_ns + (now_ns - known.since_ns)
            names = communication_libraries(self.proc / str(pid))
            if set(names) - set(known.names):
                known.names = names
                changed.append((pid, ", ".join(names)))
        return changed

    def take_environment(self, pid: int) -> Mapping[str, str]:
        """The environment of a process of the last add(), returned once; empty for other processes."""
        return self._environments.pop(pid, {})

    def add_communicators(self, communicators: Array) -> None:
        """Remember the largest communicator of each process, usually its whole job, from rows of COMMUNICATORS."""
        is_job = (communicators["comm_rank"] >= 0) & (communicators["parent_hash"] == 0)
        for row in communicators[is_job & (communicators["nranks"] > 1)]:
            pid, joined = (
                int(row["pid"]),
                Member(*(int(row[name]) for name in ("nranks", "comm_rank", "comm_hash"))),
            )
            largest = self._largest_communicator.get(pid)
            if not largest or joined.nranks > largest.nranks:
                self._largest_communicator[pid], self._own_ranks[pid] = joined, {joined.rank}
            elif largest.comm_hash == joined.comm_hash:
                self._own_ranks[pid].add(joined.rank)
                if largest.rank != joined.rank:
                    self._largest_communicator[pid] = largest._replace(rank=UNKNOWN)

    def members(self) -> Collection[int]:
        """The processes that share a communicator with other processes."""
        return self._largest_communicator.keys()

    def n_members(self, pid: int) -> int:
        """At most this many processes share its largest communicator, with itself; 1 without a communicator."""
        member = self._largest_communicator.get(pid)
        return member.nranks - len(self._own_ranks[pid]) + 1 if member else 1

    def update_ranks(self) -> list[Identity]:
        """Set ranks from communicators where the launcher set none. Returns the changed processes."""
        identities = []
        for pid, member in self._largest_communicator.items():
            process = self._running.get(pid)
            if process is None or member.rank == UNKNOWN:
                continue
            ranks = (process.rank, process.nranks)
            may_change = process.rank == UNKNOWN or process.is_from_nccl
            if (
                may_change
                and ranks != (member.rank, member.nranks)
                and (process.nranks in (UNKNOWN, member.nranks) or process.is_from_nccl)
            ):
                self._running[pid] = replace(
                    process, rank=member.rank, nranks=member.nranks, is_from_nccl=True
                )
                identities.append(self._running[pid])
        return identities

    def update_devices(self, collectives: Array) -> list[Identity]:
        """Set the GPU of processes that can see several GPUs and use one. Returns the changed processes."""
        pids_without_device = [
            pid
            for pid, process in self._running.items()
            if process.device == UNKNOWN and not self._is_several_ranks(pid)
        ]
        if not pids_without_device:
            return []
        rows = collectives[np.isin(collectives["pid"], pids_without_device) & (collectives["device"] >= 0)]
        identities = []
        for pid in np.unique(rows["pid"]).tolist():
            devices = np.unique(rows["device"][rows["pid"] == pid])
            if len(devices) == 1:
                self._running[pid] = replace(self._running[pid], device=int(devices[0]))
                identities.append(self._running[pid])
        return identities

    def _is_several_ranks(self, pid: int) -> bool:
        member = self._largest_communicator.get(pid)
        return member is not None and member.rank == UNKNOWN

    def remove_ended(self, reported: Container[int] = ()) -> list[int]:
        """Forget the processes that have ended since the last reading, and return their pids.

        reported: processes whose end the kernel has reported, including those that became another program.
        """
        ended_pids = [
            pid
            for pid, process in self._running.items()
            if pid in reported or not _is_running(self.proc, process)
        ]
        for pid in ended_pids:
            del self._running[pid]
            self._largest_communicator.pop(pid, None)
            self._own_ranks.pop(pid, None)
            self._libraries.pop(pid, None)
        return ended_pids


@dataclass
class Snapshots:
    """The last snapshot of each process, so that its last row can mark its end."""

    _last: dict[int, Array] = field(default_factory=dict)

    def remember(self, rows: Array) -> Array:
        """Remember the rows of SNAPSHOTS (one per process), and return them."""
        self._last.update((int(row["pid"]), row.copy()) for row in rows)
        return rows

    def final_rows(self, pids: Iterable[int], now_ns: int) -> Array:
        """The last row of each process, marked as ended; then the processes are forgotten."""
        snapshots = [self._last.pop(pid) for pid in pids if pid in self._last]
        rows = np.array(snapshots, layout.dtype(layout.SNAPSHOTS))
        rows["ts_ns"], rows["alive"] = now_ns, 0
        return rows


def still_runs(pid: int, first_ns: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process that an earlier session saw at first_ns (monotonic) runs, and not another with its number.

    The start in /proc counts the time in which the machine was suspended (CLOCK_BOOTTIME), in ticks.
    """
    fields = stat_fields(f"{proc}/{pid}")
    if not fields:
        return False
    suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK") - suspended_s
    return started_s <= first_ns / 1e9 + _START_ERROR_S and _has_threads(fields)


def _is_running(proc: Path, process: Identity) -> bool:
    fields = stat_fields(f"{proc}/{process.pid}")
    if not fields or int(fields[19]) != process.started_ticks:
        return False
    return _has_threads(fields)


def _has_threads(fields: Sequence[bytes]) -> bool:
    """Whether a process has a running thread. fields: of its stat file."""
    return fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
