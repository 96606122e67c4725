"""An estimate of the waits for the GPU during the time in which the probes on synchronise calls are off.

Without these probes a wait looks like other work: a thread that polls the GPU is on the CPU, and a thread that sleeps
is blocked in a system call. In a steady process, the categories that grow while the probes are off, compared with the
time before, contain the waits. This time is moved to DEVICE, at most as much as the process waited per second while
the probes were on. Accuracy: as steady as the process is from second to second; a process that stops waiting for its
GPU while the probes are off is examined correctly once they are on again, about a second later.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stallscope.capture.probes.program import State
from stallscope.capture.rows.accounts import accounts
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES, Category

_DISGUISES = [
    category - 1
    for category in (
        Category.ON_CPU,
        Category.PREEMPTED,
        Category.LOCK,
        Category.NET,
        Category.DRIVER,
        Category.OTHER_OFF,
    )
]
"""A wait polls, gives the CPU to other threads, or sleeps in a futex, a poll or an ioctl of the driver."""
_WAIT = Category.DEVICE - 1
_MIN_PROBED_NS = 50_000_000
"""Time with probes from which the shares of a process are known."""
_MAX_PROBED_NS = 2_000_000_000
"""The shares are averages over about this time."""
_FORGOTTEN_NS = 10_000_000_000
"""A process that readings lack for this long has ended. A single reading of the kernel's table may miss a process."""


@dataclass
class _Process:
    """shares: of the time with probes, by category; None: not yet known. moved_ns: (N_CATEGORIES,), sums to 0."""

    born_ns: int
    ts_ns: int
    ledger_ns: Array
    probed_ns: int = 0
    spent_ns: Array = field(default_factory=lambda: np.zeros(N_CATEGORIES, np.int64))
    shares: Array | None = None
    moved_ns: Array = field(default_factory=lambda: np.zeros(N_CATEGORIES, np.int64))


@dataclass
class UnprobedWaits:
    """processes: Program.processes. Safe from any thread."""

    processes: Callable[[], State]
    are_probed: bool = True
    _by_pid: dict[int, _Process] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def switch(self, *, are_probed: bool) -> None:
        """The probes are off, or on again, from now on. Raises CannotTrace."""
        with self._lock:
            self._add(self.processes())
            for process in self._by_pid.values():
                process.probed_ns, process.spent_ns = 0, np.zeros(N_CATEGORIES, np.int64)
            self.are_probed = are_probed

    def moved_ns(self, state: State) -> Array:
        """The correction of the ledgers of all processes since their start: int64 (n, N_CATEGORIES).

        The correction of DEVICE is the estimated time.
        """
        with self._lock:
            self._add(state)
            rows = [self._by_pid[pid].moved_ns for pid in state.pids.tolist()]
            return np.array(rows, np.int64).reshape(-1, N_CATEGORIES)

    def _add(self, state: State) -> None:
        ledgers = accounts(state)
        known = self._by_pid
        now_ns = int(state.now_ns.max()) if len(state.now_ns) else 0
        self._by_pid = {
            pid: process for pid, process in known.items() if now_ns - process.ts_ns < _FORGOTTEN_NS
        }
        columns = zip(
            state.pids.tolist(), state.rows["born_ns"].tolist(), state.now_ns.tolist(), ledgers, strict=True
        )
        for pid, born_ns, ts_ns, ledger_ns in columns:
            process = known.get(pid)
            if process is None or process.born_ns != born_ns:
                process = _Process(born_ns, ts_ns, ledger_ns)
            elif ts_ns > process.ts_ns:  # otherwise another thread has added a later reading
                self._advance(process, ts_ns, ledger_ns)
            self._by_pid[pid] = process

    def _advance(self, process: _Process, ts_ns: int, ledger_ns: Array) -> None:
        spent_ns = np.maximum(ledger_ns - process.ledger_ns, 0)
        elapsed_ns = ts_ns - process.ts_ns
        process.ts_ns, process.ledger_ns = ts_ns, ledger_ns
        if self.are_probed:
            if process.probed_ns >= _MAX_PROBED_NS:
                process.probed_ns, process.spent_ns = 0, np.zeros(N_CATEGORIES, np.int64)
            process.probed_ns += elapsed_ns
            process.spent_ns += spent_ns
            if process.probed_ns >= _MIN_PROBED_NS:
                process.shares = process.spent_ns / process.probed_ns
        elif process.shares is not None:
            process.moved_ns += _moved(spent_ns, elapsed_ns, process.shares)


def _moved(spent_ns: Array, elapsed_ns: int, shares: Array) -> Array:
    """The correction for an interval without probes; shares: those with probes."""
    moved = np.zeros(N_CATEGORIES, np.int64)
    excess = np.maximum(spent_ns - shares * elapsed_ns, 0)[_DISGUISES]
    missing_ns = shares[_WAIT] * elapsed_ns - spent_ns[_WAIT]
    if missing_ns <= 0 or excess.sum() <= 0:
        return moved
    taken = np.floor(excess * min(missing_ns / excess.sum(), 1.0)).astype(np.int64)
    moved[_DISGUISES] = -taken
    moved[_WAIT] = taken.sum()
    return moved
