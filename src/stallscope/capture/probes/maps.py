"""Hash maps of the kernel side as arrays: a few system calls for all entries, no Python per entry."""

import ctypes
import errno
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stallscope.capture.probes.libbpf import Library
from stallscope.errors import CannotTrace
from stallscope.events.layout import Array

_LOOKUP_BATCH, _DELETE_BATCH = 24, 27
_N_AT_ONCE = 1024
_ATTRIBUTES_BYTES = 128
_COUNT_AT = 32  # of union bpf_attr, in its part for batches


class Entries(NamedTuple):
    """Keys and values of a map: arrays (n,)."""

    keys: Array
    values: Array


@dataclass(eq=False)
class Reader:
    """Reads a map repeatedly into the same memory. Safe for several threads.

    n_at_once: maximum of entries per system call.
    """

    library: Library
    fd: int
    key: "np.dtype[Any]"
    value: "np.dtype[Any]"
    n_at_once: int = _N_AT_ONCE
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cursors: Array = field(default_factory=lambda: np.zeros(2, np.uint64))

    def __post_init__(self) -> None:
        # As plain bytes: numpy copies records of fields one field at a time, and compares fields before it joins.
        self._keys = np.zeros((self.n_at_once, self.key.itemsize), np.uint8)
        self._values = np.zeros((self.n_at_once, self.value.itemsize), np.uint8)

    def entries(self) -> Entries:
        """All entries. Entries created or deleted during the reading may be missing. Raises CannotTrace."""
        return self.timed_entries()[0]

    def timed_entries(self) -> tuple[Entries, list[tuple[int, int]]]:
        """All entries; and for each system call its number of entries and its start time in ns. Raises CannotTrace."""
        keys, values, calls = bytearray(), bytearray(), []
        with self._lock:
            begin_ns = time.monotonic_ns()
            for batch_keys, batch_values in self._batches():
                keys.extend(batch_keys)
                values.extend(batch_values)
                calls.append((len(batch_keys), begin_ns))
                begin_ns = time.monotonic_ns()
        return Entries(np.frombuffer(keys, self.key), np.frombuffer(values, self.value)), calls

    def total(self, column: Callable[[Array], Array]) -> Array:
        """The sum over all entries of `column`(values), values (n,): (n, ...). Raises CannotTrace."""
        with self._lock:
            sums = [column(values.view(self.value)[:, 0]).sum(axis=0) for _, values in self._batches()]
        return np.sum(sums, axis=0)

    def _batches(self) -> Iterator[tuple[Array, Array]]:
        """Keys and values as bytes (n, size), valid until the next call."""
        before, after, has_begun = 0, 1, False
        while True:
            address = self._cursors.ctypes.data
            n, error = _batch(
                self.library,
                _LOOKUP_BATCH,
                self.fd,
                address + 8 * before if has_begun else 0,
                address + 8 * after,
                self._keys,
                self._values,
            )
            if error == errno.ENOSPC:  # a bucket with more entries than fit
                self.n_at_once *= 2
                self.__post_init__()
                continue
            if error not in (0, errno.ENOENT):
                code = errno.errorcode.get(error, error)
                raise CannotTrace(f"the kernel's statistics cannot be read: {code}")
            yield self._keys[:n], self._values[:n]
            if error:
                return
            before, after, has_begun = after, before, True


def delete(library: Library, fd: int, keys: Array) -> None:
    """Delete the entries of these keys, where they exist."""
    n_done = 0
    while n_done < len(keys):
        remaining = np.ascontiguousarray(keys[n_done:])
        n, error = _batch(library, _DELETE_BATCH, fd, 0, 0, remaining, None)
        n_done += n + (error == errno.ENOENT)
        if error not in (0, errno.ENOENT):
            return


def _batch(
    library: Library, command: int, fd: int, before: int, after: int, keys: Array, values: Array | None
) -> tuple[int, int]:
    """(completed entries, error number)."""
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    struct.pack_into(
        "=QQQQIIQQ",
        attributes,
        0,
        *(before, after, keys.ctypes.data, 0 if values is None else values.ctypes.data),
        *(len(keys), fd, 0, 0),
    )
    try:
        library.bpf(command, attributes)
        error = 0
    except OSError as refusal:
        error = refusal.errno or errno.EINVAL
    (n,) = struct.unpack_from("=I", attributes, _COUNT_AT)
    return (0 if error == errno.ENOSPC else int(n)), error
