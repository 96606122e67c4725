"""SQLite databases of a node agent that stores CUDA calls and scheduler events in one table `events`.

Recognised by its tables: `events` with source and op numbers, and `ops`, which gives each pair a name.
Times are ns since 1970: the entry of a call, and for `sched_switch` the moment the thread ran again (in the
public databases: the next call of the thread begins 20 us after it). The agent stores only some of the host's events;
per-minute sums in `event_aggregates` cover all events.

Left out: block I/O (the databases hold the agent's own writes), TCP and sockets without the thread that waited, and
the agent's own verdicts. Such a database does not show which rounds the ranks entered.
"""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import Category, Op
from stallscope.events.trace import Clock, Trace
from stallscope.importers.functions import op_of
from stallscope.importers.registry import Importer, Unread

_MAGIC = b"SQLite format 3\0"
_NEEDED = {
    "events": {"timestamp", "pid", "tid", "source", "op", "duration", "arg0", "ret_code"},
    "ops": {"source_id", "op_id", "name"},
}
_MAX_ROWS = 5_000_000
_MAX_NAMES = 100_000
_MAX_SECONDS = 60.0
_MAX_VALUE_BYTES = 1 << 20
_CALL_SOURCES = (1, 4)  # CUDA runtime, CUDA driver
_HOST = 3
_SWITCH = "sched_switch"
_SIZED = (Op.ALLOC, Op.COPY)
_LAST_NS = 2**61  # the year 2043
_MINUTE_NS = 60 * 10**9
_SWITCHES_PER_SECOND = 20
"""A process that leaves the CPU less often may have slept the whole time: its off-CPU sum is then no ledger."""


def _accepts(path: Path, head: bytes) -> bool:
    if head[: len(_MAGIC)] != _MAGIC:
        return False
    try:
        with closing(_opened(path)) as database:
            return all(needed <= _columns(database, table) for table, needed in _NEEDED.items())
    except (OSError, sqlite3.Error, UnicodeDecodeError):  # SQLite quotes damaged data in its errors
        return False


def _opened(path: Path) -> sqlite3.Connection:
    """The database, opened read-only, without trusting its functions, and with a time limit."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    ends_s = time.monotonic() + _MAX_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > ends_s, 100_000)
    return connection


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    is_table = database.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))
    if is_table.fetchone() is None:  # a view could compute anything
        return set()
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    if len(files) != 1:
        raise BadTrace(f"got {len(files)} node databases: give only one, or merge their traces")
    (path,) = files
    try:
        with closing(_opened(path)) as database:
            return _trace(database, path)
    except (sqlite3.Error, OverflowError, TypeError, ValueError, MemoryError) as error:
        raise BadTrace(f"{path} cannot be read as a node database ({error}): copy it again") from error


def _trace(database: sqlite3.Connection, path: Path) -> Trace:
    has_node = "node" in _columns(database, "events")
    names = _rows(database, "SELECT source_id, op_id, name FROM ops", path, _MAX_NAMES)
    op_names = {(int(source), int(op)): str(name)[:64] for source, op, name in names}
    node = "node" if has_node else "''"
    events = _rows(
        database,
        f"SELECT {node}, timestamp, pid, tid, source, op, duration, arg0, ret_code FROM events",
        path,
        _MAX_ROWS,
    )
    nodes = tuple(sorted({str(event[0]) for event in events})) or ("",)
    number = {name: i for i, name in enumerate(nodes)}
    whole = np.array([(number[str(event[0])], *event[1:]) for event in events], dtype=np.int64).reshape(-1, 9)
    if len(whole) and (whole[:, [1, 6]].min() < 0 or whole[:, [1, 6]].max() >= _LAST_NS):
        raise BadTrace(f"{path}: a time or a duration in table events is negative or too large")
    if len(whole) and (whole[:, 2:4].min() < 0 or whole[:, 2:4].max() > 2**31):
        raise BadTrace(f"{path}: a process or thread number in table events is invalid")
    calls, symbols = _calls(whole, op_names)
    offcpu = _offcpu(whole, op_names)
    ends = [_end_ns(whole[whole[:, 0] == i]) for i in range(len(nodes))]
    return Trace(
        calls=calls,
        offcpu=offcpu,
        snapshots=_snapshots(database, path, op_names, ends_ns=max(ends)),
        processes=_processes(database, path, whole, number),
        nodes=nodes,
        symbols=symbols,
        clocks=tuple(Clock(i, end, end) for i, end in enumerate(ends) if end > 0),
        ends_ns=tuple(ends),
        source=f"node database of another agent ({path.name}), {len(nodes)} node{'s' * (len(nodes) > 1)}",
        facts=_facts(database, path),
    )


def _rows(database: sqlite3.Connection, question: str, path: Path, most: int) -> Sequence[tuple[Any, ...]]:
    rows = database.execute(question).fetchmany(most + 1)
    if len(rows) > most:
        raise BadTrace(f"{path} has more than {most:,} rows in a table: cut it down before importing it")
    return rows


def _end_ns(rows: Array) -> int:
    return int((rows[:, 1] + rows[:, 6]).max()) if len(rows) else 0


def _calls(whole: Array, op_names: dict[tuple[int, int], str]) -> tuple[Array, tuple[str, ...]]:
    picked = whole[np.isin(whole[:, 4], _CALL_SOURCES)]
    called = [op_names.get((int(source), int(op)), "") for source, op in picked[:, 4:6]]
    symbols = ("", *sorted(set(called) - {""}))
    index = {name: i for i, name in enumerate(symbols)}
    rows = layout.empty(layout.CALLS, len(picked))
    rows["node"], rows["ts_ns"], rows["pid"], rows["tid"] = picked[:, :4].T
    rows["duration_ns"], rows["result"] = picked[:, 6], np.clip(picked[:, 8], -(2**31), 2**31 - 1)
    rows["symbol"] = [index[name] for name in called]
    rows["op"] = np.array([op_of(name) for name in symbols])[rows["symbol"]]
    is_sized = np.isin(rows["op"], _SIZED)
    rows["count_bytes"][is_sized] = picked[is_sized, 7]
    return rows[np.argsort(rows["ts_ns"], kind="stable")], symbols


def _offcpu(whole: Array, op_names: dict[tuple[int, int], str]) -> Array:
    switches = [op for (source, op), name in op_names.items() if source == _HOST and name == _SWITCH]
    picked = whole[(whole[:, 4] == _HOST) & np.isin(whole[:, 5], switches)]
    rows = layout.empty(layout.OFFCPU, len(picked))
    rows["node"], rows["ts_ns"], rows["pid"], rows["tid"] = picked[:, :4].T
    rows["ts_ns"] -= picked[:, 6]
    rows["duration_ns"] = picked[:, 6]
    rows["category"] = Category.OTHER_OFF  # the cause of the block is not recorded
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _processes(database: sqlite3.Connection, path: Path, whole: Array, number: dict[str, int]) -> Array:
    named = (
        _rows(database, "SELECT pid, name FROM process_names", path, _MAX_NAMES)
        if {"pid", "name"} <= _columns(database, "process_names")
        else []
    )
    names = {int(pid): str(name) for pid, name in named}
    made_calls = whole[np.isin(whole[:, 4], _CALL_SOURCES)]
    keys = {(int(node), int(pid)) for node, pid in made_calls[:, [0, 2]]}
    if len(number) == 1:
        keys |= {(0, pid) for pid in names}
    rows = layout.empty(layout.PROCESSES, len(keys))
    for row, (node, pid) in zip(rows, sorted(keys), strict=True):
        row["node"], row["pid"] = node, pid
        row["comm"] = names.get(pid, "").encode("utf-8", "replace")[:16]
    return rows


def _snapshots(
    database: sqlite3.Connection, path: Path, op_names: dict[tuple[int, int], str], *, ends_ns: int
) -> Array:
    """Ledgers of processes that leave the CPU all the time, by minute: time that was not off the CPU was on it."""
    wanted = {"bucket", "source", "op", "pid", "count", "sum_dur"}
    if not wanted <= _columns(database, "event_aggregates"):
        return layout.empty(layout.SNAPSHOTS)
    sums = _rows(
        database,
        "SELECT bucket, source, op, pid, count, sum_dur FROM event_aggregates ORDER BY bucket",
        path,
        _MAX_ROWS,
    )
    observed: dict[int, Array] = {}
    out = []
    for bucket, source, op, pid, count, off_ns in (tuple(int(value) for value in row) for row in sums):
        length_ns = min(bucket + _MINUTE_NS, ends_ns) - bucket
        is_account = length_ns > 0 and count >= _SWITCHES_PER_SECOND * length_ns / 1e9
        if op_names.get((source, op)) != _SWITCH or not is_account:
            continue
        rows = layout.empty(layout.SNAPSHOTS, 2)
        rows["pid"], rows["alive"] = pid, 1
        rows["ts_ns"] = bucket, bucket + length_ns
        before = observed.get(pid, rows["ledger_ns"][0])
        off_ns = min(max(off_ns, 0), length_ns)
        rows["ledger_ns"] = before
        rows["ledger_ns"][1, Category.OTHER_OFF - 1] += off_ns
        rows["ledger_ns"][1, Category.ON_CPU - 1] += length_ns - off_ns
        observed[pid] = rows["ledger_ns"][1]
        out.append(rows)
    return np.concatenate(out) if out else layout.empty(layout.SNAPSHOTS)


def _facts(database: sqlite3.Connection, path: Path) -> dict[str, str]:
    facts: dict[str, str] = {}
    columns = _columns(database, "sessions")
    for name in ("gpu_model", "kernel", "cuda_ver", "python_ver"):
        if name in columns:
            values = _rows(database, f"SELECT DISTINCT {name} FROM sessions", path, _MAX_NAMES)
            facts[name] = ", ".join(sorted(str(value) for (value,) in values if value))[:200]
    if {"cpu_pct"} <= _columns(database, "system_snapshots"):
        busy = [row[0] for row in _rows(database, "SELECT cpu_pct FROM system_snapshots", path, _MAX_ROWS)]
        used = [float(value) for value in busy if isinstance(value, int | float)]
        if used:
            facts["cpu_percent"] = f"{float(np.median(used)):.0f}"
    return {name: value for name, value in facts.items() if value}


IMPORTER = Importer("node database of another agent (SQLite)", _accepts, _read)
