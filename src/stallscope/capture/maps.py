"""Hash maps of the kernel side as arrays: a few system calls for all entries, no Python per entry."""

import ctypes
import errno
import struct
from typing import Any, NamedTuple

import numpy as np

from stallscope.capture.libbpf import Library
from stallscope.errors import CannotTrace
from stallscope.events.layout import Array

_LOOKUP_BATCH, _DELETE_BATCH = 24, 27
_N_AT_ONCE = 4096


class Entries(NamedTuple):
    """Keys and values of a map: arrays (n,)."""

    keys: Array
    values: Array


def entries(library: Library, fd: int, key: np.dtype[Any], value: np.dtype[Any]) -> Entries:
    """All entries. Those that are made or deleted meanwhile may be missing. Raises CannotTrace."""
    keys, values = [np.zeros(0, key)], [np.zeros(0, value)]
    cursors, has_begun, n_wanted = (ctypes.c_uint64(), ctypes.c_uint64()), False, _N_AT_ONCE
    while True:
        some_keys, some_values = np.zeros(n_wanted, key), np.zeros(n_wanted, value)
        before, after = cursors
        n, error = _batch(
            library,
            _LOOKUP_BATCH,
            fd,
            ctypes.addressof(before) if has_begun else 0,
            ctypes.addressof(after),
            some_keys,
            some_values,
        )
        if error == errno.ENOSPC:  # a bucket with more than fits
            n_wanted *= 2
            continue
        keys.append(some_keys[:n])
        values.append(some_values[:n])
        if error == errno.ENOENT:
            return Entries(np.concatenate(keys), np.concatenate(values))
        if error:
            raise CannotTrace(f"the kernel's statistics cannot be read: {errno.errorcode.get(error, error)}")
        cursors, has_begun = (after, before), True


def delete(library: Library, fd: int, keys: Array) -> None:
    """Delete the entries of these keys, as far as they are there."""
    done = 0
    while done < len(keys):
        some = np.ascontiguousarray(keys[done:])
        n, error = _batch(library, _DELETE_BATCH, fd, 0, 0, some, None)
        done += n + (error == errno.ENOENT)
        if error not in (0, errno.ENOENT):
            return


def _batch(
    library: Library, command: int, fd: int, before: int, after: int, keys: Array, values: Array | None
) -> tuple[int, int]:
    """(entries that were done, error number)."""
    attributes = ctypes.create_string_buffer(
        struct.pack(
            "=QQQQIIQQ",
            *(before, after, keys.ctypes.data, 0 if values is None else values.ctypes.data),
            *(len(keys), fd, 0, 0),
        ),
        128,
    )
    try:
        library.bpf(command, attributes)
        error = 0
    except OSError as refusal:
        error = refusal.errno or errno.EINVAL
    (n,) = struct.unpack_from("=I", attributes, 32)
    return (0 if error == errno.ENOSPC else int(n)), error
