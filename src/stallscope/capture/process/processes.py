"""The traced processes, from their first appearance to their end.

A process is identified by its number and its start time, so a reused number is another process. The end is noticed in
the next reading; a process whose main thread has ended while other threads run is still alive.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stallscope.capture.gpu.visible_devices import GpuNumbers
from stallscope.capture.process.process_identity import Identity, environment, identity, small_file
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array


class Member(NamedTuple):
    """The position of a process in the largest communicator it has joined. rank: -1 if it holds several ranks."""

    nranks: int
    rank: int
    comm_hash: int


@dataclass
class Processes:
    """The processes that are being traced. proc: where /proc is mounted."""

    node: int
    proc: Path = Path("/proc")
    gpus: GpuNumbers = field(default_factory=GpuNumbers)
    _running: dict[int, Identity] = field(default_factory=dict)
    _member: dict[int, Member] = field(default_factory=dict)
    _started_with: dict[int, dict[str, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._running)

    def pids(self) -> list[int]:
        """Their numbers."""
        return list(self._running)

    def first_seen(self, first_ns: Mapping[int, int]) -> Array:
        """Rows of PROCESSES for processes that were not known yet; -1 for unknown values.

        first_ns: time of the first event of each process, by its number.
        """
        self._started_with = {
            pid: environment(self.proc / str(pid)) for pid in first_ns if pid not in self._running
        }
        new = [
            identity(pid, self.proc, variables=variables, gpus=self.gpus)
            for pid, variables in self._started_with.items()
        ]
        self._running.update((each.pid, each) for each in new)
        rows = layout.empty(layout.PROCESSES, len(new))
        rows["node"], rows["ts_ns"] = self.node, [first_ns[each.pid] for each in new]
        for name in ("pid", "rank", "local_rank", "nranks", "device"):
            rows[name] = [getattr(each, name) for each in new]
        rows["comm"] = [each.comm.encode()[:16] for each in new]
        return rows

    def started_with(self, pid: int) -> Mapping[str, str]:
        """The environment of a process of the last first_seen(), returned once; empty for others."""
        return self._started_with.pop(pid, {})

    def joined(self, communicators: Array) -> None:
        """Remember rows of COMMUNICATORS: the largest communicator of a process is, as a rule, its whole job."""
        is_whole = (communicators["comm_rank"] >= 0) & (communicators["parent_hash"] == 0)
        for row in communicators[is_whole & (communicators["nranks"] > 1)]:
            pid, new = (
                int(row["pid"]),
                Member(*(int(row[name]) for name in ("nranks", "comm_rank", "comm_hash"))),
            )
            old = self._member.get(pid)
            if old and old.comm_hash == new.comm_hash and old.rank != new.rank:
                self._member[pid] = old._replace(rank=UNKNOWN)
            elif not old or new.nranks > old.nranks:
                self._member[pid] = new

    def members(self) -> Collection[int]:
        """The processes that share a communicator with others."""
        return self._member.keys()

    def placed(self) -> list[Identity]:
        """The processes whose rank is now known from their communicators, because the launcher set none."""
        identities = []
        for pid, member in self._member.items():
            known = self._running.get(pid)
            if known is None or member.rank == UNKNOWN:
                continue
            ranks = (known.rank, known.nranks)
            is_ours = known.rank == UNKNOWN or known.is_from_nccl
            if (
                is_ours
                and ranks != (member.rank, member.nranks)
                and (known.nranks in (UNKNOWN, member.nranks) or known.is_from_nccl)
            ):
                self._running[pid] = replace(known, rank=member.rank, nranks=member.nranks, is_from_nccl=True)
                identities.append(self._running[pid])
        return identities

    def located(self, collectives: Array) -> list[Identity]:
        """The processes whose only GPU is now known from rows of COLLECTIVES: they can see several GPUs and use one."""
        lacking = [
            pid
            for pid, known in self._running.items()
            if known.device == UNKNOWN and not self._is_several_ranks(pid)
        ]
        if not lacking:
            return []
        rows = collectives[np.isin(collectives["pid"], lacking) & (collectives["device"] >= 0)]
        identities = []
        for pid in np.unique(rows["pid"]).tolist():
            devices = np.unique(rows["device"][rows["pid"] == pid])
            if len(devices) == 1:
                self._running[pid] = replace(self._running[pid], device=int(devices[0]))
                identities.append(self._running[pid])
        return identities

    def _is_several_ranks(self, pid: int) -> bool:
        member = self._member.get(pid)
        return member is not None and member.rank == UNKNOWN

    def gone(self, reported: Container[int] = ()) -> list[int]:
        """The processes that have ended since the last reading; they are no longer known.

        reported: processes whose end the kernel has reported, including those that became another program.
        """
        ended = [
            pid
            for pid, known in self._running.items()
            if pid in reported or not _is_running(self.proc, known)
        ]
        for pid in ended:
            del self._running[pid]
            self._member.pop(pid, None)
        return ended


@dataclass
class Snapshots:
    """The last snapshot of each process, so that its last row can mark its end."""

    _last: dict[int, Array] = field(default_factory=dict)

    def keep(self, rows: Array) -> Array:
        """Remember the rows of SNAPSHOTS (one per process), and return them."""
        self._last.update((int(row["pid"]), row.copy()) for row in rows)
        return rows

    def at_end(self, pids: Iterable[int], now_ns: int) -> Array:
        """The last known rows of the processes, marked as ended."""
        snapshots = [self._last.pop(pid) for pid in pids if pid in self._last]
        rows = np.array(snapshots, layout.dtype(layout.SNAPSHOTS))
        rows["ts_ns"], rows["alive"] = now_ns, 0
        return rows


def _is_running(proc: Path, known: Identity) -> bool:
    head, _, tail = small_file(f"{proc}/{known.pid}/stat").rpartition(b")")
    fields = tail.split()
    if not head or int(fields[19]) != known.started_ticks:
        return False
    return fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
