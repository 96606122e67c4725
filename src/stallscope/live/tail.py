"""Follows a node trace from another process: returns new rows batch by batch."""

import json
import sqlite3
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallscope.events.layout import ARRAYS, PROCESSES, UNKNOWN, Table, empty
from stallscope.events.trace import Clock, Trace
from stallscope.store import sqlite_columns
from stallscope.store.node import LATER_TABLES, has_table

_MAX_ROWS = 100_000
"""Rows per table and batch, so that a reader that starts late catches up in steps."""

_IDS = "SELECT id FROM processes WHERE id > ? AND id <= ? ORDER BY id"


@dataclass
class TraceTail:
    """db: a connection from store.node.reading(). since_ns: ignore older rows, on CLOCK_MONOTONIC of this machine."""

    db: sqlite3.Connection
    since_ns: int = 0
    _last: dict[str, int] = field(default_factory=dict)
    _stored: dict[int, bytes] = field(default_factory=dict)
    _all_ended: int = 0

    def __post_init__(self) -> None:
        self._last["verdicts"] = self.db.execute("SELECT COALESCE(MAX(id), 0) FROM verdicts").fetchone()[0]

    def batch(self) -> Trace:
        """The new rows since the last call; node numbers as in the file, from 0."""
        names = dict(self.db.execute("SELECT node, name FROM nodes"))
        tables = {table.name: self._new_events(table) for table in ARRAYS}
        ends = dict(self.db.execute("SELECT node, MAX(ended_ns) FROM sessions GROUP BY node"))
        session = self.db.execute("SELECT source, facts FROM sessions ORDER BY id DESC LIMIT 1").fetchone()
        symbols = dict(self.db.execute("SELECT symbol, name FROM symbols"))
        n_nodes = max(names, default=0) + 1
        return Trace(
            **tables,
            probed=(),
            stacks=self._new_stacks(),
            nodes=tuple(names.get(node, "") for node in range(n_nodes)),
            symbols=tuple(symbols.get(i, "") for i in range(max(symbols, default=0) + 1)),
            clocks=tuple(
                Clock(*row) for row in self._new_rows("clocks", "node, monotonic_ns, wall_ns, error_ns")
            ),
            lost=self._lost(),
            ends_ns=tuple(ends.get(node) or -1 for node in range(n_nodes)),
            source=session[0] if session else "",
            facts=json.loads(session[1]) if session else {},
        )

    def with_changes(self, batch: Trace) -> Trace:
        """The last batch, plus earlier processes whose end or rank is known by now.

        The agent updates both in the existing row.
        """
        columns = sqlite_columns.select_list(PROCESSES, sqlite_columns.existing_columns(self.db, PROCESSES))
        query = f"SELECT {columns} FROM processes WHERE id > ? AND id <= ? ORDER BY id"
        bounds = (self._all_ended, self._last[PROCESSES.name])
        ids = [number for (number,) in self.db.execute(_IDS, bounds)]
        rows = sqlite_columns.rows(PROCESSES, self.db.execute(query, bounds))
        current = {number: row.tobytes() for number, row in zip(ids, rows, strict=True)}
        new_ids = ids[len(ids) - len(batch.processes) :]
        stored = self._stored | {n: row.tobytes() for n, row in zip(new_ids, batch.processes, strict=True)}
        is_changed = [stored.get(number, current[number]) != current[number] for number in ids]
        running = [number for number, row in zip(ids, rows, strict=True) if row["ended_ns"] == UNKNOWN]
        self._stored = current
        self._all_ended = min(running, default=bounds[1] + 1) - 1
        changed = rows[np.array(is_changed, bool)]
        return replace(batch, processes=np.concatenate([batch.processes, changed]))

    def verdicts(self) -> list[tuple[int, dict[str, Any]]]:
        """The changes of incidents since the last call: wall time, and the verdict with its incident and state."""
        rows = self._new_rows("verdicts", "made_wall_ns, verdict")
        return [(at_ns, json.loads(verdict)) for at_ns, verdict in rows]

    def _new_events(self, table: Table) -> Any:
        if table.name in LATER_TABLES and not has_table(self.db, table.name):
            return empty(table)
        if table.name not in self._last:
            self._last[table.name] = self._last_old_row(table.name)
        last = self._last[table.name]
        names = sqlite_columns.select_list(table, sqlite_columns.existing_columns(self.db, table))
        query = f"SELECT {names} FROM {table.name} WHERE id > ? ORDER BY id LIMIT {_MAX_ROWS}"
        rows = sqlite_columns.rows(table, self.db.execute(query, (last,)))
        if len(rows):
            newest = f"SELECT MAX(id) FROM (SELECT id FROM {table.name} WHERE id > ? ORDER BY id LIMIT {len(rows)})"
            self._last[table.name] = self.db.execute(newest, (last,)).fetchone()[0]
        return rows

    def _last_old_row(self, table: str) -> int:
        """The last row that is too old. Processes and communicators are never too old: other rows refer to them."""
        if table in ("processes", "communicators", "owners"):
            return 0
        query = f"SELECT id FROM {table} WHERE ts_ns < ? ORDER BY ts_ns DESC LIMIT 1"
        row = self.db.execute(query, (self.since_ns,)).fetchone()
        return int(row[0]) if row else 0

    def _new_rows(self, table: str, columns: str) -> list[tuple[Any, ...]]:
        last = self._last.get(table, 0)
        rows = self.db.execute(
            f"SELECT rowid, {columns} FROM {table} WHERE rowid > ? ORDER BY rowid", (last,)
        ).fetchall()
        self._last[table] = rows[-1][0] if rows else last
        return [row[1:] for row in rows]

    def _new_stacks(self) -> dict[int, tuple[str, ...]]:
        """The stacks of servers' threads since the last call, by number."""
        rows = self._new_rows("stacks", "stack, frames")
        return {number: tuple(json.loads(frames)) for number, frames in rows}

    def _lost(self) -> dict[str, int]:
        lost: dict[str, int] = {}
        for ts_ns, kind, n in self._new_rows("losses", "ts_ns, kind, n_lost"):
            if ts_ns >= self.since_ns:
                lost[kind] = lost.get(kind, 0) + n
        return lost
