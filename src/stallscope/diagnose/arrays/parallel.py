"""Work on millions of rows, cut in pieces for all cores: numpy lets other threads run while it works on an array."""

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

ROWS_AT_ONCE = 1 << 16
"""Rows of which some columns of numbers fit the processor's cache."""

A = TypeVar("A")
B = TypeVar("B")
MUCH = 1 << 17
"""Below so many rows, starting threads costs more than it gives."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = (1 << 31) - 1
_PIECES = 4  # for each core, so that none waits long for the last


def in_pieces(
    n: int, work: Callable[[slice], None], *, rows_at_once: int, is_much: bool | None = None
) -> None:
    """Call work for slices that cover 0..n, none longer than rows_at_once; on all cores where it is much work.

    work: writes what it finds into arrays, each call into its own part of them. is_much: by the number of rows, unless
    given.
    """
    here = [slice(begin, min(begin + rows_at_once, n)) for begin in range(0, n, rows_at_once)]
    n_parts = _n_cores() * _PIECES if (n >= MUCH if is_much is None else is_much) else 1
    size = max(-(-len(here) // n_parts), 1)

    def one_by_one(some: list[slice]) -> None:
        for one in some:
            work(one)

    together(partial(one_by_one, here[i : i + size]) for i in range(0, len(here), size))


def together(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls that do not depend on each other, on all cores. Raises what the first of them raises."""
    calls = list(calls)
    if len(calls) < 2 or _n_cores() < 2:
        for call in calls:
            call()
        return
    with ThreadPoolExecutor(_n_cores()) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def both(one: Callable[[], A], other: Callable[[], B], *, n: int) -> tuple[A, B]:
    """What two calls that do not depend on each other return, on all cores where they work on many rows."""
    if n < MUCH or _n_cores() < 2:
        return one(), other()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(other)
        return one(), found.result()


def keep_freed_memory() -> None:
    """Have the C library keep large blocks that are freed, for this process: given back, they come anew page by page,
    each filled with zeros, which takes a tenth of the time of a large diagnosis. Only glibc: mallopt(3), malloc.h.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def _n_cores() -> int:
    """Those this process may run on."""
    return len(os.sched_getaffinity(0))
