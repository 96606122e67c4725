"""Reports new executable mappings as they are made: a library is found milliseconds after it is loaded.

From the kernel's own records of executable mappings and forks (perf_event_open, a software event that counts nothing,
on each CPU), so they cover any loader, container or language. Each mapped library costs the machine about a
microsecond; no other cost. Needs CAP_PERFMON, as the probes do.
"""

import ctypes
import mmap
import os
import platform
import select
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

_SYSCALL = {"x86_64": 298, "aarch64": 241}
_ATTR_BYTES = 120
_SOFTWARE, _DUMMY = 1, 9
_MMAP, _TASK, _WATERMARK = 1 << 8, 1 << 13, 1 << 14
_CLOEXEC = 8
_RECORD_MMAP, _RECORD_LOST, _RECORD_FORK = 1, 2, 7
_HEAD_AT = 1024  # data_head, data_tail in struct perf_event_mmap_page
_PAGES = 8
_GATHER_S = 0.005
_MAX_RECORD_BYTES = 4096 + 64


class Mapping(NamedTuple):
    """A file mapped as code, and its process."""

    pid: int
    name: bytes


class Fork(NamedTuple):
    """A process has a child. In order of time."""

    ts_ns: int
    pid: int
    parent: int


class Records(NamedTuple):
    """The records since the last call; n_lost > 0: records were lost because a ring was full."""

    mappings: list[Mapping]
    forks: list[Fork]
    n_lost: int


class MmapWatch:
    """The records of all CPUs, from open() to close(). Raises OSError where the kernel refuses.

    wake_fd: a descriptor that ends wait() at each write to it.
    """

    def __init__(self, wake_fd: int | None = None) -> None:
        self._rings: dict[int, mmap.mmap] = {}
        self._ready = select.epoll()
        self._due: set[int] = set()  # rings with new data: the kernel signals this only once
        try:
            for cpu in _online_cpus():
                self._open(cpu)
            if wake_fd is not None:
                self._ready.register(wake_fd, select.EPOLLIN | select.EPOLLET)
        except OSError:
            self.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait for a record, up to a timeout; records within 5 ms are returned together."""
        self._poll(0 if self._due else max(timeout_s, 0))
        if not self._due:
            return False
        time.sleep(_GATHER_S)
        return True

    def take(self) -> Records:
        """The records since the last call; does not wait."""
        records = Records([], [], 0)
        self._poll(0)
        for fd in self._due:
            records = _drain_ring(self._rings[fd], records)
        self._due.clear()
        records.forks.sort()
        return records

    def close(self) -> None:
        """Stop recording."""
        self._ready.close()
        for fd, ring in self._rings.items():
            ring.close()
            os.close(fd)
        self._rings.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poll(self, timeout_s: float) -> None:
        self._due.update(fd for fd, _ in self._ready.poll(timeout_s) if fd in self._rings)

    def _open(self, cpu: int) -> None:
        attributes = ctypes.create_string_buffer(_ATTR_BYTES)
        flags = _MMAP | _TASK | _WATERMARK
        struct.pack_into("=IIQQQQQI", attributes, 0, _SOFTWARE, _ATTR_BYTES, _DUMMY, 0, 0, 0, flags, 1)
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.syscall(_SYSCALL[platform.machine()], attributes, -1, cpu, -1, _CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            ring = mmap.mmap(fd, (1 + _PAGES) * mmap.PAGESIZE)
        except OSError:
            os.close(fd)
            raise
        self._rings[fd] = ring
        self._ready.register(fd, select.EPOLLIN)


def open_watch(wake_fd: int | None = None) -> "MmapWatch | None":
    """Records of new mappings, None where the kernel provides none: then processes have to be scanned."""
    with suppress(OSError, KeyError):
        return MmapWatch(wake_fd)
    return None


def _drain_ring(ring: mmap.mmap, records: Records) -> Records:
    """The records in the ring, which is then free again."""
    head, tail = struct.unpack_from("=QQ", ring, _HEAD_AT)
    size = _PAGES * mmap.PAGESIZE
    begin, end = tail % size, head % size
    page = mmap.PAGESIZE
    data = (
        ring[page + begin : page + end]
        if begin <= end and head - tail < size
        else ring[page + begin : page + size] + ring[page : page + end]
    )
    struct.pack_into("=Q", ring, _HEAD_AT + 8, head)
    # The kernel reports lost records only with the next record.
    if head - tail > size - _MAX_RECORD_BYTES:
        records = records._replace(n_lost=records.n_lost + 1)
    return _parse_records(data, records)


def _parse_records(data: bytes, records: Records) -> Records:
    at, n_lost = 0, records.n_lost
    while at + 8 <= len(data):
        kind, _, n_bytes = struct.unpack_from("=IHH", data, at)
        if n_bytes < 8:
            break
        body = data[at + 8 : at + n_bytes]
        if kind == _RECORD_MMAP:
            records.mappings.append(Mapping(struct.unpack_from("=I", body)[0], body[32:].rstrip(b"\0")))
        elif kind == _RECORD_FORK:
            pid, parent, _, _, ts_ns = struct.unpack_from("=IIIIQ", body)
            if pid != parent:
                records.forks.append(Fork(ts_ns, pid, parent))
        elif kind == _RECORD_LOST:
            n_lost += struct.unpack_from("=QQ", body)[1]
        at += n_bytes
    return records._replace(n_lost=n_lost)


def _online_cpus() -> list[int]:
    """The CPUs that are online, from a text such as "0-3,8"."""
    parts = Path("/sys/devices/system/cpu/online").read_text().strip().split(",")
    ranges = (part.partition("-") for part in parts)
    return [cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)]
