"""Rows of the hub as the arrays of the diagnosis: names become numbers, NULL becomes the unknown value.

All times are wall-clock ns here, while arrays of one machine use its monotonic clock. Each batch carries a clock
reading in which both clocks are equal. Records of other senders lack data that only our agents provide: the rank
replaces a missing process number, and records without a ledger are marked.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CATEGORY_NAMES, Category, CollectiveFlag, Datatype, Op
from stallscope.events.trace import Clock, Trace

TABLES = tuple(table.name for table in layout.SENT_TABLES)
LOSSES = "losses"
"""The table of records that agents lost, see losses()."""

_NUMBERS: dict[str, dict[str, int]] = {
    "op": {op.name.lower(): int(op) for op in Op},
    "in_call": {op.name.lower(): int(op) for op in Op},
    "category": {category.name.lower(): int(category) for category in Category},
    "datatype": {datatype.name.lower(): int(datatype) for datatype in Datatype},
    "reduce_op": {name: number for number, name in enumerate(("sum", "prod", "max", "min", "avg"), 1)},
}
_HASHES = ("comm_hash", "parent_hash")
_COLUMNS = {"node": ("node_id",), "ledger_ns": tuple(f"{name}_ns" for name in CATEGORY_NAMES)}
"""The columns of the hub's tables for fields with another name; other fields have their own name."""

_MAX_INTEGER, _MAX_LEDGER_NS = 1 << 62, 1 << 58
"""Rows with larger numbers are left out: the difference of two numbers, and the sum of a time ledger, must be an int64.
They are times after 2116, and states that lasted nine years.
"""

_FOREIGN_PIDS = 1 << 30
"""Above the kernel's largest pid (4,194,304), so that a synthetic pid never equals a real one."""


def needed(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """The tables and columns that trace() and losses() read; columns without a value take no memory."""
    return {
        name: pa.table(
            {
                column: pa.nulls(len(rows)) if rows[column].null_count == len(rows) else rows[column]
                for column in columns
            }
        )
        for name, columns in _columns_read().items()
        if (rows := tables.get(name)) is not None
    }


@cache
def _columns_read() -> dict[str, tuple[str, ...]]:
    """The columns of each table that trace() and losses() read."""
    read = {
        table.name: tuple(
            column for field in table.fields for column in _COLUMNS.get(field.name, (field.name,))
        )
        for table in layout.SENT_TABLES
    }
    return read | {"collectives": (*read["collectives"], "rank"), LOSSES: ("node_id", "kind", "n_lost")}


def trace(tables: Mapping[str, pa.Table]) -> Trace:
    """The rows of one cluster, by table of events/layout.py, as a trace.

    Without rows that have no time, or numbers that are too large to compute with.
    """
    names = sorted(
        {name for rows in tables.values() for name in pc.unique(rows["node_id"]).to_pylist() if name}
    )
    nodes = {name: number for number, name in enumerate(names or [""])}
    symbols = _symbols(tables.get("calls"))
    arrays: dict[str, Any] = {
        table.name: _array(table, tables[table.name], nodes, symbols)
        for table in layout.SENT_TABLES
        if table.name in tables
    }
    latest = _latest(arrays, len(nodes))
    clocks = tuple(Clock(number, ts_ns, ts_ns) for number, ts_ns in enumerate(latest) if ts_ns != UNKNOWN)
    # Our agents report the state of their processes every second, so silence is meaningful.
    has_snapshots = set(np.unique(arrays["snapshots"]["node"]).tolist()) if "snapshots" in arrays else set()
    ends = tuple(ts_ns if number in has_snapshots else UNKNOWN for number, ts_ns in enumerate(latest))
    return Trace(
        **arrays,
        nodes=tuple(nodes),
        symbols=tuple(symbols),
        clocks=clocks,
        ends_ns=ends,
        source="Events that agents sent to this hub.",
    )


def losses(tables: Mapping[str, pa.Table]) -> dict[str, dict[str, int]]:
    """The lost records of one cluster, by node and kind."""
    rows = tables.get(LOSSES)
    lost: dict[str, dict[str, int]] = {}
    if rows is None:
        return lost
    columns = (rows[name].to_pylist() for name in ("node_id", "kind", "n_lost"))
    for node, kind, n in zip(*columns, strict=True):
        by_kind = lost.setdefault(node or "", {})
        by_kind[kind or ""] = by_kind.get(kind or "", 0) + (n or 0)
    return lost


def _array(table: layout.Table, rows: pa.Table, nodes: dict[str, int], symbols: dict[str, int]) -> Array:
    if rows["ts_ns"].null_count:
        rows = rows.filter(rows["ts_ns"].is_valid())
    out = layout.empty(table, len(rows))
    for field in table.fields:
        if field.format.startswith("("):
            for column, name in enumerate(CATEGORY_NAMES):
                out[field.name][:, column] = _integers(_whole(rows, f"{name}_ns"), 0)
        elif field.name == "node":
            out["node"] = _numbered(_whole(rows, "node_id"), nodes)
        elif field.name == "symbol":
            out["symbol"] = _numbered(_whole(rows, "symbol"), symbols)
        elif field.name in _NUMBERS:
            out[field.name] = _numbered(_whole(rows, field.name), _NUMBERS[field.name])
        elif field.name in _HASHES:
            out[field.name] = _hashes(_whole(rows, field.name))
        elif field.format.startswith("S"):
            words = ["" if word is None else word for word in rows[field.name].to_pylist()]
            out[field.name] = np.char.encode(np.array(words or [""]), "utf-8")[: len(rows)]
        else:
            unknown = UNKNOWN if field.may_be_unknown else 0
            out[field.name] = _integers(_whole(rows, field.name), unknown)
    if table is layout.COLLECTIVES:
        _complete(out, rows)
    return _computable(out)


def _computable(rows: Array) -> Array:
    """The rows whose numbers leave room for differences and sums."""
    is_left_out = np.zeros(len(rows), bool)
    for name in rows.dtype.names or ():
        values = rows[name]
        if values.dtype == np.int64 and values.size:
            limit = _MAX_LEDGER_NS if values.ndim > 1 else _MAX_INTEGER
            if values.min() <= -limit or values.max() >= limit:
                is_large = (values <= -limit) | (values >= limit)
                is_left_out |= is_large if values.ndim == 1 else is_large.any(axis=1)
    return rows[~is_left_out] if is_left_out.any() else rows


def _whole(rows: pa.Table, name: str) -> pa.Array:
    """A column in one piece."""
    column = rows[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _complete(out: Array, rows: pa.Table) -> None:
    """Derives columns that other senders fill differently or not at all."""
    rank = _integers(_whole(rows, "rank"), UNKNOWN)
    out["comm_rank"] = np.where(out["comm_rank"] == UNKNOWN, rank, out["comm_rank"])
    is_foreign = (out["pid"] == 0) & (rank != UNKNOWN)
    out["pid"] = np.where(is_foreign, _FOREIGN_PIDS + rank, out["pid"])
    has_ledger = np.asarray(rows["on_cpu_ns"].is_valid())
    out["flags"] |= np.where(has_ledger, 0, int(CollectiveFlag.NO_LEDGER)).astype(np.uint32)


def _integers(values: pa.Array, unknown: int) -> Array:
    """Numbers (n,), with a replacement for NULL."""
    if values.null_count == len(values):
        return np.full(len(values), unknown)
    return np.asarray(values.fill_null(unknown) if values.null_count else values)


def _numbered(words: pa.Array, numbers: Mapping[str, int]) -> Array:
    """The number of each word; 0 for unknown words."""
    if words.null_count == len(words):
        return np.zeros(len(words), np.int64)
    coded = words.dictionary_encode()
    table = np.array([numbers.get(word, 0) for word in coded.dictionary.to_pylist()] + [0])
    return _of_codes(table, coded)


def _hashes(words: pa.Array) -> Array:
    if words.null_count == len(words):
        return np.zeros(len(words), np.uint64)
    coded = words.dictionary_encode()
    table = np.array([_hash(word) for word in coded.dictionary.to_pylist()] + [0], np.uint64)
    return _of_codes(table, coded)


def _of_codes(table: Array, coded: pa.DictionaryArray) -> Array:
    """The table's value for each word; the last entry is for NULL."""
    codes = coded.indices
    values: Array = table[np.asarray(codes.fill_null(len(table) - 1) if codes.null_count else codes)]
    return values


def _hash(word: str) -> int:
    try:
        return int(word, 16) if len(word) == 16 else _digest(word)
    except ValueError:
        return _digest(word)


def _digest(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _symbols(calls: pa.Table | None) -> dict[str, int]:
    words = pc.unique(calls["symbol"]).to_pylist() if calls is not None else []
    return {word: number for number, word in enumerate(["", *(word for word in words if word)])}


def _latest(arrays: Mapping[str, Any], n_nodes: int) -> list[int]:
    """For each node the time of its latest row, or the latest end of a process, which its agent has noticed."""
    nothing = np.iinfo(np.int64).min
    latest = np.full(n_nodes, nothing)
    for name, rows in arrays.items():
        if name not in ("communicators", "owners", "idle_gpus"):
            times = rows["ended_ns" if name == "processes" else "ts_ns"]
            np.maximum.at(latest, rows["node"], times.astype(np.int64))
    return np.where(latest == nothing, UNKNOWN, latest).tolist()
