"""A BPF ring buffer read through its mapping as an array of records: no Python per record, no system call.

All records of a ring have one size. With the ring's header of 8 bytes that size divides the ring, so no record
straddles its end, and the double mapping by the kernel is one array of slots. A core copies about 5 million records a
second.
"""

import ctypes
import mmap
import platform
from typing import Any

import numpy as np

from stallscope.events.layout import Array

_HEADER_BYTES = 8
_BUSY, _DISCARDED = 1 << 31, 1 << 30
_MEMBARRIER, _PRIVATE_EXPEDITED, _REGISTER = 283, 1 << 3, 1 << 4


class Ring:
    """The consumer of one ring. Not safe for two threads at a time."""

    def __init__(self, fd: int, dtype: np.dtype[Any], n_bytes: int):
        """fd: of the map. dtype: of a record without the ring's header. n_bytes: size of the ring."""
        self.fd = fd
        stride = _HEADER_BYTES + dtype.itemsize
        if n_bytes % stride:
            raise ValueError(f"records of {stride} bytes do not divide a ring of {n_bytes}")
        page = mmap.PAGESIZE
        self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        self._producer = mmap.mmap(fd, page + 2 * n_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._consumed = np.frombuffer(self._consumer, "<u8", 1)
        self._produced = np.frombuffer(self._producer, "<u8", 1)
        # As plain bytes: numpy copies records of fields one field at a time, ten times as slowly.
        slots = np.frombuffer(self._producer, np.uint8, 2 * n_bytes, offset=page).reshape(-1, stride)
        self._headers = slots[:, :4].view("<u4")[:, 0]
        self._records = slots[:, _HEADER_BYTES:]
        self._n_bytes, self._stride, self._dtype = n_bytes, stride, dtype
        self._none = np.empty(0, dtype)
        self._barrier = _barrier()

    def drain(self, n_max: int = 1 << 20) -> Array:
        """The complete records, oldest first, copied; at most n_max. Frees their slots in the ring."""
        start = int(self._consumed[0])
        n = min((int(self._produced[0]) - start) // self._stride, n_max)
        if n <= 0:
            return self._none
        self._barrier()
        first = start % self._n_bytes // self._stride
        headers = self._headers[first : first + n]
        marks = int(np.bitwise_or.reduce(headers))
        if marks & _BUSY:
            n = int(np.argmax((headers & _BUSY) != 0))
            headers = headers[:n]
        self._barrier()
        view = self._records[first : first + n]
        records = view[(headers & _DISCARDED) == 0] if marks & _DISCARDED else view.copy()
        self._barrier()
        self._consumed[0] = start + n * self._stride
        return np.ndarray(len(records), self._dtype, buffer=records)

    def fill(self) -> float:
        """Share of the ring that is in use, 0 to 1."""
        return (int(self._produced[0]) - int(self._consumed[0])) / self._n_bytes

    def close(self) -> None:
        """Unmap the ring. Arrays that drain() returned stay valid."""
        del self._consumed, self._produced, self._headers, self._records
        self._consumer.close()
        self._producer.close()


def _barrier() -> Any:
    """A memory barrier. x86-64 orders loads with loads and stores with stores; arm64 needs a system call."""
    if platform.machine() != "aarch64":
        return _nothing
    libc = ctypes.CDLL(None)
    libc.syscall(_MEMBARRIER, _REGISTER, 0, 0)
    return lambda: libc.syscall(_MEMBARRIER, _PRIVATE_EXPEDITED, 0, 0)


def _nothing() -> None:
    """No barrier is needed on x86-64."""
