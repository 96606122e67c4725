"""State of a running job: totals since the start, and all rows of the last ten seconds.

A percentile is an actual value of the last ten seconds. The first call of each function and the first round of each
communicator are counted separately, because they are slow by nature.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose import Numbering
from stallscope.diagnose.arrays import median_of_others, numbered
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array, process_keys
from stallscope.events.names import N_CATEGORIES, P2P_OPS, Category, CollectiveFlag, Op, word
from stallscope.events.trace import Trace
from stallscope.live import host_events

WINDOW_NS = 10 * 10**9
HEAT_S = 120
_COUNTS = {"synchronise": "n_syncs", "allocate, free": "n_allocs", "copy": "n_copies", "launch": "n_launches"}
_CLASSES = {Op.SYNC: "synchronise", Op.ALLOC: "allocate, free", Op.FREE: "allocate, free", Op.COPY: "copy"}
_CLASSES |= {Op.LAUNCH: "launch", Op.GRAPH_LAUNCH: "launch"}

_TABLES = {table.name: table for table in (*layout.TABLES, layout.HOST_EVENTS)}
_USED_COLUMNS = np.dtype(
    [
        (column.name, column.format)
        for column in layout.COLLECTIVES.fields
        if column.name
        in (
            *(
                "ts_ns",
                "node",
                "pid",
                "comm_hash",
                "comm_handle",
                "comm_rank",
                "nranks",
                "seq",
                "op",
                "datatype",
            ),
            *("count", "peer_rank", "flags", "wait_enter_ns", "wait_leave_ns", "gpu_start_ns", "gpu_end_ns"),
        )
    ]
)

ProcessKey = tuple[int, int]
"""Node and pid of a process."""


@dataclass(frozen=True)
class RankLine:
    """One process. late_ms, worst_ms: median and largest lateness in the last ten seconds' rounds, None without any.
    shares: of the last ten seconds, by column of the time ledger. heat_ms: the largest lateness of each of the last
    HEAT_S seconds (of an ended process: before its end), newest last,
    None in a second without rounds. job: number of its job, from 0; -1 without rounds.
    """

    rank: int
    node: str
    pid: int
    comm: str
    n_rounds: int
    late_ms: float | None
    worst_ms: float | None
    shares: tuple[float, ...]
    is_alive: bool
    heat_ms: tuple[float | None, ...] = ()
    job: int = 0


@dataclass(frozen=True)
class OpLine:
    """One operation. n_calls: since the start. timed_ms: durations in the last ten seconds. first_ms: the longest
    first call. only_slow: only calls of at least a millisecond are timed.
    """

    name: str
    n_calls: int
    timed_ms: Array
    first_ms: float | None
    only_slow: bool = False

    def quantile_ms(self, q: float) -> float | None:
        """The q-quantile of the timed calls."""
        return float(np.quantile(self.timed_ms, q)) if len(self.timed_ms) else None


@dataclass
class LiveState:
    """The state. Feed it with batches in order; read lines at any time."""

    now_ns: int = 0
    n_records: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    processes: dict[ProcessKey, tuple[int, str]] = field(default_factory=dict)
    ended: set[ProcessKey] = field(default_factory=set)
    n_rounds: dict[ProcessKey, int] = field(default_factory=dict)
    n_ops: dict[int, int] = field(default_factory=dict)
    _window: dict[str, deque[Array]] = field(default_factory=dict)
    _counts: dict[ProcessKey, tuple[Array, Array]] = field(default_factory=dict)
    _first: dict[tuple[ProcessKey, int], float] = field(default_factory=dict)
    _first_rounds: dict[int, int] = field(default_factory=dict)
    _window_rows: dict[str, Array] = field(default_factory=dict)
    _matched: tuple[Array, Array] | None = None
    _numbering: Numbering = field(default_factory=Numbering)
    _heat: dict[ProcessKey, dict[int, float]] = field(default_factory=dict)
    _latest: dict[ProcessKey, tuple[float, float]] = field(default_factory=dict)
    _latest_shares: dict[ProcessKey, tuple[float, ...]] = field(default_factory=dict)
    _comms_of: dict[ProcessKey, set[int]] = field(default_factory=dict)
    _estimated_comms: dict[ProcessKey, set[int]] = field(default_factory=dict)
    _job_mates: dict[ProcessKey, set[ProcessKey]] = field(default_factory=dict)

    def feed(self, batch: Trace) -> None:
        """Add new rows."""
        self._matched = None
        self._window_rows = {}
        self.nodes, self.symbols = batch.nodes or self.nodes, batch.symbols or self.symbols
        self.n_records += sum(len(getattr(batch, table.name)) for table in layout.TABLES)
        for kind, n in batch.lost.items():
            self.lost[kind] = self.lost.get(kind, 0) + n
        for row in batch.processes:
            self.processes[_process_key(row)] = (int(row["rank"]), row["comm"].decode("utf-8", "replace"))
        self._update_ended(batch.snapshots)
        self._count_collectives(batch.collectives)
        calls = self._without_first(batch.calls)
        for name, rows in (("collectives", batch.collectives), ("calls", calls), ("offcpu", batch.offcpu)):
            self._append_to_window(name, rows)
        self._append_to_window("snapshots", batch.snapshots)
        self._append_to_window("host_events", batch.host_events)
        self.now_ns = max(
            self.now_ns, *batch.ends_ns, *(int(rows["ts_ns"].max()) for rows in _non_empty_tables(batch))
        )
        self._drop_old_batches()

    def ranks(self) -> list[RankLine]:
        """A line for each process that has called a collective or is alive, by node and rank.

        The values of an ended process are its last values.
        """
        late = self._late_ms()
        self._latest |= late
        jobs = self._jobs()
        lines = []
        for key, (rank, comm) in self.processes.items():
            is_alive = key not in self.ended
            n_rounds = self.n_rounds.get(key, 0)
            if not is_alive and not n_rounds:
                continue
            node = self.nodes[key[0]] if key[0] < len(self.nodes) else ""
            shares = self._shares(key)
            if any(shares):
                self._latest_shares[key] = shares
            late_ms, worst_ms = (
                late.get(key, (None, None)) if is_alive else self._latest.get(key, (None, None))
            )
            lines.append(
                RankLine(
                    rank,
                    node,
                    key[1],
                    comm,
                    n_rounds,
                    late_ms,
                    worst_ms,
                    self._latest_shares.get(key, shares) if not is_alive else shares,
                    is_alive,
                    self._heat_ms(key),
                    jobs.get(key, -1),
                )
            )
        return sorted(lines, key=lambda line: (line.node, line.rank if line.rank >= 0 else 1 << 40, line.pid))

    def operations(self) -> list[OpLine]:
        """A line for each operation: collectives by the lead of each rank over the last rank."""
        lines = self._collective_lines()
        calls = self.window("calls")
        waits = self._waits_ms()
        for name, column in _COUNTS.items():
            n = self._total(column)
            ops = [int(op) for op, called in _CLASSES.items() if called == name]
            timed = calls["duration_ns"][np.isin(calls["op"], ops) & (calls["duration_ns"] >= 0)] / 1e6
            first = [ms for (_, symbol_op), ms in self._first.items() if symbol_op >> 16 in ops]
            is_wait = name == "synchronise" and len(waits)
            if n or len(timed):
                lines.append(
                    OpLine(name, n, waits if is_wait else timed, max(first, default=None), not is_wait)
                )
        return lines

    def hosts(self) -> list[tuple[str, int, float]]:
        """Processes that took the CPU from the job in the last ten seconds: name, pid, ms; the worst three."""
        preempted = self.window("offcpu")
        preempted = preempted[
            (preempted["by_pid"] != UNKNOWN) & (preempted["category"] == Category.PREEMPTED)
        ]
        ms_by_process: dict[tuple[str, int], float] = {}
        for row in preempted:
            key = (row["by_comm"].decode("utf-8", "replace"), int(row["by_pid"]))
            ms_by_process[key] = ms_by_process.get(key, 0.0) + max(int(row["duration_ns"]), 0) / 1e6
        return sorted(((*key, ms) for key, ms in ms_by_process.items()), key=lambda entry: -entry[2])[:3]

    def machine(self) -> list[str]:
        """Host events that affected the job in the last ten seconds."""
        return host_events.lines(self.window("host_events"), self.processes)

    def window(self, name: str) -> Array:
        """The rows of the last ten seconds; for collectives only the columns used here."""
        if name not in self._window_rows:
            batches = self._window.get(name)
            rows = _concatenate(batches) if batches else _used_columns(name, layout.empty(_TABLES[name]))
            self._window_rows[name] = rows[rows["ts_ns"] >= self.now_ns - WINDOW_NS]
        return self._window_rows[name]

    @property
    def was_late(self) -> bool:
        """Whether ranks ran before the capture began: only the diagnosis can match their rounds."""
        return bool(_is_late_attach(self.window("collectives")).any())

    @property
    def n_communicators(self) -> int:
        """Number of communicators with at least one round; estimated for ranks that ran before the capture began."""
        known, jobs = set(self._first_rounds) - {0}, self._jobs()
        # The estimated numbers of two jobs may be equal.
        estimated = {
            (jobs[key], comm) for key, comms in self._estimated_comms.items() for comm in comms - known
        }
        return len(known) + len(estimated) or len(self._first_rounds)

    @property
    def n_lost(self) -> int:
        """Records lost, of all kinds."""
        return sum(self.lost.values())

    def _count_collectives(self, rows: Array) -> None:
        for op, n in zip(*np.unique(rows["op"], return_counts=True), strict=True):
            self.n_ops[int(op)] = self.n_ops.get(int(op), 0) + int(n)
        is_round = ~np.isin(rows["op"], P2P_OPS) & (rows["seq"] >= 0)
        for process, n in _count_by_process(rows[is_round]):
            self.n_rounds[process] = self.n_rounds.get(process, 0) + n
        for comm in np.unique(rows["comm_hash"]).tolist():
            first = int(rows["seq"][rows["comm_hash"] == comm].min())
            self._first_rounds.setdefault(comm, first)
        for process, process_rows in _by_process(rows):
            now = np.array([int(process_rows[column][-1]) for column in _COUNTS.values()])
            before = np.array([int(process_rows[column][0]) for column in _COUNTS.values()])
            self._counts[process] = (self._counts.get(process, (before, now))[0], now)

    def _update_ended(self, rows: Array) -> None:
        self.ended |= {_process_key(row) for row in rows if not row["alive"]}
        self.ended -= {_process_key(row) for row in rows if row["alive"]}

    def _without_first(self, calls: Array) -> Array:
        """The calls without the first call of each function in each process, which is counted separately."""
        is_later = np.ones(len(calls), bool)
        for i, row in enumerate(calls):
            key = (_process_key(row), int(row["op"]) << 16 | int(row["symbol"]))
            if key not in self._first:
                self._first[key] = max(int(row["duration_ns"]), 0) / 1e6
                is_later[i] = False
        return calls[is_later]

    def _append_to_window(self, name: str, rows: Array) -> None:
        if len(rows):
            self._window.setdefault(name, deque()).append(_used_columns(name, rows))

    def _drop_old_batches(self) -> None:
        for batches in self._window.values():
            while batches and int(batches[0]["ts_ns"].max()) < self.now_ns - WINDOW_NS:
                batches.popleft()

    def _rounds(self) -> tuple[Array, Array]:
        """The collectives of the window that are rounds and not first rounds, and the round number of each.

        The numbers of ranks that ran before the capture began are estimated, as in the diagnosis.
        """
        if self._matched is None:
            rows = self._renumbered(self.window("collectives"))
            rows = rows[~np.isin(rows["op"], P2P_OPS) & (rows["seq"] >= 0)]
            self._group(rows)
            comms, comm_index = np.unique(rows["comm_hash"], return_inverse=True)
            first_rounds = np.array([self._first_rounds.get(int(comm), -1) for comm in comms], np.int64)
            rows, comm_index = (
                rows[rows["seq"] > first_rounds[comm_index]],
                comm_index[rows["seq"] > first_rounds[comm_index]],
            )
            self._matched = rows, numbered(comm_index, rows["seq"])[0]
        return self._matched

    def _group(self, rows: Array) -> None:
        """Keep the communicators of each process, and the processes that share an estimated communicator.

        The estimate of an ended process stays: the window loses the rows on which it rests.
        """
        estimated: dict[ProcessKey, set[int]] = {}
        for process, indices in _positions(rows):
            is_late = _is_late_attach(rows[indices])
            known = self._comms_of.setdefault(process, set())
            known.update(np.unique(rows["comm_hash"][indices[~is_late]]).tolist())
            if is_late.any():
                estimated[process] = set(np.unique(rows["comm_hash"][indices[is_late]]).tolist())
        for process in estimated.keys() - self.ended:
            comms = self._estimated_comms[process] = estimated[process]
            self._job_mates[process] = {other for other in estimated if estimated[other] & comms}

    def _renumbered(self, rows: Array) -> Array:
        """The rows with matching round numbers, by known shifts or by shifts computed from the window."""
        if not _is_late_attach(rows).any():
            return rows
        return self._numbering.matched(rows[np.lexsort((rows["ts_ns"], rows["pid"], rows["node"]))])

    def _jobs(self) -> dict[ProcessKey, int]:
        """The job of each process: processes that share a communicator are one job; numbered by first appearance."""
        jobs: dict[ProcessKey, int] = {}
        groups: list[tuple[set[object], list[ProcessKey]]] = []
        for key in self._comms_of:
            late_in_known = self._estimated_comms.get(key, set()) & self._first_rounds.keys() - {0}
            links = {key, *self._comms_of[key], *late_in_known, *self._job_mates.get(key, ())}
            linked = [group for group in groups if group[0] & links]
            groups = [group for group in groups if not group[0] & links]
            all_links = links.union(*(group[0] for group in linked))
            groups.append((all_links, [process for group in linked for process in group[1]] + [key]))
        order = {key: i for i, key in enumerate(self.processes)}
        for number, (_, keys) in enumerate(
            sorted(groups, key=lambda group: min(order.get(k, 0) for k in group[1]))
        ):
            jobs |= dict.fromkeys(keys, number)
        return jobs

    def _heat_ms(self, key: ProcessKey) -> tuple[float | None, ...]:
        seconds = self._heat.get(key, {})
        last = max(seconds, default=0) if key in self.ended else self.now_ns // 10**9
        return tuple(seconds.get(second) for second in range(last - HEAT_S + 1, last + 1))

    def _keep_heat(self, rows: Array, late_ms: Array) -> None:
        """The largest lateness of each process in each second; seconds before HEAT_S are forgotten."""
        oldest = self.now_ns // 10**9 - HEAT_S
        for process, at in _positions(rows):
            seconds = self._heat.setdefault(process, {})
            active_seconds, index = np.unique(rows["ts_ns"][at] // 10**9, return_inverse=True)
            largest = np.full(len(active_seconds), -np.inf)
            np.maximum.at(largest, index, late_ms[at])
            seconds |= zip(active_seconds.tolist(), largest.tolist(), strict=True)
            for second in [second for second in seconds if second < oldest]:
                del seconds[second]

    def _late_ms(self) -> dict[ProcessKey, tuple[float, float]]:
        """By process the median and the largest lateness against the median of each round's other arrivals."""
        rows, number = self._rounds()
        late = np.nan_to_num((rows["ts_ns"] - median_of_others(number, rows["ts_ns"])) / 1e6)
        self._keep_heat(rows, late)
        return {
            process: (float(np.median(late[at])), float(late[at].max())) for process, at in _positions(rows)
        }

    def _collective_lines(self) -> list[OpLine]:
        rows, number = self._rounds()
        last = np.zeros(int(number.max(initial=-1)) + 1, np.int64)
        np.maximum.at(last, number, rows["ts_ns"])
        ahead_ms = (last[number] - rows["ts_ns"]) / 1e6
        return [
            OpLine(word(Op, op), n, ahead_ms[rows["op"] == op], None) for op, n in sorted(self.n_ops.items())
        ]

    def _waits_ms(self) -> Array:
        rows = self.window("collectives")
        rows = rows[(rows["wait_leave_ns"] > 0) & (rows["wait_enter_ns"] > 0)]
        _, first = np.unique(
            np.stack([rows["node"], rows["pid"], rows["wait_enter_ns"]]), axis=1, return_index=True
        )
        return (rows["wait_leave_ns"] - rows["wait_enter_ns"])[first] / 1e6

    def _total(self, column: str) -> int:
        index = list(_COUNTS.values()).index(column)
        return int(sum(now[index] - before[index] for before, now in self._counts.values()))

    def _shares(self, process: ProcessKey) -> tuple[float, ...]:
        """Shares of the last ten seconds by category; all 0 if not yet known."""
        rows = self.window("snapshots")
        rows = rows[(rows["node"] == process[0]) & (rows["pid"] == process[1])]
        if len(rows) < 2:
            return (0.0,) * N_CATEGORIES
        spent = np.clip(rows["ledger_ns"][-1] - rows["ledger_ns"][0], 0, None)
        return tuple((spent / max(int(spent.sum()), 1)).tolist())


def _is_late_attach(rows: Array) -> Array:
    return (rows["flags"] & CollectiveFlag.LATE_ATTACH) > 0


def _used_columns(name: str, rows: Array) -> Array:
    """The rows; for collectives only the used columns, a seventh of the size: they are copied every second."""
    if name != "collectives":
        return rows
    out = np.empty(len(rows), _USED_COLUMNS)
    for column in _USED_COLUMNS.names or ():
        out[column] = rows[column]
    return out


def _concatenate(parts: Iterable[Array]) -> Array:
    """One array of all batches: np.concatenate is slow at comparing structured dtypes."""
    arrays = list(parts)
    joined = np.empty(sum(map(len, arrays)), arrays[0].dtype)
    at = 0
    for rows in arrays:
        joined[at : at + len(rows)] = rows
        at += len(rows)
    return joined


def _process_key(row: Array) -> ProcessKey:
    return int(row["node"]), int(row["pid"])


def _positions(rows: Array) -> Iterable[tuple[ProcessKey, Array]]:
    key = process_keys(rows)
    for value in np.unique(key).tolist():
        yield (value >> 32, value & 0xFFFFFFFF), np.flatnonzero(key == value)


def _by_process(rows: Array) -> Iterable[tuple[ProcessKey, Array]]:
    return ((process, rows[at]) for process, at in _positions(rows))


def _count_by_process(rows: Array) -> Iterable[tuple[ProcessKey, int]]:
    return ((process, len(at)) for process, at in _positions(rows))


def _non_empty_tables(batch: Trace) -> list[Array]:
    return [rows for rows in (batch.collectives, batch.calls, batch.offcpu, batch.snapshots) if len(rows)]
