"""The node trace: one SQLite file in WAL mode, written by one process and read by many.

NodeTrace writes. read() reads and never changes the file; it works during live writes and on a
read-only copy at rest.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import numpy as np

from stallscope import __version__
from stallscope.errors import BadTrace, NewerSchema, NotFound, StorageFailed
from stallscope.events.layout import (
    APPLICATION_ID,
    ARRAYS,
    IDLE_GPUS,
    NODE_TABLES,
    OWNERS,
    PROCESSES,
    TABLES,
    UNKNOWN,
    Array,
    Table,
    empty,
)
from stallscope.events.trace import Clock, Coverage, Trace, WallClock
from stallscope.store import sqlite_columns, sqlite_pages
from stallscope.store.time_range import Part, narrow, windows

SCHEMA_VERSION = 2

_DAMAGED = (ValueError, OverflowError, TypeError, KeyError)
"""Errors for values that a column cannot hold, text that is not UTF-8, and numbers without a meaning."""
_STATEMENTS = 40
"""The number of compiled statements kept; statements for many rows are used once, and take 20 to 80 KB."""

COVERAGE = "coverage"
"""The fact of a session that holds its trace's Coverage, as text."""

_PRUNED = (
    *((table.name, "ts_ns") for table in TABLES if "ended_ns" not in {field.name for field in table.fields}),
    *((table.name, "ts_ns") for table in NODE_TABLES if table is not OWNERS),
    ("losses", "ts_ns"),
    ("annotations", "ts_ns"),
    ("clocks", "monotonic_ns"),
)
"""The tables that prune() deletes from; processes and communicators are few, and needed to name ranks. The owner of a
process is kept while the process runs."""

_DELETE_OWNERS = (
    "DELETE FROM owners WHERE ts_ns <= ? AND NOT EXISTS (SELECT 1 FROM processes AS p"
    " WHERE p.node = owners.node AND p.pid = owners.pid AND p.ended_ns IS NULL)"
)

LATER_TABLES = frozenset(table.name for table in NODE_TABLES)
"""Tables that a trace of an earlier version may lack."""


class NodeTrace:
    """A node trace open for writing. Rows become visible to readers at commit()."""

    def __init__(self, path: Path):
        """Open the trace at `path`, created if missing. Raises StorageFailed, BadTrace, NewerSchema."""
        self.path = path
        with _storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            create_file(path)
            self._connection = sqlite3.connect(
                path, isolation_level=None, timeout=10.0, cached_statements=_STATEMENTS
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise
        self._symbols: dict[str, int] = dict(self._connection.execute("SELECT name, symbol FROM symbols"))

    def _prepare(self) -> None:
        db = self._connection
        if _is_empty(db):
            _create_schema(db)
        _check_schema(db, self.path)
        _upgrade(db)
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("BEGIN")

    def session(self, node: int, source: str, *, started_ns: int, facts: dict[str, str] | None = None) -> int:
        """Begin a session, with the writer and the source of the events. Returns its id."""
        with _storage_errors(self.path):
            cursor = self._connection.execute(
                "INSERT INTO sessions (node, started_ns, source, version, facts) VALUES (?, ?, ?, ?, ?)",
                (node, started_ns, source, __version__, json.dumps(facts or {}, sort_keys=True)),
            )
        return int(cursor.lastrowid or 0)

    def end_session(self, session: int, ended_ns: int) -> None:
        """Record the session's end so far; call it once a second, so that a crash loses little."""
        with _storage_errors(self.path):
            self._connection.execute("UPDATE sessions SET ended_ns=? WHERE id=?", (ended_ns, session))

    def node(self, name: str) -> int:
        """The number of a node, assigned on first use."""
        with _storage_errors(self.path):
            self._connection.execute("INSERT OR IGNORE INTO nodes (name) VALUES (?)", (name,))
            return int(self._connection.execute("SELECT node FROM nodes WHERE name=?", (name,)).fetchone()[0])

    def symbol(self, name: str) -> int:
        """The number of an exported function, assigned on first use."""
        if name not in self._symbols:
            with _storage_errors(self.path):
                cursor = self._connection.execute("INSERT INTO symbols (name) VALUES (?)", (name,))
            self._symbols[name] = int(cursor.lastrowid or 0)
        return self._symbols[name]

    def stack(self, node: int, pid: int, frames: Sequence[str]) -> int:
        """The number of a stack, as a new row. frames: in words, innermost first."""
        with _storage_errors(self.path):
            cursor = self._connection.execute(
                "INSERT INTO stacks (node, pid, frames) VALUES (?, ?, ?)",
                (node, pid, json.dumps(frames, ensure_ascii=False)),
            )
        return int(cursor.lastrowid or 0)

    def append(self, table: Table, rows: Array) -> None:
        """Add rows to a table (see events.layout); `node` must come from node()."""
        with _storage_errors(self.path):
            for statement, values in sqlite_columns.insertions(table, rows):
                self._connection.executemany(statement, values)

    def insert(self, table: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add rows to a table without events. names: the columns of the rows."""
        text = ", ".join("?" * len(names))
        with _storage_errors(self.path):
            self._connection.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({text})", rows)

    def next_number(self, table: str, column: str) -> int:
        """The smallest number above all numbers in the column."""
        with _storage_errors(self.path):
            row = self._connection.execute(f"SELECT COALESCE(MAX({column}), 0) + 1 FROM {table}").fetchone()
        return int(row[0])

    def clock(self, reading: Clock, *, kernel_clock: WallClock | None = None) -> None:
        """Store one reading of the monotonic against the wall clock, and the state of the wall clock."""
        row = (reading.node, reading.monotonic_ns, reading.wall_ns, reading.error_ns)
        state = (
            (
                kernel_clock.is_synchronised,
                kernel_clock.max_error_us,
                kernel_clock.estimated_error_us,
                kernel_clock.frequency_ppm,
            )
            if kernel_clock
            else (None,) * 4
        )
        with _storage_errors(self.path):
            self._connection.execute(
                "INSERT INTO clocks (node, monotonic_ns, wall_ns, error_ns, is_synchronised, max_error_us,"
                " estimated_error_us, frequency_ppm) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, *state),
            )

    def lost(self, node: int, ts_ns: int, losses: Iterable[tuple[str, int | None, int]]) -> None:
        """Store losses since the last call: (kind, cpu or None, records)."""
        with _storage_errors(self.path):
            self._connection.executemany(
                "INSERT INTO losses VALUES (?, ?, ?, ?, ?)",
                [(node, ts_ns, kind, cpu, n_lost) for kind, cpu, n_lost in losses],
            )

    def process_ended(self, node: int, pid: int, ended_ns: int) -> None:
        """Record the end of a traced process."""
        with _storage_errors(self.path):
            self._connection.execute(
                "UPDATE processes SET ended_ns=? WHERE node=? AND pid=? AND ended_ns IS NULL",
                (ended_ns, node, pid),
            )

    def end_unobserved(self, node: int, still_runs: Callable[[int, int], bool]) -> Array:
        """Record the end of the processes of earlier sessions that have ended since. Returns their rows of PROCESSES.

        still_runs: gets the pid and the time at which the process was first seen. The time of the end is not known:
        it is recorded as the end of the last session, up to which the process was observed.
        """
        with _storage_errors(self.path):
            db = self._connection
            session_ns = db.execute("SELECT MAX(ended_ns) FROM sessions WHERE node=?", (node,)).fetchone()[0]
            open_rows = db.execute(
                "SELECT pid, ts_ns FROM processes WHERE node=? AND ended_ns IS NULL", (node,)
            ).fetchall()
            gone = [
                (pid, max(ts_ns, session_ns or 0)) for pid, ts_ns in open_rows if not still_runs(pid, ts_ns)
            ]
            for pid, ended_ns in gone:
                self.process_ended(node, pid, ended_ns)
                self._repeat_last_snapshot(node, pid, ended_ns)
            rows = _read_table(db, PROCESSES)
            return rows[(rows["node"] == node) & np.isin(rows["pid"], [pid for pid, _ in gone])]

    def _repeat_last_snapshot(self, node: int, pid: int, ended_ns: int) -> None:
        """The last snapshot of a process, marked as ended."""
        columns = [row[1] for row in self._connection.execute("PRAGMA table_info(snapshots)")]
        columns.remove("id")
        values = ", ".join({"ts_ns": "MAX(ts_ns, ?)", "alive": "0"}.get(name, name) for name in columns)
        self._connection.execute(
            f"INSERT INTO snapshots ({', '.join(columns)}) SELECT {values} FROM snapshots"
            " WHERE node=? AND pid=? ORDER BY ts_ns DESC LIMIT 1",
            (ended_ns, node, pid),
        )

    def process_rank_known(self, node: int, pid: int, rank: int, *, nranks: int) -> None:
        """Record the rank of a running process that was not known at its first record."""
        with _storage_errors(self.path):
            self._connection.execute(
                "UPDATE processes SET rank=?, nranks=? WHERE node=? AND pid=? AND ended_ns IS NULL",
                (rank, nranks, node, pid),
            )

    def process_device_known(self, node: int, pid: int, device: int) -> None:
        """Record the GPU of a running process that was not known at its first record."""
        with _storage_errors(self.path):
            self._connection.execute(
                "UPDATE processes SET device=? WHERE node=? AND pid=? AND ended_ns IS NULL",
                (device, node, pid),
            )

    def process_libraries_known(self, node: int, pid: int, libraries: str) -> None:
        """Record the communication libraries of a running process that were loaded after its first record."""
        with _storage_errors(self.path):
            self._connection.execute(
                "UPDATE processes SET libraries=? WHERE node=? AND pid=? AND ended_ns IS NULL",
                (libraries, node, pid),
            )

    def communicator_ended(self, node: int, pid: int, comm_hash: int, *, ended_ns: int) -> None:
        """Record that a process left a communicator."""
        signed = comm_hash - (1 << 64) if comm_hash >> 63 else comm_hash
        with _storage_errors(self.path):
            self._connection.execute(
                "UPDATE communicators SET ended_ns=?"
                " WHERE node=? AND pid=? AND comm_hash=? AND ended_ns IS NULL",
                (ended_ns, node, pid, signed),
            )

    def commit(self) -> None:
        """Make the appended rows visible. Raises StorageFailed; no row of the batch is then stored."""
        with _storage_errors(self.path):
            self._connection.execute("COMMIT")
            self._connection.execute("BEGIN")

    def prune(
        self, max_bytes: int, *, before_ns: int | None = None, owners_before_ns: int | None = None
    ) -> int:
        """Delete the oldest events until the file fits. Returns the rows deleted.

        max_bytes: 0 sets no limit. before_ns: events up to this monotonic time are deleted in any case.
        owners_before_ns: only owners up to this time are deleted; None: with the other events.
        """
        n_deleted = 0
        with _storage_errors(self.path):
            has_own_age = owners_before_ns is not None
            if owners_before_ns is not None:
                n_deleted += self._delete_owners(owners_before_ns)
            if before_ns is not None:
                n_deleted += self._delete_until(before_ns, keeps_owners=has_own_age)
            while max_bytes and self._bytes() > max_bytes:
                times = [
                    self._connection.execute(f"SELECT MIN({column}), MAX({column}) FROM {name}").fetchone()
                    for name, column in _PRUNED
                ]
                oldest = min((first for first, _ in times if first is not None), default=0)
                newest = max((last for _, last in times if last is not None), default=0)
                if newest <= oldest:
                    break
                limit = oldest + max((newest - oldest) // 10, 1)
                n_deleted += self._delete_until(limit, keeps_owners=has_own_age)
        return n_deleted

    def _delete_owners(self, limit_ns: int) -> int:
        """Delete owners of ended processes and of idle GPUs up to this time. Returns the rows deleted."""
        n_rows = self._connection.execute(_DELETE_OWNERS, (limit_ns,)).rowcount
        held = self._connection.execute(f"DELETE FROM {IDLE_GPUS.name} WHERE ts_ns <= ?", (limit_ns,))
        self.commit()
        return n_rows + held.rowcount

    def _delete_until(self, limit_ns: int, *, keeps_owners: bool) -> int:
        """Delete the events up to this time, and free their pages. Returns the rows deleted."""
        n_deleted = 0
        for name, column in _PRUNED:
            cursor = self._connection.execute(f"DELETE FROM {name} WHERE {column} <= ?", (limit_ns,))
            n_deleted += cursor.rowcount
        if not keeps_owners:
            n_deleted += self._connection.execute(_DELETE_OWNERS, (limit_ns,)).rowcount
        self.commit()
        if n_deleted:
            self._connection.execute("COMMIT")
            # A script, since one step of this statement frees one page.
            self._connection.executescript("PRAGMA incremental_vacuum")
            self._connection.execute("BEGIN")
        return n_deleted

    def _bytes(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def close(self) -> None:
        """Commit and close; the WAL is merged into the file."""
        with _storage_errors(self.path):
            try:
                if self._connection.in_transaction:  # a full disk ends the transaction
                    self._connection.execute("COMMIT")
            finally:
                self._connection.close()


def write(path: Path, trace: Trace) -> None:
    """Write a whole trace as a new file: completely or not at all. Raises StorageFailed.

    An existing file is never touched.
    """
    with new_file(path) as store:
        add(store, trace)


@contextmanager
def new_file(path: Path) -> Iterator[NodeTrace]:
    """A new trace to fill, which exists at `path` once the with block is left without an error.

    An existing file is never touched. Raises StorageFailed.
    """
    if path.exists():
        raise StorageFailed(f"{path} exists already: choose another name, or remove it first")
    temporary = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        try:
            store = NodeTrace(temporary)
        except StorageFailed as error:
            raise StorageFailed(str(error).replace(str(temporary), str(path))) from error
        try:
            yield store
        finally:
            store.close()
        with _storage_errors(path):
            os.link(temporary, path)  # fails if the path exists by now, where rename would replace it
    finally:
        _remove_database(temporary)


def add(store: NodeTrace, trace: Trace) -> None:
    """Append a whole trace to an open store, with new numbers for its nodes and symbols, and commit."""
    nodes = [store.node(name) for name in trace.nodes]
    symbols = [0, *(store.symbol(name) for name in trace.symbols[1:])]
    coverage = {COVERAGE: text} if (text := trace.coverage.to_text()) else {}
    for number, node in enumerate(nodes):
        facts = trace.facts if number else trace.facts | coverage
        session = store.session(node, trace.source, started_ns=0, facts=facts)
        if number < len(trace.ends_ns) and trace.ends_ns[number] >= 0:
            store.end_session(session, trace.ends_ns[number])
    stacks = {number: store.stack(nodes[0], 0, frames) for number, frames in trace.stacks.items()}
    for table in ARRAYS:
        rows = getattr(trace, table.name).copy()
        rows["node"] = _renumbered(rows["node"], nodes)
        if "symbol" in (rows.dtype.names or ()):
            rows["symbol"] = _renumbered(rows["symbol"], symbols)
        if "stack" in (rows.dtype.names or ()):
            rows["stack"] = [stacks.get(number, UNKNOWN) for number in rows["stack"].tolist()]
        store.append(table, rows)
    for clock in trace.clocks:
        store.clock(Clock(nodes[clock.node], clock.monotonic_ns, clock.wall_ns, clock.error_ns))
    store.lost(nodes[0], 0, [(kind, None, n) for kind, n in trace.lost.items() if n])
    store.commit()


def read(path: Path, since_ns: int | None = None, *, part: Part | None = None) -> Trace:
    """The trace in a file. since_ns: only events of the last since_ns before the newest; part: further limits.

    Never changes the file. Raises NotFound, BadTrace, NewerSchema.
    """
    part = part or Part(since_ns=since_ns)
    with reading(path) as db:
        last_ns: dict[int, int] = {}
        if not part.is_whole:
            chosen_windows = windows(db, part)
            narrow(db, chosen_windows)
            last_ns = {
                node: node_windows[-1][1] for node, node_windows in chosen_windows.items() if node_windows
            }
        db.execute("BEGIN")  # one snapshot of all tables: an agent may be writing
        names = dict(db.execute("SELECT node, name FROM nodes"))
        numbers = {node: i for i, node in enumerate(sorted(names))}
        tables = _read_all_tables(db) if part.is_whole else {t.name: _read_table(db, t) for t in ARRAYS}
        for rows in tables.values():
            rows["node"] = _renumbered(rows["node"], numbers)
        _clear_later_ends(
            tables["processes"], {numbers[node]: ns for node, ns in last_ns.items() if node in numbers}
        )
        clocks = db.execute(
            "SELECT node, monotonic_ns, wall_ns, error_ns FROM clocks ORDER BY node, monotonic_ns"
        )
        ended = dict(db.execute("SELECT node, MAX(ended_ns) FROM sessions GROUP BY node"))
        sessions = db.execute("SELECT source, facts FROM sessions ORDER BY id").fetchall() or [("", "{}")]
        facts = [json.loads(text) for _, text in sessions]
        coverage = Coverage.joined(
            Coverage.from_text(session_facts.pop(COVERAGE, "")) for session_facts in facts
        )
        symbols = dict(db.execute("SELECT symbol, name FROM symbols"))
        return Trace(
            **tables,
            probed=(),
            stacks=_read_stacks(db, tables.values()),
            nodes=tuple(names[node] for node in sorted(names)) or ("",),
            symbols=tuple(symbols.get(i, "") for i in range(max(symbols, default=0) + 1)),
            clocks=tuple(Clock(numbers[node], *times) for node, *times in clocks if node in numbers),
            lost=dict(db.execute(question("losses"))),
            ends_ns=tuple(
                min(_or_unknown(ended.get(node)), last_ns.get(node, 1 << 62)) for node in sorted(names)
            ),
            source=sessions[0][0],
            facts=facts[0],
            coverage=coverage,
        )


def _clear_later_ends(processes: Array, last_ns: Mapping[int, int]) -> None:
    """Processes that ended after the part of a trace that is read count as running."""
    for node, ns in last_ns.items():
        processes["ended_ns"][(processes["node"] == node) & (processes["ended_ns"] >= ns)] = UNKNOWN


def check_no_pipe(path: Path) -> None:
    """Raises BadTrace for a named pipe: reading it could wait forever, and a trace is read more than once."""
    if path.is_fifo():
        raise BadTrace(f"{path} is a pipe; write its content to a file, and give that file")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot change the file. Raises NotFound, BadTrace, NewerSchema."""
    if not path.exists():
        raise NotFound(
            f"no trace at {path}: start one with `stallscope trace --db {path}`, or check the path"
        )
    if path.is_dir():
        raise BadTrace(
            f"{path} is a folder, not a trace: `stallscope import {path} --db OUT` reads recordings"
        )
    check_no_pipe(path)
    options = "mode=ro" if _is_live(path) or os.access(path.parent, os.W_OK) else "mode=ro&immutable=1"
    try:
        db = sqlite3.connect(f"file:{quote(os.fsencode(path.absolute()))}?{options}", uri=True, timeout=10.0)
    except sqlite3.Error as error:
        raise BadTrace(f"cannot open {path}: {error}; check that you may read it") from error
    try:
        _check_schema(db, path)
        yield db
    except (sqlite3.Error, *_DAMAGED) as error:
        raise BadTrace(
            f"cannot read {path}: {error}; it is not a stallscope trace, or it is damaged"
        ) from error
    finally:
        db.close()


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Whether a trace has a table: a trace of an earlier version may lack it."""
    return bool(
        db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone()
    )


def question(name: str) -> str:
    """The SQL of a named query."""
    return files("stallscope.store").joinpath("sql", f"{name}.sql").read_text()


def _read_all_tables(db: sqlite3.Connection) -> dict[str, Array]:
    """All tables. Large tables are read from the pages of the file, as that is several times as fast."""
    existing = [table for table in ARRAYS if not _is_missing(db, table)]
    large = [table for table in existing if _is_large(db, table)]
    pages = sqlite_pages.copy_of(db) if large else None
    from_pages = {table.name: pages.rows(db, table) for table in large} if pages else {}
    return {
        table.name: _read_table(db, table)
        if (rows := from_pages.get(table.name)) is None
        else _sorted_by_time(rows)
        for table in ARRAYS
    }


def _is_large(db: sqlite3.Connection, table: Table) -> bool:
    """Whether a query for each row of the table would take longer than a copy of the file."""
    (n_ids,) = db.execute(f"SELECT (SELECT MAX(id) FROM {table.name}) - MIN(id) FROM {table.name}").fetchone()
    (n_pages,) = db.execute("PRAGMA page_count").fetchone()
    return n_ids is not None and n_ids >= n_pages


def _sorted_by_time(rows: Array) -> Array:
    """Rows in order of id, sorted by time."""
    ts_ns = rows["ts_ns"]
    return rows if (ts_ns[1:] >= ts_ns[:-1]).all() else rows[np.argsort(ts_ns, kind="stable")]


def _read_table(db: sqlite3.Connection, table: Table) -> Array:
    if _is_missing(db, table):
        return empty(table)
    columns = sqlite_columns.select_list(table, sqlite_columns.existing_columns(db, table))
    rows = db.execute(f"SELECT {columns} FROM {table.name} ORDER BY ts_ns, id")
    return sqlite_columns.rows(table, rows)


def _is_missing(db: sqlite3.Connection, table: Table) -> bool:
    return table.name in LATER_TABLES and not has_table(db, table.name)


def _read_stacks(db: sqlite3.Connection, tables: Iterable[Array]) -> dict[int, tuple[str, ...]]:
    """The stacks that rows of these tables name; entries that are not lists of frames are left out."""
    columns = (rows["stack"] for rows in tables if "stack" in (rows.dtype.names or ()))
    numbers = {number for column in columns for number in np.unique(column).tolist()} - {UNKNOWN}
    if not numbers:
        return {}
    stored = (
        (number, text) for number, text in db.execute("SELECT stack, frames FROM stacks") if number in numbers
    )
    return {number: frames for number, text in stored if (frames := _frames(text))}


def _frames(text: str) -> tuple[str, ...]:
    try:
        frames = json.loads(text)
    except (ValueError, TypeError):
        return ()
    return tuple(frame for frame in frames if isinstance(frame, str)) if isinstance(frames, list) else ()


def _renumbered(column: Array, numbers: Sequence[int] | dict[int, int]) -> Array:
    renumbered = column.copy()
    for old in np.unique(column).tolist():
        renumbered[column == old] = numbers[old]
    return renumbered


def _or_unknown(value: int | None) -> int:
    return -1 if value is None else value


def _is_live(path: Path) -> bool:
    return path.with_name(path.name + "-wal").exists()


def _statements(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if not line.startswith("--")]
    return [text.strip() for text in "\n".join(lines).split(";") if text.strip()]


def create_file(path: Path, *, mode: int = 0o644, group: int | None = None) -> None:
    """Create a missing trace with its tables in one step, so that no reader opens a file without tables.

    group: number of the group that the file belongs to. Where the file system has no links, no file is created.
    Raises OSError, sqlite3.Error.
    """
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    _remove_database(temporary)  # of a killed process with the same number, as in containers
    try:
        os.close(new_descriptor(temporary, mode=mode, group=group))
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            _create_schema(db)
        with suppress(OSError):
            os.link(temporary, path)
    finally:
        _remove_database(temporary)


def new_descriptor(path: Path, *, mode: int, group: int | None) -> int:
    """The descriptor of a new, empty file. Raises OSError, FileExistsError if it exists."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        if group is not None:
            os.fchown(fd, -1, group)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_database(path: Path) -> None:
    """Remove a database and its companion files, where they exist; an earlier error is the relevant one."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(OSError):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _is_empty(db: sqlite3.Connection) -> bool:
    return not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]


def _create_schema(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA auto_vacuum=INCREMENTAL")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("BEGIN IMMEDIATE")
    for statement in _statements(question("schema")):
        db.execute(statement)
    _create(db, TABLES)
    db.execute("INSERT INTO schema_version VALUES (?, ?)", (SCHEMA_VERSION, time.time_ns()))
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.execute("COMMIT")


def _create(db: sqlite3.Connection, tables: Iterable[Table]) -> None:
    for table in tables:
        db.execute(sqlite_columns.create_statement(table))
        db.execute(f"CREATE INDEX {table.name}_ts ON {table.name} (ts_ns)")


_CLOCK_SINCE_2 = {"max_error_us": "INTEGER", "estimated_error_us": "INTEGER", "frequency_ppm": "REAL"}


def _upgrade(db: sqlite3.Connection) -> None:
    """Add the missing tables and columns to a trace, which may be from an earlier version."""
    existing = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    (version,) = db.execute("SELECT MAX(version) FROM schema_version").fetchone()
    missing_tables = [table for table in NODE_TABLES if table.name not in existing]
    clock_has = {row[1] for row in db.execute("PRAGMA table_info(clocks)")}
    added = [
        f"ALTER TABLE clocks ADD COLUMN {name} {kind}"
        for name, kind in _CLOCK_SINCE_2.items()
        if name not in clock_has
    ]
    added += [
        statement
        for table in (*TABLES, *NODE_TABLES)
        if table.name in existing
        for statement in sqlite_columns.add_statements(table, sqlite_columns.existing_columns(db, table))
    ]
    if not missing_tables and not added and version == SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    _create(db, missing_tables)
    for statement in added:
        db.execute(statement)
    if version < SCHEMA_VERSION:
        db.execute("INSERT INTO schema_version VALUES (?, ?)", (SCHEMA_VERSION, time.time_ns()))
    db.execute("COMMIT")


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    try:
        if _is_empty(db):
            raise BadTrace(f"{path} is not a stallscope trace: the file is empty; check the path")
        version = db.execute("SELECT MAX(version) FROM schema_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT:
            raise BadTrace(f"{path} is damaged or incomplete ({error}): copy it again") from error
        raise BadTrace(
            f"{path} is not a stallscope trace ({error}): check the path, or import it first"
        ) from error
    if version is None:
        raise BadTrace(f"{path} has no schema version: it is damaged")
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{path} was written by a newer stallscope (schema {version}, this version supports {SCHEMA_VERSION}): "
            "upgrade stallscope"
        )


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise StorageFailed(
            f"cannot write {path}: {error}; the data stored before is unharmed: "
            "check free space and permissions"
        ) from error
    except (
        sqlite3.DatabaseError,
        UnicodeDecodeError,
    ) as error:  # SQLite quotes damaged data in its errors
        raise BadTrace(
            f"{path} is not a stallscope trace ({error}): choose another path with --db"
        ) from error
