"""Runs a user's SQL on a node trace, limited to reading. The file is opened read-only, an authorizer refuses
every action that is not reading, and time, rows and the size of a value are limited.

The time limit counts the engine's steps. It does not stop a single function of the engine that runs forever (a LIKE
with many wildcards on a long text), so a server runs queries in a process that can be killed.
"""

import difflib
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.errors import BadInput, RefusedQuery, StallscopeError, TookTooLong
from stallscope.query.sql_functions import add_functions
from stallscope.query.trace_views import add_views
from stallscope.store.node import reading
from stallscope.store.time_range import Part, narrow, windows

_STEPS_PER_CHECK = 10_000
_MAX_SQL_BYTES = 1_000_000
_MAX_VALUE_BYTES = 10_000_000
_MAX_LIKE_BYTES = 200
_READING_PRAGMAS = ("table_info", "table_xinfo", "table_list")
_REFUSED_FUNCTIONS = ("load_extension", "fts3_tokenizer", "sqlite_log")
_TABLES = (
    "SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """max_rows: further rows are cut off, and the answer is marked as cut. timeout_s: the query is then stopped."""

    max_rows: int = 1000
    timeout_s: float = 10.0


@dataclass(frozen=True)
class Answer:
    """The rows of a statement, values as SQLite returns them (int, float, str, bytes, None).

    columns: unique names. is_cut: there were more rows than the limit.
    """

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]
    is_cut: bool = False


@dataclass
class _Gate:
    """The engine's authorizer, called before each action. refused: the refused actions."""

    refused: list[str] = field(default_factory=list)

    def __call__(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if _is_reading(action, first, second):
            return sqlite3.SQLITE_OK
        self.refused.append(_ACTION_NAMES.get(action, "an action that is not reading"))
        return sqlite3.SQLITE_DENY


_ACTION_NAMES = {
    sqlite3.SQLITE_INSERT: "INSERT",
    sqlite3.SQLITE_UPDATE: "UPDATE",
    sqlite3.SQLITE_DELETE: "DELETE",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
    sqlite3.SQLITE_TRANSACTION: "a transaction",
    sqlite3.SQLITE_FUNCTION: "a function that reaches outside",
}


def ask(
    path: Path,
    statement: str,
    *,
    limits: Limits | None = None,
    since_ns: int | None = None,
    part: Part | None = None,
) -> Answer:
    """The rows of one read-only statement over the trace in a file.

    since_ns: only events of the last since_ns before each node's newest; part: further limits of the same kind. Raises
    BadInput for a wrong statement, RefusedQuery for a statement that does more than read, TookTooLong, NotFound,
    BadTrace, NewerSchema.
    """
    limits = limits or Limits()
    with reading(path) as db:
        add_functions(db)
        _narrow(db, part or Part(since_ns=since_ns))
        add_views(db)
        gate = _Gate()
        _limit(db)
        # The engine declares these tables at their first use, which the gate would take for a change of the schema.
        db.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')").fetchall()
        db.set_authorizer(gate)
        db.set_progress_handler(_deadline(limits.timeout_s), _STEPS_PER_CHECK)
        try:
            cursor = db.execute(statement)
            if cursor.description is None:
                raise BadInput("the statement is empty: give one SELECT")
            rows = cursor.fetchmany(limits.max_rows + 1)
        except (sqlite3.Error, sqlite3.Warning) as error:
            if getattr(error, "sqlite_errorcode", None) in _DAMAGED:
                raise
            refusal = _refusal(error, gate, limits, statement)
            if isinstance(refusal, BadInput):
                refusal = BadInput(f"{refusal}{_advice(db, str(error))}")
            raise refusal from error
    columns = tuple(column[0] for column in cursor.description)
    return Answer(_unique_names(columns), rows[: limits.max_rows], is_cut=len(rows) > limits.max_rows)


def rows_by_table(
    path: Path, part: Part
) -> Iterator[tuple[str, dict[str, str], Iterable[tuple[object, ...]]]]:
    """Every table of a trace: name, SQL type by column, rows (to be read before the next table).

    part: as in ask(). Raises NotFound, BadTrace, NewerSchema.
    """
    with reading(path) as db:
        _narrow(db, part)
        for (table,) in db.execute(_TABLES).fetchall():
            columns = {row[1]: row[2] for row in db.execute(f"PRAGMA main.table_info({table})")}
            yield table, columns, db.execute(f"SELECT * FROM {table} ORDER BY 1")


def _is_reading(action: int, first: str | None, second: str | None) -> bool:
    if action == sqlite3.SQLITE_FUNCTION:
        return second not in _REFUSED_FUNCTIONS
    if action == sqlite3.SQLITE_PRAGMA:
        return first in _READING_PRAGMAS
    return action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)


def _limit(db: sqlite3.Connection) -> None:
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _MAX_SQL_BYTES)
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    db.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _MAX_LIKE_BYTES)


def _deadline(timeout_s: float) -> Callable[[], int]:
    """Returns 1 once the time is over, which stops the engine."""
    end_s = time.monotonic() + timeout_s
    return lambda: int(time.monotonic() > end_s)


def _narrow(db: sqlite3.Connection, part: Part) -> None:
    if not part.is_whole:
        narrow(db, windows(db, part))


_CHANGES = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(DROP|ALTER|CREATE|REPLACE|VACUUM|REINDEX|ANALYZE)\b", re.I | re.S
)
"""Statements that the engine carries out by other actions: it reports DROP as DELETE, and VACUUM as ATTACH."""


def _first_word(statement: str) -> str:
    match = _CHANGES.match(statement)
    return match[1].upper() if match else ""


def _refusal(error: Exception, gate: _Gate, limits: Limits, statement: str) -> StallscopeError:
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_INTERRUPT:
        return TookTooLong(
            f"the query took longer than {limits.timeout_s:g} s: narrow it (WHERE, --since), or give it more "
            "time (--timeout)"
        )
    if gate.refused:
        action = _first_word(statement) or gate.refused[0]
        return RefusedQuery(f"a query may only read, and this query uses {action}: give one SELECT")
    if code == sqlite3.SQLITE_TOOBIG:
        return BadInput(
            f"the query produces a value of more than {_MAX_VALUE_BYTES:,} bytes: narrow the query"
        )
    if "one statement" in str(error):
        return BadInput("there is more than one statement: give one SELECT")
    return BadInput(f"SQL: {error}")


def _advice(db: sqlite3.Connection, message: str) -> str:
    """The remedy for a name that does not exist: the closest existing name."""
    missing = re.match(r"no such (table|column): (?:\w+\.)?(\w+)$", message)
    if not missing:
        return "" if "near" not in message else "; `stallscope query --schema` lists tables and columns"
    db.set_authorizer(None)
    listed = "SELECT name FROM sqlite_master WHERE type = 'table' UNION SELECT name FROM sqlite_temp_master"
    tables = [name for (name,) in db.execute(listed)]
    existing = tables
    if missing[1] == "column":
        existing = [row[1] for table in tables for row in db.execute(f"PRAGMA table_info({table})")]
    close = difflib.get_close_matches(missing[2], existing, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"; {meant}`stallscope query --schema` lists tables and columns"


def _unique_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, with a number appended to repeated names."""
    unique: list[str] = []
    for name in names:
        number, candidate = 2, name
        while candidate in unique:
            candidate, number = f"{name}_{number}", number + 1
        unique.append(candidate)
    return tuple(unique)
