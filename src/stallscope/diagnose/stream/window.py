"""The latest rows of one job, and which of them are complete.

Nodes send at different times. The arrivals of a rank are usable before the first round in which a member is missing,
because the last rank of that round is not known yet. The wait for a silent member ends after some seconds.
"""

from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.timeline.timeline import by_process_and_time
from stallscope.events import layout
from stallscope.events.layout import HOST_EVENTS, JOB_TABLES, UNKNOWN, Array, process_keys
from stallscope.events.names import Op

_SIDE_TABLES = ("calls", "offcpu", "snapshots", "spans", "host_events", "gpu_kernels")
_KEPT = ("processes", "communicators", "owners")


@dataclass(frozen=True)
class Retention:
    """The amount of past rows that is kept.

    n_steps: steps of a job, of which between half and all are kept. min_rows: the same as rows, for small jobs.
    max_rows: largest number of rows of a job. all_rows: of all jobs together. lag_ns: longest wait for a node that is
    behind. max_evaluations: largest number of evaluations of a row.
    """

    n_steps: int = 128
    min_rows: int = 1 << 15
    max_rows: int = 1 << 20
    all_rows: int = 1 << 22
    lag_ns: int = 10_000_000_000
    max_evaluations: int = 16


@dataclass
class Rows:
    """The rows of one job.

    step: training step of each collective in the stream, UNKNOWN before its first evaluation; parallel to collectives,
    which are sorted by node, pid and time. new: unsorted rows; n_waiting of all tables, n_new collectives.
    """

    tables: dict[str, Array] = field(
        default_factory=lambda: {t.name: layout.empty(t) for t in (*JOB_TABLES, HOST_EVENTS)}
    )
    step: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    new: dict[str, list[Array]] = field(default_factory=dict)
    n_new: int = 0
    n_waiting: int = 0

    @property
    def n(self) -> int:
        """Collectives, including unsorted ones."""
        return len(self.step) + self.n_new

    @property
    def n_all(self) -> int:
        """Rows of all tables."""
        return sum(len(rows) for rows in self.tables.values()) + self.n_waiting

    def add(self, name: str, rows: Array) -> None:
        """Take rows of a table; fold() sorts them."""
        self.new.setdefault(name, []).append(rows)
        self.n_waiting += len(rows)
        self.n_new += len(rows) if name == "collectives" else 0

    def fold(self) -> None:
        """Sort the new rows into the tables."""
        if not self.new:
            return
        for name, parts in self.new.items():
            if name == "collectives":
                self._fold_collectives([self.tables[name], *parts])
                continue
            rows = joined([self.tables[name], *parts])
            self.tables[name] = _latest(rows, name) if name in _KEPT else rows
        self.new, self.n_new, self.n_waiting = {}, 0, 0

    def _fold_collectives(self, parts: list[Array]) -> None:
        """Sort collectives by process and time. Each row is copied once, directly into its slot."""
        keys = [np.concatenate([part[name] for part in parts]) for name in ("node", "pid", "ts_ns")]
        order, _ = by_process_and_time(*keys)
        n = sum(map(len, parts))
        self.step = np.concatenate([self.step, np.full(n - len(self.step), UNKNOWN)])
        if order is None:
            self.tables["collectives"] = joined(parts)
            return
        self.step = self.step[order]
        slot = np.empty(n, np.int64)
        slot[order] = np.arange(n)
        rows, begin = np.empty(n, parts[0].dtype), 0
        for part in parts:
            _as_bytes(rows)[slot[begin : begin + len(part)]] = _as_bytes(part)
            begin += len(part)
        self.tables["collectives"] = rows

    def bound(self, most: int) -> None:
        """Keep the latest rows of the other tables, once `most` rows have arrived."""
        if self.n_waiting > most:
            self.fold()
            self.tables |= {name: self.tables[name][-most:] for name in _SIDE_TABLES}

    def keep(self, kept: Array, *, max_side_rows: int) -> None:
        """Drop collectives that are not kept, and rows of other tables before each process's first kept collective."""
        rows = chosen(self.tables["collectives"], kept)
        self.tables["collectives"], self.step = rows, self.step[kept]
        keys, first = np.unique(process_keys(rows), return_index=True)
        for name in _SIDE_TABLES:
            side = self.tables[name]
            if not len(side) or not len(keys):
                continue
            slot = np.minimum(np.searchsorted(keys, process_keys(side)), len(keys) - 1)
            begin = np.where(keys[slot] == process_keys(side), rows["ts_ns"][first][slot], 0)
            self.tables[name] = chosen(side, side["ts_ns"] >= begin)[-max_side_rows:]


@dataclass(frozen=True)
class ThinnedRounds:
    """Rounds of which every k-th is kept, since at_ns.

    comm: uint64 (m,), sorted; until: int64 (m,), the last such round of each communicator.
    """

    comm: Array
    until: Array
    every: int
    at_ns: int

    @staticmethod
    def of(rows: Array, every: int, at_ns: int) -> "ThinnedRounds":
        """The rounds up to the newest of these collectives."""
        comm, number = np.unique(rows["comm_hash"], return_inverse=True)
        until = np.full(len(comm), UNKNOWN, np.int64)
        np.maximum.at(until, number, rows["seq"])
        return ThinnedRounds(comm, until, every, at_ns)

    def has(self, rows: Array) -> Array:
        """Whether the rounds of collectives are kept: bool (n,)."""
        seq = rows["seq"].astype(np.int64)
        if not len(self.comm) or seq.min() > self.until.max():
            return np.ones(len(rows), bool)
        slot = np.minimum(np.searchsorted(self.comm, rows["comm_hash"]), len(self.comm) - 1)
        is_newer = (self.comm[slot] != rows["comm_hash"]) | (seq > self.until[slot])
        kept: Array = is_newer | (seq % self.every == 0) | (seq == UNKNOWN)
        return kept


def joined(parts: list[Array]) -> Array:
    """Rows of one table, one after the other.

    numpy copies structured rows field by field, several times slower than as plain bytes.
    """
    out: Array = np.concatenate([_as_bytes(rows) for rows in parts]).view(parts[0].dtype)
    return out


def chosen(rows: Array, which: Array) -> Array:
    """Some rows of a table. which: bool (n,)."""
    out: Array = _as_bytes(rows)[which].view(rows.dtype)
    return out


def _as_bytes(rows: Array) -> Array:
    return np.ascontiguousarray(rows).view(f"V{rows.dtype.itemsize}")


def complete(rows: Array, lag_ns: int) -> Array:
    """Which rows of a job are usable: bool (n,).

    rows: COLLECTIVES sorted by node, pid, time, with corrected rounds of ranks that were attached late.
    """
    n = len(rows)
    if not n:
        return np.zeros(0, bool)
    keys, ts_ns, seq = process_keys(rows), rows["ts_ns"], rows["seq"]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sizes = np.diff(first, append=n)
    process = np.repeat(np.arange(len(first)), sizes)
    age_ns = np.repeat(ts_ns[first + sizes - 1], sizes) - ts_ns
    op, comm_hash = rows["op"], rows["comm_hash"]
    counted = (op != Op.SEND) & (op != Op.RECV) & (seq != UNKNOWN) & (comm_hash != 0)
    comm, n_comms = numbered(comm_hash)
    here = np.flatnonzero(counted)
    pair, n_pairs = numbered(comm[here], process[here])
    # By member, in order of time: the last write stays.
    last, size, span_ns, comm_of = (np.zeros(n_pairs, np.int64) for _ in range(4))
    last[:] = UNKNOWN
    np.maximum.at(last, pair, seq[here])
    comm_of[pair], size[pair], span_ns[pair[::-1]] = comm[here], rows["nranks"][here], age_ns[here][::-1]
    reached = np.full(n_comms, np.iinfo(np.int64).max)
    np.minimum.at(reached, comm_of, last)
    size_of, span_of = np.zeros((2, n_comms), np.int64)
    np.maximum.at(size_of, comm_of, size)
    np.maximum.at(span_of, comm_of, span_ns)
    lacks = np.bincount(comm_of, minlength=n_comms) < size_of
    reached[lacks & (span_of < lag_ns)] = UNKNOWN
    is_open = np.flatnonzero(counted & (age_ns < lag_ns) & (seq > reached[comm]))
    first_open = np.full(len(first), n)
    np.minimum.at(first_open, process[is_open], is_open)
    usable: Array = np.arange(n) < np.repeat(first_open, sizes)
    return usable


def before_first_kept(keys: Array, kept: Array) -> Array:
    """The rows before the first kept row of their process: bool (n,). keys: of the processes, in order."""
    first = np.concatenate([[True], keys[1:] != keys[:-1]])
    process = np.cumsum(first) - 1
    first_kept = np.zeros(int(first.sum()), np.int64)
    at = np.flatnonzero(kept)[::-1]
    first_kept[process[at]] = at  # of equal processes the last write stays
    before: Array = np.arange(len(keys)) < first_kept[process]
    return before


def covered_by_all(rows: Array, wall_ns: Array, lag_ns: int) -> Array:
    """The usable rows where rounds cannot be matched yet: rows up to the last time that each node covers: bool (n,).

    wall_ns: int64 (n,), times of the rows.
    """
    newest = np.full(int(rows["node"].max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(newest, rows["node"], wall_ns)
    here = newest[np.unique(rows["node"])]
    usable: Array = wall_ns <= here[here >= here.max(initial=0) - lag_ns].min(initial=here.max(initial=0))
    return usable


def _latest(rows: Array, name: str) -> Array:
    """The last row of each process, or of each membership, with missing values taken from earlier rows."""
    columns = ("node", "pid", "comm_hash") if name == "communicators" else ("node", "pid")
    number, n = numbered(*(rows[column] for column in columns))
    if n == len(rows):
        return rows
    out = np.zeros(n, rows.dtype)
    out[number] = rows
    for field_ in rows.dtype.names or ():
        if rows.dtype[field_].kind != "i":
            continue
        known = rows[field_] != UNKNOWN
        best = np.full(n, UNKNOWN, rows.dtype[field_])
        best[number[known]] = rows[field_][known]
        out[field_] = best
    return out
