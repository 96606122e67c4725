"""A cheap check of each arriving row: did a rank itself take longer than the others before the same round?

It decides only when to evaluate, never the verdict. It cannot judge point-to-point calls and rounds of ranks with
different work; periodic evaluations cover these.
"""

from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.arrays.grouping import median_of_others, numbered
from stallscope.diagnose.arrays.row_order import in_order
from stallscope.diagnose.timeline.timeline import by_process_and_time
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import P2P_OPS, Category

_WAIT = Category.WAIT_GPU - 1
_MORE = 0.2  # growth of a reported number of late steps that is worth another report, see incidents
_AGAIN = 4  # waiting rows are compared again when a quarter as many have arrived
_READ = ("node", "pid", "ts_ns", "comm_hash", "seq", "nranks", "op")

Columns = dict[str, Array]
"""Rows as columns: a collective is several hundred bytes wide, and few of its columns are needed."""

_OPEN = ("process", "comm_hash", "seq", "ts_ns", "own_ns", "nranks")
"""The columns of rows whose round is not complete. own_ns: the process's own time before the arrival."""


@dataclass
class Trigger:
    """The trigger of a job's evaluations.

    min_ns: smallest excess that counts. step_ns: excesses closer together count once. count: by process, excesses
    since the last evaluation, including excesses that did not lead to a name. reported: late steps of the processes
    that an open incident names; only many more of them are worth another evaluation.
    """

    min_ns: float
    enough: int
    step_ns: float = 0.0
    count: dict[int, int] = field(default_factory=dict)
    is_due: bool = False
    reported: dict[tuple[int, int], int] = field(default_factory=dict)
    _number: dict[tuple[int, int], int] = field(default_factory=dict)
    _last: dict[int, tuple[int, int]] = field(default_factory=dict)
    _last_excess_ns: dict[int, int] = field(default_factory=dict)
    _arrived: list[Array] = field(default_factory=list)
    _open: list[Columns] = field(default_factory=list)
    _n_open: int = 0
    _n_new: int = 0

    def add(self, rows: Array) -> None:
        """Check arriving collectives of any of the job's processes, for each process in order of time."""
        self._arrived.append(rows)
        self._n_new += len(rows)
        if self._n_new >= max(self._n_open / _AGAIN, len(self._number)):
            self._take()
            self._compare()

    def last_ns(self) -> dict[tuple[int, int], int]:
        """The last arrival of each process, node and pid, on its clock."""
        self._take()
        return {
            process: self._last[number][0] for process, number in self._number.items() if number in self._last
        }

    def _take(self) -> None:
        if self._arrived:
            self._open.append(self._own_times(_joined([_read(rows) for rows in self._arrived])))
            self._arrived = []

    def evaluated(self, *, step_ns: float, min_ns: float) -> None:
        """Note an evaluation: only further excesses trigger another evaluation."""
        self.step_ns, self.min_ns, self.is_due = step_ns, min_ns, False
        known = {self._number.get(process) for process in self.reported}
        self.count = {
            process: 0 if process in known else min(n, self.enough - 1) for process, n in self.count.items()
        }

    def _own_times(self, rows: Columns) -> Columns:
        """The process's own time before each arrival, for collectives with a round."""
        order, first = by_process_and_time(rows["node"], rows["pid"], rows["ts_ns"])
        order = np.arange(first[-1]) if order is None else order
        heads, process = order[first[:-1]], np.repeat(np.arange(len(first) - 1), np.diff(first))
        numbers = [
            self._number.setdefault(key, len(self._number))
            for key in zip(rows["node"][heads].tolist(), rows["pid"][heads].tolist(), strict=True)
        ]
        ts, waited = rows["ts_ns"][order], rows["waited_ns"][order]
        own_ns = np.diff(ts, prepend=ts[:1]) - np.maximum(np.diff(waited, prepend=waited[:1]), 0)
        begins, ends = first[:-1], first[1:] - 1
        for row, number, begin_ns, waited_ns in zip(
            begins.tolist(), numbers, ts[begins].tolist(), waited[begins].tolist(), strict=True
        ):
            before = self._last.get(number)
            own_ns[row] = 0 if before is None else begin_ns - before[0] - max(waited_ns - before[1], 0)
        self._last.update(
            zip(numbers, zip(ts[ends].tolist(), waited[ends].tolist(), strict=True), strict=True)
        )
        kept = ~np.isin(rows["op"], P2P_OPS) & (rows["nranks"] > 1) & (rows["seq"] != UNKNOWN)
        here = kept[order]
        out = {name: rows[name][order[here]] for name in ("comm_hash", "seq", "nranks")}
        out["process"] = np.array(numbers, np.int64)[process[here]]
        out["ts_ns"], out["own_ns"] = ts[here], np.maximum(own_ns[here], 0)
        return out

    def _compare(self) -> None:
        rows = _joined(self._open)
        comm, _ = numbered(rows["comm_hash"])
        group, n_groups = numbered(comm, rows["seq"])
        is_whole = (
            np.bincount(group, minlength=n_groups)
            >= np.minimum(rows["nranks"], len(self._number))[_row_of_each(group, n_groups)]
        )[group]
        own_ns = rows["own_ns"][is_whole]
        excess = own_ns - median_of_others(group[is_whole], own_ns)
        odd = np.flatnonzero(is_whole)[excess >= self.min_ns]
        enough = {
            self._number[process]: max(self.enough, int(_MORE * n))
            for process, n in self.reported.items()
            if process in self._number
        }
        for process, ts in zip(rows["process"][odd].tolist(), rows["ts_ns"][odd].tolist(), strict=True):
            if ts - self._last_excess_ns.get(process, -(1 << 62)) >= 0.5 * self.step_ns:
                self.count[process] = self.count.get(process, 0) + 1
                self._last_excess_ns[process] = ts
                self.is_due |= self.count[process] >= enough.get(process, self.enough)
        most = 64 * max(len(self._number), 64)
        left = np.flatnonzero(~is_whole)[-most:]
        self._open, self._n_open, self._n_new = [{n: rows[n][left] for n in _OPEN}], len(left), 0


def _read(rows: Array) -> Columns:
    """The columns of arriving rows that the trigger needs, with the cumulative time in waits."""
    waited_ns = np.empty(len(rows), np.int64)

    def add(here: slice, part: Array) -> None:
        waited_ns[here] = part["ledger_ns"][:, _WAIT]

    return in_order(rows, None, _READ, for_rows=add) | {"waited_ns": waited_ns}


def _joined(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _row_of_each(group: Array, n_groups: int) -> Array:
    """A row of each group."""
    row = np.zeros(n_groups, np.int64)
    row[group] = np.arange(len(group))
    return row
