"""The monotonic clock against wall time, and the kernel's estimate of the wall clock's quality.

A reading brackets one wall time between two monotonic times and keeps the narrowest of several tries: about 0.2 us wide
on an idle machine. It is repeated every second, so that suspend and steps of the wall clock do not shift events. No
privileges needed.
"""

import ctypes
import time
from collections.abc import Callable
from functools import cache

from stallscope.events.trace import Clock, WallClock

_N_TRIES = 20
_TIMEX_BYTES = 208
_TIME_ERROR = 5
_STA_NANO = 0x2000
_STA_UNSYNC = 0x40


def reading(
    node: int,
    monotonic_ns: Callable[[], int] = time.monotonic_ns,
    wall_ns: Callable[[], int] = time.time_ns,
) -> Clock:
    """One pair of monotonic and wall time of the same moment; error_ns is half the bracket's width."""
    best = min((_bracket(monotonic_ns, wall_ns) for _ in range(_N_TRIES)), key=lambda pair: pair[0])
    width_ns, before_ns, wall = best
    return Clock(node, before_ns + width_ns // 2, wall, (width_ns + 1) // 2)


def _bracket(monotonic_ns: Callable[[], int], wall_ns: Callable[[], int]) -> tuple[int, int, int]:
    before = monotonic_ns()
    wall = wall_ns()
    return monotonic_ns() - before, before, wall


def synchronisation() -> WallClock | None:
    """The synchronisation state of the wall clock; None where the kernel does not report it."""
    try:
        return wall_clock()
    except OSError:
        return None


class _Timex(ctypes.Structure):
    """struct timex of <sys/timex.h> on 64-bit Linux: 208 bytes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * (_TIMEX_BYTES - 44)),
    )


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def wall_clock() -> WallClock:
    """The result of adjtimex(2); raises OSError where the call is not allowed."""
    timex = _Timex()
    state = _libc().adjtimex(ctypes.byref(timex))
    if state < 0:
        raise OSError(ctypes.get_errno(), "adjtimex refused")
    return WallClock(
        is_synchronised=state != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        max_error_us=timex.maxerror,
        estimated_error_us=timex.esterror,
        frequency_ppm=timex.freq / 65536,
        offset_ns=timex.offset if timex.status & _STA_NANO else timex.offset * 1000,
    )
