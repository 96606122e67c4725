"""Work on millions of rows, cut into pieces for all cores. numpy releases the GIL while it works on an array."""

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from typing import TypeVar

ROWS_AT_ONCE = 1 << 16
"""Rows per piece: a few columns of numbers of this many rows fit the processor's cache."""

A = TypeVar("A")
B = TypeVar("B")
MUCH = 1 << 17
"""Below this many rows, starting threads costs more time than it saves."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = (1 << 31) - 1
_PIECES = 4  # per core, so that no core waits long for the last piece


def in_pieces(
    n: int, work: Callable[[slice], None], *, rows_at_once: int, is_much: bool | None = None
) -> None:
    """Call work for slices that cover 0..n, each at most rows_at_once long; on all cores if there is much work.

    work: writes its results into arrays, each call into its own slice. is_much: by default, decided by the number of
    rows.
    """
    slices = [slice(begin, min(begin + rows_at_once, n)) for begin in range(0, n, rows_at_once)]
    n_parts = _n_cores() * _PIECES if (n >= MUCH if is_much is None else is_much) else 1
    size = max(-(-len(slices) // n_parts), 1)

    def run(part: list[slice]) -> None:
        for here in part:
            work(here)

    together(partial(run, slices[i : i + size]) for i in range(0, len(slices), size))


def together(calls: Iterable[Callable[[], object]]) -> None:
    """Make independent calls on all cores. Raises the exception of the first call that fails.

    This thread makes each call that no other thread has begun: on a busy machine it does not wait for other threads to
    be scheduled, and calls within calls cannot wait for each other.
    """
    calls = list(calls)
    if len(calls) < 2 or _n_cores() < 2:
        for call in calls:
            call()
        return
    errors: dict[int, BaseException] = {}

    def attempt(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:  # noqa: BLE001 (raised below, after all calls have ended)
            errors[number] = error

    futures = [_threads().submit(attempt, number) for number in range(len(calls))]
    begun = []
    for number, future in reversed(list(enumerate(futures))):
        if future.cancel():
            attempt(number)
        else:
            begun.append(future)
    wait(begun)
    if errors:
        raise errors[min(errors)]


def both(first: Callable[[], A], second: Callable[[], B], *, n: int) -> tuple[A, B]:
    """The results of two independent calls, made in parallel if they work on many rows."""
    if n < MUCH or _n_cores() < 2:
        return first(), second()
    future = _threads().submit(second)
    try:
        result = first()
    finally:
        is_begun = not future.cancel()
        if is_begun:
            wait([future])
    return result, future.result() if is_begun else second()


def keep_freed_memory() -> None:
    """Have the C library keep large freed blocks for this process.

    Blocks returned to the kernel come back as pages that the kernel fills with zeros, a tenth of the time of a large
    diagnosis. Only glibc: mallopt(3), malloc.h.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads for all calls of this process: starting some for each call would take longer than many calls."""
    os.register_at_fork(after_in_child=_threads.cache_clear)
    return ThreadPoolExecutor(_n_cores(), thread_name_prefix="diagnosis")


def _n_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
