"""The last minutes of one job in memory: the lateness and the wait of each rank in each second, as cells.

A round counts in the second of its median arrival. Rounds wait until all their ranks have arrived. A round that is
still incomplete after PATIENCE_S is entered incomplete, and a rank that arrives later is entered when it arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stallscope.events.layout import Array
from stallscope.page.cells import codes

SECONDS = 640
"""Seconds that a ring holds: more than the page requests, because the newest second is not over."""

PATIENCE_S = 5.0
_MAX_DONE = 8192
_MAX_AHEAD_S = 3600


@dataclass(frozen=True)
class Arrivals:
    """Rows of one communicator. index: rank in the job. Times in ns since 1970; wait_ns is NaN where unknown."""

    index: Array
    seq: Array
    ts_ns: Array
    wait_ns: Array

    def part(self, chosen: Array) -> "Arrivals":
        return Arrivals(self.index[chosen], self.seq[chosen], self.ts_ns[chosen], self.wait_ns[chosen])

    @staticmethod
    def joined(parts: Sequence["Arrivals"]) -> "Arrivals":
        names = ("index", "seq", "ts_ns", "wait_ns")
        return Arrivals(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass
class _Comm:
    """The open rounds of a communicator, and the medians of the rounds that were entered."""

    n_ranks: int
    open: list[Arrivals] = field(default_factory=list)
    added_s: float = 0.0
    done_seq: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    done_ns: Array = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class Window:
    """Cells of some seconds. late, wait: uint8 (ranks, n). seq, comm: the round with the latest arrival, by second."""

    late: Array
    wait: Array
    seq: Array
    comm: Array


class Ring:
    """Cells of one job. For use under the lock of its owner."""

    def __init__(self, n_seconds: int = SECONDS):
        self.n, self.head = n_seconds, -1
        self.comms: list[str] = []
        # In memory a cell is its code plus one, and 0 means no data. So a maximum combines two cells.
        self._cells = np.zeros((2, 0, n_seconds), np.uint8)
        self._worst = np.zeros(n_seconds, np.int16)
        self._seq = np.full(n_seconds, -1, np.int64)
        self._comm = np.zeros(n_seconds, np.int32)
        self._of: dict[str, _Comm] = {}

    @property
    def n_ranks(self) -> int:
        """Ranks with a row."""
        return int(self._cells.shape[1])

    @property
    def n_bytes(self) -> int:
        """Size of the cells."""
        return int(self._cells.nbytes)

    def add(self, comm: str, arrivals: Arrivals, *, n_ranks: int, now_s: float) -> None:
        """Add rows; settle() enters them. n_ranks: of the communicator. now_s: by any steady clock."""
        if comm not in self._of:
            self._of[comm] = _Comm(n_ranks)
            self.comms.append(comm)
        known = self._of[comm]
        known.n_ranks, known.added_s = max(known.n_ranks, n_ranks), now_s
        known.open.append(arrivals)

    def settle(self, now_s: float) -> None:
        """Enter the rounds that are complete, or older than PATIENCE_S."""
        for number, comm in enumerate(self.comms):
            known = self._of[comm]
            if known.open:
                self._settle(number, known, now_s)

    def absorb(self, other: "Ring") -> None:
        """Take over the cells and the communicators of another ring: their jobs are one job."""
        self._reach(other.n_ranks)
        for second in range(max(other.head - other.n + 1, 0), other.head + 1) if other.head >= 0 else ():
            if not self._advance(second):
                continue
            to, at = second % self.n, second % other.n
            cells = self._cells[:, : other.n_ranks, to]
            np.maximum(cells, other._cells[:, :, at], out=cells)
            if other._worst[at] > self._worst[to]:
                self._worst[to], self._seq[to] = other._worst[at], other._seq[at]
                self._comm[to] = other._comm[at] + len(self.comms)
        self.comms += other.comms
        self._of |= other._of

    def window(self, first_s: int, n: int) -> Window:
        """The cells of n seconds from first_s on, since 1970."""
        seconds = np.arange(first_s, first_s + n)
        is_known = (seconds <= self.head) & (seconds > self.head - self.n)
        at = seconds % self.n
        cells = np.where(is_known, self._cells[:, :, at], 0).astype(np.uint8) - np.uint8(1)
        return Window(
            np.ascontiguousarray(cells[0]),
            np.ascontiguousarray(cells[1]),
            np.where(is_known, self._seq[at], -1),
            np.where(is_known, self._comm[at], 0),
        )

    def worst(self, first_s: int, n: int) -> Array:
        """The largest lateness of any rank by second, as codes (n,)."""
        seconds = np.arange(first_s, first_s + n)
        is_known = (seconds <= self.head) & (seconds > self.head - self.n)
        return (np.where(is_known, self._worst[seconds % self.n], 0) - 1).astype(np.uint8)

    def _settle(self, number: int, known: _Comm, now_s: float) -> None:
        rows = Arrivals.joined(known.open)
        order = np.lexsort((rows.ts_ns, rows.seq))
        rows = rows.part(order)
        rows = self._enter_late(number, known, rows)
        if not len(rows.seq):
            known.open = []
            return
        first = np.flatnonzero(np.r_[True, np.diff(rows.seq) != 0])
        count = np.diff(np.r_[first, len(rows.seq)])
        is_old = rows.ts_ns[first + count - 1] < rows.ts_ns.max() - int(PATIENCE_S * 1e9)
        is_due = (count >= known.n_ranks) | is_old | (now_s - known.added_s > PATIENCE_S)
        of_row = np.repeat(is_due, count)
        if is_due.any():
            median_ns = rows.ts_ns[first + (count - 1) // 2]
            due = rows.part(of_row)
            self._enter(number, due, np.repeat(median_ns, count)[of_row])
            known.done_seq = np.concatenate([known.done_seq, rows.seq[first][is_due]])[-_MAX_DONE:]
            known.done_ns = np.concatenate([known.done_ns, median_ns[is_due]])[-_MAX_DONE:]
            order = np.argsort(known.done_seq, kind="stable")
            known.done_seq, known.done_ns = known.done_seq[order], known.done_ns[order]
        known.open = [rows.part(~of_row)] if not of_row.all() else []

    def _enter_late(self, number: int, known: _Comm, rows: Arrivals) -> Arrivals:
        """Enter the rows of rounds that were entered before. Returns the other rows."""
        if not len(known.done_seq):
            return rows
        at = np.minimum(np.searchsorted(known.done_seq, rows.seq), len(known.done_seq) - 1)
        is_late = known.done_seq[at] == rows.seq
        if is_late.any():
            self._enter(number, rows.part(is_late), known.done_ns[at[is_late]])
        return rows.part(~is_late)

    def _enter(self, number: int, rows: Arrivals, median_ns: Array) -> None:
        """Enter rows, each with the median arrival of its round."""
        self._reach(int(rows.index.max(initial=-1)) + 1)
        second = median_ns // 10**9
        newest = int(second.max(initial=-1))
        if self.head >= 0 and newest > self.head + _MAX_AHEAD_S:
            self.head = -1  # the job's clock was set: start again
        self._advance(newest)
        is_kept = (second > self.head - self.n) & (second >= 0)
        rows, second, median_ns = rows.part(is_kept), second[is_kept], median_ns[is_kept]
        at, late = second % self.n, codes((rows.ts_ns - median_ns).astype(float))
        np.maximum.at(self._cells[0], (rows.index, at), late + np.uint8(1))
        np.maximum.at(self._cells[1], (rows.index, at), codes(rows.wait_ns) + np.uint8(1))
        self._note_worst(number, late.astype(np.int16) + 1, at, rows.seq)

    def _note_worst(self, number: int, late: Array, at: Array, seq: Array) -> None:
        """Note the latest arrival of each second, and its round."""
        order = np.lexsort((late, at))
        last = order[np.flatnonzero(np.r_[np.diff(at[order]) != 0, True])] if len(order) else order
        more = late[last] > self._worst[at[last]]
        self._worst[at[last][more]] = late[last][more]
        self._seq[at[last][more]] = seq[last][more]
        self._comm[at[last][more]] = number

    def _reach(self, n_ranks: int) -> None:
        """Make room for ranks below n_ranks."""
        if n_ranks > self.n_ranks:
            self._cells = np.pad(self._cells, ((0, 0), (0, n_ranks - self.n_ranks), (0, 0)))

    def _advance(self, second: int) -> bool:
        """Make a second the newest, if it is newer. Returns whether the ring holds it."""
        if self.head < 0:
            self._cells[:] = 0
            self._worst[:], self._seq[:] = 0, -1
            self.head = second
        elif second > self.head:
            new = np.arange(max(self.head + 1, second - self.n + 1), second + 1) % self.n
            self._cells[:, :, new] = 0
            self._worst[new], self._seq[new] = 0, -1
            self.head = second
        return second > self.head - self.n
