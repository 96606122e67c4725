"""Updates the metrics of the node from the rows that the agent stores."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stallscope.events import histograms, layout
from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.names import CATEGORY_NAMES, P2P_OPS, Direction, MemoryKind, Op, word
from stallscope.events.owner import GROUP_LABELS, column
from stallscope.events.request_times import first_token_ns
from stallscope.exporters import metric_table as table_of
from stallscope.exporters.metric_values import Meter

_KEPT_ROUNDS = 4096
"""Incomplete rounds kept; older rounds are given up: a rank died, or a record was lost."""

_COUNTED = {"n_syncs": "sync", "n_allocs": "alloc", "n_copies": "copy", "n_launches": "launch"}


@dataclass
class MetricUpdates:
    """The state between two batches: running sums by process, open rounds, open incidents."""

    meter: Meter
    _rank: dict[int, str] = field(default_factory=dict)
    _owner: dict[int, list[str]] = field(default_factory=dict)
    _engine: dict[int, tuple[str, str]] = field(default_factory=dict)
    _calls: dict[int, Array] = field(default_factory=dict)
    _ledger: dict[int, Array] = field(default_factory=dict)
    _waited: dict[int, int] = field(default_factory=dict)
    _open: Array = field(default_factory=lambda: np.zeros(0, layout.dtype(layout.COLLECTIVES)))
    _members: dict[int, set[int]] = field(default_factory=dict)
    _incidents: dict[str, tuple[str, str]] = field(default_factory=dict)

    def take(self, table: Table, rows: Array) -> None:
        """Count the rows of one batch."""
        self.meter.add(table_of.RECORDS, len(rows), table.name)
        counts: dict[str, Callable[[Array], None]] = {
            "processes": self._named,
            "collectives": self._collectives,
            "calls": self._slow_calls,
            "snapshots": self._states,
            "operations": self._operations,
            "memory": self._memory,
            "owners": self._owned,
            "servers": self._engines,
            "requests": self._requests,
            "tokens": self._tokens,
        }
        if len(rows) and table.name in counts:
            counts[table.name](rows)

    def process_ended(self, pid: int) -> None:
        """End the series of a process that has ended."""
        self._owner.pop(pid, None)
        self._engine.pop(pid, None)

    def n_processes(self, n: int) -> None:
        """The number of processes traced now, and the owners of the running processes."""
        self.meter.set(table_of.PROCESSES, n)
        owners = {(str(pid), self.rank_of(pid), *values): 1.0 for pid, values in self._owner.items()}
        self.meter.replace(table_of.OWNER, owners)

    def lost(self, kind: str, n: int) -> None:
        """Lost records."""
        self.meter.add(table_of.LOST, n, kind)

    def incident(self, incident_id: str, *, kind: str, cause: str, is_open: bool) -> None:
        """An incident was opened, updated or closed. Its kind and its cause may change while it is open."""
        before, now = self._incidents.pop(incident_id, None), (kind, cause) if is_open else None
        if now:
            self._incidents[incident_id] = now
        if now == before:
            return
        if before:
            self.meter.add(table_of.INCIDENTS_OPEN, -1, *before)
        else:
            self.meter.add(table_of.INCIDENTS, 1, kind, cause)
        if now:
            self.meter.add(table_of.INCIDENTS_OPEN, 1, *now)

    def _named(self, rows: Array) -> None:
        for row in rows:
            if row["rank"] != UNKNOWN:
                self._rank[int(row["pid"])] = str(row["rank"])

    def _owned(self, rows: Array) -> None:
        for row in rows:
            self._owner[int(row["pid"])] = [row[column(label)].decode() for label in GROUP_LABELS]

    def _engines(self, rows: Array) -> None:
        """Engine and model of each process."""
        for row in rows:
            engine, model = _words(row, "engine", "model")
            self._engine[int(row["pid"])] = engine, model

    def _requests(self, rows: Array) -> None:
        """The times of requests, by engine, model and path."""
        names = ["engine", "model", "path"]
        for key in np.unique(rows[names]):
            own = rows[rows[names] == key]
            values = _words(key, *names)
            self.meter.observe(table_of.TIME_TO_FIRST_TOKEN, first_token_ns(own) / 1e9, *values)
            self.meter.observe(table_of.REQUEST_DURATION, (own["end_ns"] - own["ts_ns"]) / 1e9, *values)

    def _tokens(self, rows: Array) -> None:
        """The times between tokens, by engine, model and path."""
        for row in rows:
            counts = histograms.joined([row["histogram"]])
            engine, model = self._engine.get(int(row["pid"]), ("", ""))
            self.meter.observe_counted(
                table_of.TIME_PER_OUTPUT_TOKEN,
                np.array(list(counts)) / 1e6,
                np.array(list(counts.values())),
                float(row["total_ns"]) / 1e9,
                *(engine, model, *_words(row, "path")),
            )

    def rank_of(self, pid: int) -> str:
        """The rank as text; `unknown` without a rank from the launcher or a communicator."""
        return self._rank.get(pid, "unknown")

    def _collectives(self, rows: Array) -> None:
        self._rank_by_communicator(rows)
        for pid in np.unique(rows["pid"]).tolist():
            process_rows = rows[rows["pid"] == pid]
            rank = self.rank_of(pid)
            for op in np.unique(process_rows["op"]).tolist():
                n = int((process_rows["op"] == op).sum())
                self.meter.add(table_of.COLLECTIVE_CALLS, n, rank, word(Op, int(op)))
            self._waits(pid, process_rows, rank)
            self._sums(pid, process_rows, rank)
        for op in np.unique(rows["op"]).tolist():
            sizes = rows["count_bytes"][(rows["op"] == op) & (rows["count_bytes"] != UNKNOWN)]
            self.meter.observe(table_of.COLLECTIVE_SIZE, sizes, word(Op, int(op)))
        self._lateness(rows)

    def _rank_by_communicator(self, rows: Array) -> None:
        """Without a launcher's rank, the rank in the first communicator, which is the job's as a rule."""
        known = rows[rows["comm_rank"] != UNKNOWN]
        pids, first = np.unique(known["pid"], return_index=True)
        for pid, row in zip(pids.tolist(), known[first], strict=True):
            self._rank.setdefault(pid, str(row["comm_rank"]))

    def _waits(self, pid: int, rows: Array, rank: str) -> None:
        """Count each wait once: several arrivals may follow it before the next wait."""
        leave = rows["wait_leave_ns"]
        is_new = (leave != UNKNOWN) & (rows["wait_enter_ns"] != UNKNOWN) & (leave > self._waited.get(pid, -1))
        fresh = rows[is_new]
        _, first = np.unique(fresh["wait_leave_ns"], return_index=True)
        took = fresh["wait_leave_ns"][first] - fresh["wait_enter_ns"][first]
        self.meter.observe(table_of.COLLECTIVE_WAIT, took / 1e9, rank)
        if len(fresh):
            self._waited[pid] = int(fresh["wait_leave_ns"].max())

    def _sums(self, pid: int, rows: Array, rank: str) -> None:
        """Add the growth of the running sums that the kernel keeps for the process."""
        newest = rows[int(np.argmax(rows["ts_ns"]))]
        total = np.array([int(newest[name]) for name in _COUNTED])
        grown = np.maximum(total - self._calls.get(pid, np.zeros_like(total)), 0)
        for name, n in zip(_COUNTED.values(), grown.tolist(), strict=True):
            if n:
                self.meter.add(table_of.CUDA_CALLS, n, rank, name)
        self._calls[pid] = np.maximum(total, self._calls.get(pid, total))

    def _lateness(self, rows: Array) -> None:
        """Observe the rounds in which every rank of this node has arrived; the others wait for the next batch."""
        rounds = rows[(rows["seq"] != UNKNOWN) & ~np.isin(rows["op"], P2P_OPS)]
        for comm, pid in set(zip(rounds["comm_hash"].tolist(), rounds["pid"].tolist(), strict=True)):
            self._members.setdefault(comm, set()).add(pid)
        waiting = np.concatenate([self._open, rounds])
        if not len(waiting):
            return
        key = np.stack([waiting["comm_hash"], waiting["seq"].astype(np.uint64)], axis=1)
        _, which, n = np.unique(key, axis=0, return_inverse=True, return_counts=True)
        which = which.reshape(-1)
        n_members = np.array([len(self._members[comm]) for comm in waiting["comm_hash"].tolist()])
        is_complete = (n[which] >= n_members) & (n_members > 1)
        first = np.full(len(n), np.iinfo(np.int64).max)
        np.minimum.at(first, which, waiting["ts_ns"])
        late = (waiting["ts_ns"] - first[which]) / 1e9
        for pid in np.unique(waiting["pid"][is_complete]).tolist():
            process_rows = is_complete & (waiting["pid"] == pid)
            self.meter.observe(table_of.COLLECTIVE_LATENESS, late[process_rows], self.rank_of(pid))
        self._open = waiting[~is_complete & (n_members > 1)][-_KEPT_ROUNDS:]

    def _slow_calls(self, rows: Array) -> None:
        done = rows[rows["duration_ns"] != UNKNOWN]
        for pid, op in set(zip(done["pid"].tolist(), done["op"].tolist(), strict=True)):
            took = done["duration_ns"][(done["pid"] == pid) & (done["op"] == op)]
            self.meter.observe(table_of.CUDA_SLOW_CALL, took / 1e9, self.rank_of(pid), word(Op, int(op)))

    def _operations(self, rows: Array) -> None:
        """The duration of a bucket's calls is estimated as three quarters of the bucket's upper edge, its middle."""
        for row in rows:
            buckets = json.loads(row["histogram"] or b"{}")
            rank = self.rank_of(int(row["pid"]))
            is_ioctl = row["op"] == Op.IOCTL
            attributes = (rank,) if is_ioctl else (rank, word(Op, int(row["op"])))
            middle_s = np.array([int(edge) for edge in buckets], np.float64) * 0.75 / 1e9
            timed_s = float(row["total_ns"]) / 1e9 * float(row["n_seen"]) / max(float(row["n"]), 1.0)
            self.meter.observe_counted(
                table_of.DRIVER_CALL if is_ioctl else table_of.CUDA_CALL,
                middle_s,
                np.array(list(buckets.values())),
                timed_s,
                *attributes,
            )
            if row["n_failed"]:
                errors = table_of.DRIVER_ERRORS if is_ioctl else table_of.CUDA_ERRORS
                self.meter.add(errors, int(row["n_failed"]), *attributes)
            if row["op"] == Op.COPY and row["count_bytes"]:
                direction = Direction(row["direction"]).name.lower()
                self.meter.add(table_of.CUDA_COPIED, int(row["count_bytes"]), rank, direction)

    def _memory(self, rows: Array) -> None:
        """The current memory in use, by device and kind."""
        for row in rows:
            device = "unknown" if row["device"] == UNKNOWN else str(row["device"])
            attributes = (self.rank_of(int(row["pid"])), device, MemoryKind(row["kind"]).name.lower())
            self.meter.set(table_of.CUDA_MEMORY, int(row["live_bytes"]), *attributes)

    def _states(self, rows: Array) -> None:
        """Add the growth of the time ledger since the last snapshot of each process."""
        for pid in np.unique(rows["pid"]).tolist():
            process_rows = rows[rows["pid"] == pid]
            ledger = process_rows["ledger_ns"][int(np.argmax(process_rows["ts_ns"]))]
            grown = np.maximum(ledger - self._ledger.get(pid, np.zeros_like(ledger)), 0)
            for name, ns in zip(CATEGORY_NAMES, grown.tolist(), strict=True):
                if ns:
                    self.meter.add(table_of.LEDGER_TIME, ns / 1e9, self.rank_of(pid), name)
            self._ledger[pid] = np.maximum(ledger, self._ledger.get(pid, ledger))


def _words(row: Array, *names: str) -> tuple[str, ...]:
    """Text columns of a row."""
    return tuple(bytes(row[name]).decode("utf-8", "replace") for name in names)
