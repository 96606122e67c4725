"""A cheap check of each arriving row: did a rank itself take longer than the others before the same round?

It decides only when to evaluate, never the verdict. It cannot judge point-to-point calls and rounds of ranks with
different work; periodic evaluations cover these.
"""

from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.arrays.grouping import median_of_others, numbered
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import P2P_OPS, Category

_WAIT = Category.WAIT_GPU - 1
_MORE = 0.2  # growth of a reported number of late steps that is worth another report, see incidents
_AGAIN = 4  # waiting rows are compared again when a quarter as many have arrived
_ROW = np.dtype(
    [("process", "i8"), ("comm", "u8"), ("seq", "i8"), ("ts", "i8"), ("own", "i8"), ("nranks", "i4")]
)


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
    _open: list[Array] = field(default_factory=list)
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
            self._open.append(self._own_times(np.concatenate(self._arrived)))
            self._arrived = []

    def evaluated(self, *, step_ns: float, min_ns: float) -> None:
        """Note an evaluation: only further excesses trigger another evaluation."""
        self.step_ns, self.min_ns, self.is_due = step_ns, min_ns, False
        known = {self._number.get(process) for process in self.reported}
        self.count = {
            process: 0 if process in known else min(n, self.enough - 1) for process, n in self.count.items()
        }

    def _own_times(self, rows: Array) -> Array:
        """The process's own time before each arrival, for collectives with a round."""
        process, n = numbered(rows["node"], rows["pid"])
        order = np.lexsort((rows["ts_ns"], process))
        rows, process = rows[order], process[order]
        first = np.searchsorted(process, np.arange(n + 1))
        numbers = [
            self._number.setdefault((int(rows["node"][i]), int(rows["pid"][i])), len(self._number))
            for i in first[:-1]
        ]
        ts, waited = rows["ts_ns"], rows["ledger_ns"][:, _WAIT]
        own_ns = np.diff(ts, prepend=ts[:1]) - np.maximum(np.diff(waited, prepend=waited[:1]), 0)
        for row, number in zip(first[:-1].tolist(), numbers, strict=True):
            before = self._last.get(number)
            own_ns[row] = 0 if before is None else ts[row] - before[0] - max(waited[row] - before[1], 0)
        for row, number in zip((first[1:] - 1).tolist(), numbers, strict=True):
            self._last[number] = int(ts[row]), int(waited[row])
        kept = ~np.isin(rows["op"], P2P_OPS) & (rows["nranks"] > 1) & (rows["seq"] != UNKNOWN)
        out = np.zeros(int(kept.sum()), _ROW)
        out["process"] = np.array(numbers, np.int64)[process[kept]]
        for name, column in (("comm", "comm_hash"), ("seq", "seq"), ("ts", "ts_ns"), ("nranks", "nranks")):
            out[name] = rows[column][kept]
        out["own"] = np.maximum(own_ns[kept], 0)
        return out

    def _compare(self) -> None:
        rows = np.concatenate(self._open)
        comm, _ = numbered(rows["comm"])
        group, n_groups = numbered(comm, rows["seq"])
        is_whole = (
            np.bincount(group, minlength=n_groups)
            >= np.minimum(rows["nranks"], len(self._number))[_row_of_each(group, n_groups)]
        )[group]
        excess = rows["own"][is_whole] - median_of_others(group[is_whole], rows["own"][is_whole])
        odd = np.flatnonzero(excess >= self.min_ns)
        enough = {
            self._number[process]: max(self.enough, int(_MORE * n))
            for process, n in self.reported.items()
            if process in self._number
        }
        for process, ts in rows[is_whole][odd][["process", "ts"]].tolist():
            if ts - self._last_excess_ns.get(process, -(1 << 62)) >= 0.5 * self.step_ns:
                self.count[process] = self.count.get(process, 0) + 1
                self._last_excess_ns[process] = ts
                self.is_due |= self.count[process] >= enough.get(process, self.enough)
        most = 64 * max(len(self._number), 64)
        left = rows[~is_whole][-most:]
        self._open, self._n_open, self._n_new = [left], len(left), 0


def _row_of_each(group: Array, n_groups: int) -> Array:
    """A row of each group."""
    row = np.zeros(n_groups, np.int64)
    row[group] = np.arange(len(group))
    return row
