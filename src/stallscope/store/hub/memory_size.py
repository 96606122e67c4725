"""The memory of this machine, and of this process with its child processes."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_PROC = Path("/proc")
_DEFAULT_SHARE = 4
_MIN_BYTES = 1 << 30
_MAX_AGE_S, _CHILDREN_MAX_AGE_S = 0.2, 2.0
"""Listing the children reads a file for each thread of the hub, so it is done less often than the sum."""

_EARLY_SHARE = 0.85
_PAUSE = 20
"""The pause after returning memory, as a multiple of the time that it took."""

_RETURN_S = 1.0
"""Freed memory is returned at most this often, not for each refused request: it takes some 100 ms for each GB."""


class ProcessMemory:
    """The resident memory of this process and of its children. Thread-safe."""

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic, proc: Path = _PROC):
        self._clock_s, self._proc = clock_s, proc
        self._changing, self._returning = threading.Lock(), threading.Lock()
        self._summed_s = self._listed_s = self._returned_s = -_CHILDREN_MAX_AGE_S
        self._n_bytes = 0
        self._pause_s = _RETURN_S
        self._children: list[int] = []

    def total(self) -> int:
        """Bytes; at most some tenths of a second old."""
        now_s = self._clock_s()
        if now_s - self._summed_s < _MAX_AGE_S:
            return self._n_bytes
        with self._changing:
            if now_s - self._summed_s < _MAX_AGE_S:
                return self._n_bytes
            if now_s - self._listed_s >= _CHILDREN_MAX_AGE_S:
                self._listed_s, self._children = now_s, _children(self._proc / "self")
            self._n_bytes = _sum(self._proc, ["self", *map(str, self._children)])
            self._summed_s = now_s
        return self._n_bytes

    def is_above(self, max_bytes: int | None) -> bool:
        """Whether the total is above a limit. Then this process returns its freed memory, so that the total can shrink.

        max_bytes: None for no limit.
        """
        if max_bytes is None or self.total() <= max_bytes:
            return False
        self._return_freed()
        return True

    def return_early(self, max_bytes: int | None) -> None:
        """Return freed memory if the total comes near a limit, so that only used memory reaches it.

        max_bytes: None for no limit.
        """
        if max_bytes is not None and self.total() > _EARLY_SHARE * max_bytes:
            self._return_freed()

    def _return_freed(self) -> None:
        if not self._returning.acquire(blocking=False):
            return  # another thread does it
        try:
            begin_s = self._clock_s()
            if begin_s - self._returned_s >= self._pause_s:
                return_freed_memory()
                self._returned_s = self._clock_s()
                self._pause_s = max(_RETURN_S, _PAUSE * (self._returned_s - begin_s))
        finally:
            self._returning.release()


@cache
def process_memory() -> ProcessMemory:
    """The memory of this process: one object, as each would read the same files."""
    return ProcessMemory()


def choose_arrow_pool() -> None:
    """Let Arrow use the C library's memory, unless the user has chosen a pool.

    A hub's tables are freed by other threads than the threads that make them. Arrow's default, mimalloc, then keeps
    the memory for the thread that made them, and cannot be asked to return it: a loaded hub held 366 MB for 76 MB of
    tables. jemalloc returns it only after some seconds. The processor time for each stored row is the same.
    """
    import pyarrow as pa

    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())


def return_freed_memory() -> None:
    """Return the freed memory of Arrow and of the C library to the system, where they can.

    glibc keeps freed blocks below used blocks: they stay resident until it is asked to return them.
    """
    import pyarrow as pa  # processes without tables do not load it

    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if it has ended."""
    return sum(_own_and_shared(_PROC, str(pid)))


def _sum(proc: Path, names: Iterable[str]) -> int:
    """The memory of processes of one program: of the pages of files, which they share, the largest."""
    sizes = [_own_and_shared(proc, name) for name in names]
    return sum(own for own, _ in sizes) + max(shared for _, shared in sizes)


def _own_and_shared(proc: Path, name: str) -> tuple[int, int]:
    """Bytes of a process's own pages and of its pages of files (proc(5), statm: resident and shared)."""
    try:
        fields = (proc / name / "statm").read_bytes().split()
    except OSError:  # it has ended
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    resident, shared = int(fields[1]) * page, int(fields[2]) * page
    return resident - shared, shared


def _children(process: Path) -> list[int]:
    """The child processes of a process. A kernel without CONFIG_PROC_CHILDREN lists none."""
    out: list[int] = []
    with suppress(OSError):
        for task in (process / "task").iterdir():
            with suppress(OSError):  # the thread has ended
                out += map(int, (task / "children").read_bytes().split())
    return out


def default_bytes() -> int:
    """Default memory limit of a hub: a quarter of the machine's memory, or of the container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or a container without a limit
        total = min(total, int(_CGROUP.read_text()))
    return max(_MIN_BYTES, total // _DEFAULT_SHARE)
