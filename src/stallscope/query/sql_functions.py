"""Functions that stallscope adds to SQLite: names for numbers, wall-clock times, and exact quantiles.

`median` and `quantile_cont` have DuckDB's names, so that a statement works in both engines.
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from functools import cache

from stallscope.events.names import Category, Datatype, Op

FUNCTIONS = {
    "op_name(op)": "the operation in words: all_reduce, copy, sync",
    "category_name(category)": "the category of the ledger in words: io, lock, on_cpu",
    "datatype_name(datatype)": "the datatype in words: float32",
    "hash_text(comm_hash)": "the communicator as explain prints it: 16 hexadecimal digits",
    "node_name(node)": "the name of the machine",
    "wall_time(node, ts_ns)": "UTC as text, by the nearest reading of that node's clocks; NULL without one",
    "rank_of(node, pid)": "rank of the process in its job; NULL where it is unknown",
    "median(x)": "the median of a group",
    "quantile_cont(x, q)": "the q-quantile of a group, 0 <= q <= 1, interpolated",
}
"""Signature and meaning of each function."""


def add_functions(db: sqlite3.Connection) -> None:
    """Make FUNCTIONS available in the connection's SQL."""
    for name, enumeration in (("op_name", Op), ("category_name", Category), ("datatype_name", Datatype)):
        db.create_function(name, 1, _member_name(enumeration), deterministic=True)
    db.create_function("hash_text", 1, _hash_text, deterministic=True)
    db.create_function("node_name", 1, _node_name(db), deterministic=True)
    db.create_function("wall_time", 2, _wall_time(db), deterministic=True)
    db.create_function("rank_of", 2, _rank_of(db), deterministic=True)
    # The type stubs require classes with exact signatures; the engine requires step() and finalize().
    db.create_aggregate("median", 1, Median)  # type: ignore[arg-type]
    db.create_aggregate("quantile_cont", 2, Quantile)  # type: ignore[arg-type]


def quantile(values: list[float], q: float) -> float | None:
    """The q-quantile of sorted values, interpolated between neighbours (numpy's and DuckDB's default)."""
    if not values:
        return None
    index = q * (len(values) - 1)
    below = int(index)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (index - below)


@dataclass
class Quantile:
    """The aggregate quantile_cont; NULLs do not count."""

    values: list[float] = field(default_factory=list)
    q: float = 0.5

    def step(self, value: float | None, q: float) -> None:
        """Take one row. Raises ValueError for a q outside 0..1, which the engine reports."""
        if not 0 <= q <= 1:
            raise ValueError(q)
        self.q = q
        if value is not None:
            self.values.append(float(value))

    def finalize(self) -> float | None:
        """The quantile of the values so far."""
        return quantile(sorted(self.values), self.q)


@dataclass
class Median:
    """The aggregate median; NULLs do not count."""

    values: list[float] = field(default_factory=list)

    def step(self, value: float | None) -> None:
        """Take one row."""
        if value is not None:
            self.values.append(float(value))

    def finalize(self) -> float | None:
        """The median of the values so far."""
        return quantile(sorted(self.values), 0.5)


def _member_name(enumeration: type[IntEnum]) -> Callable[[int | None], str | None]:
    names = {int(member): member.name.lower() for member in enumeration}
    return lambda number: names.get(number, str(number)) if number is not None else None


def _hash_text(comm_hash: int | None) -> str | None:
    return None if comm_hash is None else f"{comm_hash & ((1 << 64) - 1):016x}"


def _node_name(db: sqlite3.Connection) -> Callable[[int | None], str | None]:
    @cache
    def names() -> dict[int, str]:
        return dict(db.execute("SELECT node, name FROM main.nodes"))

    return lambda node: None if node is None else names().get(node, str(node))


def _wall_time(db: sqlite3.Connection) -> Callable[[int | None, int | None], str | None]:
    @cache
    def readings(node: int) -> tuple[list[int], list[int]]:
        statement = "SELECT monotonic_ns, wall_ns FROM main.clocks WHERE node = ? ORDER BY monotonic_ns"
        pairs = db.execute(statement, (node,)).fetchall()
        return [at for at, _ in pairs], [wall - at for at, wall in pairs]

    def wall_time(node: int | None, ts_ns: int | None) -> str | None:
        if node is None or ts_ns is None:
            return None
        at, offset = readings(node)
        if not at:
            return None
        after = bisect_right(at, ts_ns)
        near = max(min(after, len(at) - 1), 0)
        if after and abs(at[after - 1] - ts_ns) <= abs(at[near] - ts_ns):
            near = after - 1
        wall_us = (ts_ns + offset[near]) // 1000
        moment = datetime.fromtimestamp(wall_us // 10**6, UTC).replace(microsecond=wall_us % 10**6)
        return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")

    return wall_time


def _rank_of(db: sqlite3.Connection) -> Callable[[int | None, int | None], int | None]:
    @cache
    def ranks() -> dict[tuple[int, int], int]:
        rows = db.execute("SELECT node, pid, rank FROM main.processes WHERE rank IS NOT NULL ORDER BY ts_ns")
        return {(node, pid): rank for node, pid, rank in rows}

    return lambda node, pid: None if node is None or pid is None else ranks().get((node, pid))
