"""Merges several traces into one file, with every row of every table and new numbers for nodes and symbols.

Two sources that name the same node are refused, because their processes could not be distinguished afterwards. With
`force_node` the later node gets a new name.
"""

import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stallscope.errors import BadInput
from stallscope.events.layout import EVENT_TABLES, NODE_TABLES, UNKNOWN, Array, Table, is_node_trace
from stallscope.importers import importer_for
from stallscope.store import node, sqlite_columns
from stallscope.store.node import NodeTrace, reading

_ROWS_AT_ONCE = 50_000
_BY_NODE = ("clocks", "losses", "sessions", "annotations")
"""Tables other than events whose rows belong to a node and are not referenced by other rows."""


@dataclass(frozen=True)
class Merged:
    """The content of one source. nodes: their names in the new file. n_rows: by table, without empty tables."""

    source: Path
    nodes: tuple[str, ...]
    n_rows: Mapping[str, int]


def merge(sources: Sequence[Path], out: Path, *, force_node: bool = False) -> list[Merged]:
    """Write the traces into a new file, which exists only once all of them are in it.

    A source is a trace, or a file that can be imported. Raises BadInput for a node that two sources name, NotFound,
    BadTrace, NewerSchema, StorageFailed.
    """
    merged: list[Merged] = []
    used_names: dict[str, Path] = {}
    with node.new_file(out) as store:
        for source in sources:
            with _as_trace(source) as path, reading(path) as db:
                names = _names(db, source, used_names, force_node=force_node)
                used_names |= dict.fromkeys(names.values(), source)
                merged.append(_Copy(db, store, names).copy_all(source))
        store.commit()
    return merged


@contextmanager
def _as_trace(source: Path) -> Iterator[Path]:
    """The source as the path of a trace: itself, or a temporary trace made by an importer."""
    if _is_trace(source):
        yield source
        return
    trace = importer_for(source).read(source)
    with tempfile.TemporaryDirectory(prefix="stallscope-merge-") as folder:
        path = Path(folder) / "imported.db"
        node.write(path, trace)
        yield path


def _is_trace(source: Path) -> bool:
    """Whether the file is or claims to be a stallscope trace; a damaged trace is reported when it is read."""
    node.check_no_pipe(source)
    if not source.is_file():
        return not source.exists()
    with source.open("rb") as file:
        head = file.read(72)
    return is_node_trace(head)


def _names(
    db: sqlite3.Connection, source: Path, used_names: Mapping[str, Path], *, force_node: bool
) -> dict[int, str]:
    """New names of the source's nodes, by their numbers in it."""
    names: dict[int, str] = {}
    for number, name in db.execute("SELECT node, name FROM nodes ORDER BY node"):
        if name in used_names and not force_node:
            raise BadInput(
                f"{used_names[name]} and {source} both have a node {name!r}: "
                "give --force-node to keep them apart under new names"
            )
        names[number] = _unused_name(name, {*used_names, *names.values()})
    return names


def _unused_name(name: str, used_names: set[str]) -> str:
    number, candidate = 2, name
    while candidate in used_names:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


class _Copy:
    """Copies one source into the store."""

    def __init__(self, db: sqlite3.Connection, store: NodeTrace, names: Mapping[int, str]):
        self._db, self._store = db, store
        self._names = names
        self._nodes = {number: store.node(name) for number, name in names.items()}
        symbols = db.execute("SELECT symbol, name FROM symbols")
        self._symbols = {0: 0} | {number: store.symbol(name) for number, name in symbols}
        self._stacks: dict[int, int] = {}

    def copy_all(self, source: Path) -> Merged:
        """Copy every table and count its rows."""
        counts = {"stacks": self._copy_stacks(), "verdicts": self._copy_verdicts()}
        counts |= {name: self._copy_by_node(name) for name in _BY_NODE}
        counts |= {table.name: self._copy_events(table) for table in EVENT_TABLES}
        order = [table.name for table in EVENT_TABLES] + [*_BY_NODE, "stacks", "verdicts"]
        return Merged(
            source, tuple(self._names.values()), {name: counts[name] for name in order if counts[name]}
        )

    def _copy_events(self, table: Table) -> int:
        """Copy by id, so that the order of equal times stays; a column missing in an older source is unknown, or 0."""
        existing = sqlite_columns.existing_columns(self._db, table)
        if not existing and table in NODE_TABLES:
            return 0
        n_rows = 0
        rows, last = self._events_after(table, 0, existing)
        while len(rows):
            self._renumber(rows)
            self._store.append(table, rows)
            self._store.commit()
            n_rows += len(rows)
            rows, last = self._events_after(table, last, existing)
        return n_rows

    def _events_after(self, table: Table, last: int, existing: Collection[str]) -> tuple[Array, int]:
        columns = sqlite_columns.select_list(table, existing)
        rows = self._db.execute(
            f"SELECT {columns}, id FROM {table.name} WHERE id > ? ORDER BY id LIMIT {_ROWS_AT_ONCE}", (last,)
        ).fetchall()
        return sqlite_columns.rows(table, (row[:-1] for row in rows)), rows[-1][-1] if rows else last

    def _renumber(self, rows: Array) -> None:
        rows["node"] = _renumber_column(rows["node"], self._nodes)
        names = rows.dtype.names or ()
        if "symbol" in names:
            rows["symbol"] = _renumber_column(rows["symbol"], self._symbols)
        if "stack" in names:
            rows["stack"] = _renumber_column(rows["stack"], self._stacks | {UNKNOWN: UNKNOWN})

    def _copy_by_node(self, name: str) -> int:
        rows = self._rows(name)
        for row in rows:
            row.pop("id", None)
            row["node"] = self._nodes[row["node"]]
        return self._insert(name, rows)

    def _copy_stacks(self) -> int:
        rows = self._rows("stacks")
        first = self._store.next_number("stacks", "stack")
        for number, row in enumerate(rows, first):
            self._stacks[row["stack"]] = row["stack"] = number
            row["node"] = self._nodes[row["node"]]
        return self._insert("stacks", rows)

    def _copy_verdicts(self) -> int:
        rows = self._rows("verdicts")
        for row in rows:
            row.pop("id", None)
        return self._insert("verdicts", rows)

    def _rows(self, name: str) -> list[dict[str, int]]:
        cursor = self._db.execute(f"SELECT * FROM {name} ORDER BY rowid")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def _insert(self, name: str, rows: list[dict[str, int]]) -> int:
        if rows:
            self._store.insert(name, list(rows[0]), [list(row.values()) for row in rows])
        return len(rows)


def _renumber_column(column: Array, numbers: Mapping[int, int]) -> Array:
    """The column with its numbers replaced. Raises KeyError for a number that the source does not define."""
    values, inverse = np.unique(column, return_inverse=True)
    return np.array([numbers[int(value)] for value in values], column.dtype)[inverse]
