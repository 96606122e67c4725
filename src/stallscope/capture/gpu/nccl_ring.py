"""Reads the records of the profiler plugin of NCCL from the shared memory of a process, and switches the plugin.

The layout is nccl_plugin/ring.h. The memory belongs to the traced process: it has no file name and ends with the
process. The plugin records only while the lease of a reader holds, so a reader that ends leaves no cost behind.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import time
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

import numpy as np

from stallscope.events.layout import Array

_MAGIC = 0x31676E697263636E
_LINK = "/memfd:stallscope-nccl"
_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 2  # linux/fcntl.h
_FUTEX, _FUTEX_WAKE = {"x86_64": 202, "aarch64": 98}, 1  # linux/futex.h
_HEADER_BYTES = 4096
_N_COMMS = 64
_HEADER = np.dtype(
    [
        *(("magic", "u8"), ("n_records", "u4"), ("record_bytes", "u4"), ("version", "u4"), ("pid", "u4")),
        *(("want", "u4"), ("active", "u4"), ("lease_ns", "u8")),
        *(("head", "u8"), ("n_dropped", "u8"), ("n_events", "u8"), ("n_comms", "u4"), ("has_thread", "u4")),
        ("n_switches", "u4"),
    ]
)
_COMM = np.dtype(
    [
        *(("comm_hash", "u8"), ("rank", "i4"), ("n_ranks", "i4"), ("n_nodes", "i4"), ("is_open", "i4")),
        ("name", "S40"),
    ]
)
RECORD = np.dtype(
    [
        *(("number", "u8"), ("comm_hash", "u8"), ("seq", "u8"), ("host_ns", "u8")),
        *(("start_ns", "u8"), ("stop_ns", "u8"), ("noticed_ns", "u8"), ("count", "u8")),
        *(("rank", "i4"), ("peer", "i4")),
        *(("kind", "u1"), ("flags", "u1"), ("n_channels", "u1"), ("pad", "u1"), ("func", "S20")),
    ]
)
"""A record. start_ns, stop_ns: of the kernel on the GPU's clock (see RecordFlag); host_ns, noticed_ns: when the
host enqueued the operation and NCCL's thread noticed the start of its kernel, CLOCK_MONOTONIC.
"""

COLL, P2P, PROXY = 1, 2, 3
"""Kinds of records. PROXY: start_ns is the duration of a transfer, stop_ns the time in which the network held it."""


class Event(IntFlag):
    """Events that the plugin records."""

    COLL = 1 << 1
    P2P = 1 << 2
    PROXY_OP = 1 << 3
    PROXY_STEP = 1 << 4
    KERNEL_CHANNEL = 1 << 6


class RecordFlag(IntFlag):
    """Properties of a record."""

    HAS_GPU_TIMES = 1
    ON_HOST_CLOCK = 2  # version 3 of the interface: the times at which the host noticed begin and end
    IS_SEND = 4
    IS_PARTIAL = 8  # the times of a channel are missing
    IS_REPLAY = 16  # of a CUDA graph: host_ns is when the GPU reached it


KERNELS = Event.COLL | Event.P2P | Event.KERNEL_CHANNEL
"""Operations with the times of their kernels."""


@dataclass(frozen=True)
class RingComm:
    """A communicator of the process."""

    comm_hash: int
    rank: int
    n_ranks: int
    n_nodes: int
    name: str
    is_open: bool


class NcclRing:
    """The plugin's memory in one process. Use as a context manager."""

    def __init__(self, memory: mmap.mmap):
        self._memory = memory
        self._header = np.frombuffer(memory, _HEADER, 1)
        self._records = np.frombuffer(memory, RECORD, int(self._header["n_records"][0]), self.records_at())
        self._next = int(self._header["head"][0])
        self.n_lost = 0

    @staticmethod
    def records_at() -> int:
        """The position of the first record."""
        return _HEADER_BYTES + _N_COMMS * _COMM.itemsize

    def __enter__(self) -> "NcclRing":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Switch the plugin off, and release its memory."""
        self.switch(Event(0), seconds=0)
        self.release()

    def release(self) -> None:
        """Release the memory, and leave the plugin as it is for another reader."""
        del self._header, self._records
        self._memory.close()

    @property
    def active(self) -> Event:
        """The events that the plugin records now. The plugin follows a switch at once."""
        return Event(int(self._header["active"][0]))

    @property
    def n_dropped(self) -> int:
        """Events that the plugin could not record because all its slots were in use."""
        return int(self._header["n_dropped"][0])

    @property
    def n_events(self) -> int:
        """Events of NCCL since its start, also of channels."""
        return int(self._header["n_events"][0])

    @property
    def n_written(self) -> int:
        """Records since the start of NCCL."""
        return int(self._header["head"][0])

    @property
    def has_thread(self) -> bool:
        """Whether the plugin follows a switch; not if the process could not start one more thread."""
        return bool(self._header["has_thread"][0])

    def switch(self, events: Event, *, seconds: float) -> None:
        """Record these events for a time, from now on; none for 0 s."""
        self._header["lease_ns"] = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0
        self._header["want"] = int(events)
        self._header["n_switches"] += 1
        _wake(self._header["n_switches"].ctypes.data)

    def communicators(self) -> list[RingComm]:
        """The newest communicators of the process, at most 64."""
        rows = np.frombuffer(self._memory, _COMM, _N_COMMS, _HEADER_BYTES).copy()
        return [
            RingComm(
                comm_hash=int(row["comm_hash"]),
                rank=int(row["rank"]),
                n_ranks=int(row["n_ranks"]),
                n_nodes=int(row["n_nodes"]),
                name=bytes(row["name"]).decode("utf-8", "replace"),
                is_open=bool(row["is_open"]),
            )
            for row in rows[rows["comm_hash"] != 0]
        ]

    def drain(self) -> Array:
        """The records since the last call, of the type RECORD. Records that were overwritten are counted in n_lost."""
        size = len(self._records)
        head = int(self._header["head"][0])
        if head - self._next > size:
            self.n_lost += head - self._next - size
            self._next = head - size
        positions = np.arange(self._next, head)
        rows = self._records[positions % size].copy()
        is_complete = rows["number"] == positions + 1
        after = self._records["number"][positions % size]
        is_complete &= after == rows["number"]  # a record that changed while it was copied is overwritten
        overwritten = after > positions + 1
        self.n_lost += int(overwritten.sum())
        unfinished = np.flatnonzero(~is_complete & ~overwritten)
        end = int(unfinished[0]) if len(unfinished) else len(rows)
        self._next += end
        return rows[:end][is_complete[:end]]


def _wake(address: int) -> None:
    """Wake the plugin's thread, which sleeps on this word. Without the system call it follows within 1 s."""
    if number := _FUTEX.get(platform.machine()):
        ctypes.CDLL(None).syscall(
            ctypes.c_long(number), ctypes.c_void_p(address), _FUTEX_WAKE, 1, None, None, 0
        )


def recorded_events(ring: NcclRing) -> Event:
    """Kernels; on several machines also the transfers over the network, which are the only view of a slow peer."""
    is_wide = any(comm.n_nodes > 1 for comm in ring.communicators())
    return KERNELS | (Event.PROXY_OP | Event.PROXY_STEP if is_wide else Event(0))


def ring_of(pid: int, proc: Path = Path("/proc")) -> NcclRing | None:
    """The plugin's memory in a process; None without the plugin, without permission, or of another version.

    A child that was forked without the C library's handlers keeps the descriptor of its parent's memory: it is skipped.
    """
    try:
        links = [
            path for path in (proc / str(pid) / "fd").iterdir() if str(path.readlink()).startswith(_LINK)
        ]
    except OSError:
        return None
    for path in links:
        memory = _mapped(path)
        if memory is not None and _is_owner(
            proc / str(pid), int(np.frombuffer(memory, _HEADER, 1)["pid"][0])
        ):
            return NcclRing(memory)
    return None


def _is_owner(process: Path, ring_pid: int) -> bool:
    """Whether a process wrote its number into its memory: the number in its own namespace of processes."""
    try:
        status = (process / "status").read_text()
    except OSError:
        return False
    numbers = [line.split()[-1] for line in status.splitlines() if line.startswith(("Pid:", "NSpid:"))]
    return str(ring_pid) in numbers


def _mapped(path: Path) -> mmap.mmap | None:
    """The memory if it has the plugin's layout, and its size is sealed: a process could shrink it under its reader."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
            return None
        memory = mmap.mmap(fd, 0)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    if len(memory) < _HEADER_BYTES:
        return None
    header = np.frombuffer(memory, _HEADER, 1)[0]
    n_bytes = NcclRing.records_at() + int(header["n_records"]) * RECORD.itemsize
    is_known = (header["magic"], header["version"], header["record_bytes"]) == (_MAGIC, 1, RECORD.itemsize)
    return memory if is_known and header["n_records"] and n_bytes <= len(memory) else None
