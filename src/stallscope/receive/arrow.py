"""The Arrow endpoint: from the bytes of `/stallscope.v1.Ingest/Append` to a batch. The wire format:

one line of JSON (batch_id, node, cluster, compression, tables: [{name, n_bytes}], about), a newline, then one Arrow
IPC stream for each table, one after the other, compressed together if `compression` is set. Columns have the names of
store/hub/schema.py; see docs/decisions/arrow-endpoint.md.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import BadInput
from stallscope.events import layout
from stallscope.events.names import CATEGORY_NAMES, Datatype, Op
from stallscope.receive import sender_aliases
from stallscope.receive.decoded_size import batch_bytes, check_types, messages_of, too_large
from stallscope.receive.unpacking import inflated_to, unpacked
from stallscope.store.hub import schema
from stallscope.store.hub.arrow_tables import repeated
from stallscope.store.hub.batches import Batch

METHOD = "/stallscope.v1.Ingest/Append"
VERSION = 1
"""The value of the hub's capability `arrow`."""

_MAX_HEAD_BYTES = 64 << 10
_MAX_SCHEMA_BYTES = 64 << 10
_MAX_ROWS = 1_000_000
_MAX_TEXT = 1000
_MAX_GPUS = 1_000_000
_HEAD_KEYS = {"batch_id", "node", "cluster", "compression", "tables", "about"}
_ABOUT = {"gpu_model": str, "provider": str, "n_gpus": int, "agent": str}
_WORDS: dict[str, tuple[str, ...]] = {
    "op": tuple(Op(n).name.lower() if n in set(Op) and n else "" for n in range(max(Op) + 1)),
    "category": ("", *CATEGORY_NAMES),
    "datatype": tuple(d.name.lower() if d else "" for d in Datatype),
    "reduce_op": ("", *sender_aliases.REDUCE_OPS),
}
_WORDS["in_call"] = _WORDS["op"]
_HASHES = ("comm_hash", "parent_hash")
_UNKNOWN_IN = {
    table.name: {"rank", "local_rank"} | {f.name for f in table.fields if f.may_be_unknown}
    for table in layout.HUB_TABLES
} | {"clocks": {"is_synchronised"}}


@dataclass(frozen=True)
class Request:
    """A request as sent. tables: rows by table name, with the sender's columns (events/layout.py).

    n_bytes: approximate memory of its decoded rows.
    """

    batch_id: str
    node: str
    cluster: str
    about: dict[str, Any] | None
    tables: dict[str, pa.Table]
    n_bytes: int


def decode(body: bytes, tenant: str, *, limit: int) -> Batch:
    """The batch in a request. limit: bytes after decompression. Raises BadInput, TooLarge."""
    return batch(read(body, limit=limit), tenant)


def read(body: bytes, *, limit: int) -> Request:
    """The request in these bytes. limit: bytes of its decoded rows. Raises BadInput, TooLarge."""
    head, packed = _split(body)
    tables = _checked_tables(head.get("tables"))
    buffer = _rest(packed, _text(head, "compression"), n_announced=sum(n for _, n in tables), limit=limit)
    node, cluster = _text(head, "node"), _text(head, "cluster")
    out: dict[str, pa.Table] = {}
    at, n_decoded = 0, 0
    for name, n_bytes in tables:
        stream = buffer.slice(at, n_bytes)
        out[name], n = _stream(stream, name, limit - n_decoded, n_origin_bytes=len(node) + len(cluster))
        n_decoded += n
        at += n_bytes
    batch_id, about = _text(head, "batch_id")[:200], _about(head.get("about"), node, cluster)
    return Request(batch_id, node, cluster, about, out, n_decoded)


def cluster_of(body: bytes) -> str:
    """The cluster that a request names. Raises BadInput."""
    head, _ = _split(body)
    return _text(head, "cluster")


def _rest(packed: memoryview, compression: str, *, n_announced: int, limit: int) -> pa.Buffer:
    """The bytes of all streams. Raises BadInput if their number differs from the head's, TooLarge."""
    if (
        compression == "gzip"
        and n_announced <= limit
        and (inflated := inflated_to(packed, n_announced)) is not None
    ):
        return inflated
    rest = unpacked(packed, compression, limit=limit)
    if n_announced != len(rest):
        raise BadInput(f"the first line announces {n_announced:,} bytes, but the body has {len(rest):,}")
    return pa.py_buffer(rest)


def batch(request: Request, tenant: str) -> Batch:
    """The batch of a request. Raises BadInput for rows that do not match their table."""
    return Batch(
        request.batch_id,
        tenant,
        with_about(
            request,
            {
                name: _located(in_our_form(raw, name), request.node, request.cluster)
                for name, raw in request.tables.items()
            },
        ),
        request.n_bytes,
    )


def with_about(request: Request, tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """The tables, with a row of `nodes` if the sender describes its machine."""
    if not request.about:
        return tables
    return tables | {"nodes": about_rows([request.about])}


def about_rows(about: list[dict[str, Any]]) -> pa.Table:
    """Rows of `nodes` from the machines' descriptions of themselves."""
    return pa.Table.from_pylist(about, schema=_about_schema())


@cache
def _about_schema() -> pa.Schema:
    whole = schema.arrow_schema(schema.NODES)
    return pa.schema([whole.field(name) for name in ("node_id", "cluster_id", *_ABOUT)])


def _split(body: bytes) -> tuple[dict[str, Any], memoryview]:
    end = body.find(b"\n", 0, _MAX_HEAD_BYTES)
    if end < 0:
        raise BadInput("an Arrow request must begin with one line of JSON")
    try:
        text = body[:end].decode()
        head = json.loads(text)
        if "\\u" in text:  # an escape may be an unpaired surrogate, which cannot be stored
            json.dumps(head, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the first line of an Arrow request is not valid JSON: {str(error)[:100]}") from error
    if not isinstance(head, dict) or (unknown := sorted(set(head) - _HEAD_KEYS)):
        what = (
            f"the unknown key {unknown[0]!r}" if isinstance(head, dict) else "a value that is not an object"
        )
        raise BadInput(f"the first line of an Arrow request contains {what}")
    return head, memoryview(body)[end + 1 :]


def _text(head: Mapping[str, Any], key: str) -> str:
    value = head.get(key) or ""
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise BadInput(f"{key} in an Arrow request must be text of at most {_MAX_TEXT} characters")
    return value


def _checked_tables(declared: Any) -> list[tuple[str, int]]:
    out: list[tuple[str, int]] = []
    for entry in declared if isinstance(declared, list) else [None]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise BadInput("tables in an Arrow request must be a list of {name, n_bytes}")
        name, n_bytes = entry["name"], entry.get("n_bytes")
        if name not in schema.SENT:
            raise BadInput(
                f"table {name!r} does not accept rows; the tables are {', '.join(sorted(schema.SENT))}"
            )
        if name in dict(out) or not isinstance(n_bytes, int) or n_bytes < 0:
            raise BadInput(f"table {name} in an Arrow request must have one entry, with n_bytes")
        out.append((name, n_bytes))
    return out


def _stream(buffer: pa.Buffer, name: str, limit: int, *, n_origin_bytes: int) -> tuple[pa.Table, int]:
    """The rows of one Arrow IPC stream, and their decoded size in bytes. Raises BadInput, TooLarge before decoding."""
    try:
        messages, n_unpacked = messages_of(buffer, limit)
        if n_unpacked > limit:
            raise too_large(limit)
        if not messages:
            raise BadInput(f"the rows for table {name} are not a valid Arrow stream: it has no schema")
        columns = _columns(name, messages[0].metadata.to_pybytes())
        batches, n_bytes, n_rows = [], 0, 0
        for batch in _record_batches(buffer, messages, columns):
            batch.validate(full=True)  # also checks that text is UTF-8: stored text must be readable
            n_bytes += batch_bytes(batch, name, columns.wide) + batch.num_rows * n_origin_bytes
            n_rows += batch.num_rows
            if n_bytes > limit or n_rows > _MAX_ROWS:
                raise too_large(limit)
            batches.append(batch)
        return pa.Table.from_batches(batches, columns.schema), n_bytes
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise BadInput(f"the rows for table {name} are not a valid Arrow stream: {reason}") from error


@dataclass(frozen=True)
class _Columns:
    """The checked columns of a stream. wide: the numbers of the columns whose size depends on their content."""

    schema: pa.Schema
    wide: tuple[int, ...]
    has_dictionaries: bool


@lru_cache(maxsize=256)
def _columns(table: str, schema_message: bytes) -> _Columns:
    """The columns that a stream's first message declares. Cached: an agent sends the same columns in each request.

    Raises BadInput, pyarrow's errors.
    """
    if len(schema_message) > _MAX_SCHEMA_BYTES:
        raise BadInput(
            f"the columns for table {table} take more than {_MAX_SCHEMA_BYTES:,} bytes to describe"
        )
    columns = pa.ipc.read_schema(pa.py_buffer(_framed(schema_message)))
    _check_names(columns.names, table)
    check_types((field.name, field.type) for field in columns)
    return _Columns(
        columns,
        tuple(number for number, field in enumerate(columns) if not pa.types.is_primitive(field.type)),
        any(pa.types.is_dictionary(field.type) for field in columns),
    )


def _framed(metadata: bytes) -> bytes:
    """A message without a body as a stream has it: a mark, the length, the metadata (format/Columnar.rst of Arrow)."""
    padded = metadata + bytes(-len(metadata) % 8)
    return struct.pack("<Ii", 0xFFFFFFFF, len(padded)) + padded


def _record_batches(
    buffer: pa.Buffer, messages: list[pa.ipc.Message], columns: _Columns
) -> Iterator[pa.RecordBatch]:
    """The record batches; a reader, which parses the schema again, is necessary only for dictionaries."""
    if columns.has_dictionaries:
        with pa.ipc.open_stream(buffer) as reader:
            yield from reader
        return
    for message in messages[1:]:
        yield pa.ipc.read_record_batch(message, columns.schema)


def _check_names(names: list[str], table: str) -> None:
    known = {*schema.SENT[table].names, "ledger_ns"} - {*schema.GIVEN_BY_HUB, "ts", "late_ns"}
    for name in names:
        if name not in known:
            raise BadInput(f"table {table} has no column {name!r} that senders can fill")
    if len(set(names)) < len(names):
        raise BadInput(f"table {table}: a column is duplicated")
    if "ts_ns" not in names:
        raise BadInput(f"table {table}: the column ts_ns is missing")


def in_our_form(raw: pa.Table, table: str) -> pa.Table:
    """Rows with the hub's columns: enumeration numbers as words, hashes as text, -1 as NULL.

    All columns are copies: a view of one column would keep the whole request in memory until its rows are sealed,
    which took 577 bytes a row where 345 were counted.
    """
    unknown = _UNKNOWN_IN.get(table, set())
    columns: dict[str, Any] = {}
    try:
        for name in raw.column_names:
            column = raw.column(name)
            values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            if name == "ledger_ns":
                columns |= _ledger(values)
            else:
                columns[name] = _column(name, values, may_be_unknown=name in unknown)
    except (pa.ArrowException, ValueError, IndexError) as error:
        raise BadInput(
            f"the rows for table {table} do not match its columns: {str(error).splitlines()[0][:200]}"
        ) from error
    return pa.table(columns)


def _column(name: str, values: pa.Array, *, may_be_unknown: bool) -> pa.Array:
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if pa.types.is_fixed_size_binary(kind):
        return _padded(values)
    if not pa.types.is_integer(kind):
        return _copied(values)
    if name in _WORDS:
        return _worded(values, _WORDS[name])
    if name in _HASHES:
        return _hex(values)
    return _whole_numbers(values, may_be_unknown=may_be_unknown)


def _copied(values: pa.Array) -> pa.Array:
    """The values in memory of their own, see in_our_form()."""
    return pa.concat_arrays([values, values.slice(0, 0)])


def _whole_numbers(values: pa.Array, *, may_be_unknown: bool) -> pa.Array:
    """Integers as int64, with NULL for -1 if -1 means unknown; larger unsigned values as the same bits.

    Uses numpy: a request has dozens of such columns, and the cost per call of Arrow's functions is higher.
    """
    if values.null_count:
        if pa.types.is_uint64(values.type):
            values = pa.Array.from_buffers(pa.int64(), len(values), values.buffers(), offset=values.offset)
        if may_be_unknown:
            return pc.if_else(pc.equal(values, layout.UNKNOWN), pa.scalar(None, values.type), values)
        return _copied(values)
    numbers = np.asarray(values).astype(np.int64)
    is_unknown = numbers == layout.UNKNOWN if may_be_unknown else None
    return pa.array(numbers, mask=is_unknown if is_unknown is not None and is_unknown.any() else None)


def _worded(numbers: pa.Array, known: tuple[str, ...]) -> pa.Array:
    """The words for numbers; NULL for 0 and for unknown numbers."""
    plain = np.asarray(numbers.fill_null(0) if numbers.null_count else numbers).astype(np.int64)
    if len(plain) and (plain == plain[0]).all():
        word = known[plain[0]] if 0 <= plain[0] < len(known) else ""
        return repeated(word or None, len(plain))
    plain[(plain < 0) | (plain >= len(known))] = len(known)
    return _as_array(known).take(pa.array(plain))


@cache
def _as_array(known: tuple[str, ...]) -> pa.Array:
    """Words by number, with a NULL appended."""
    return pa.array([word or None for word in (*known, "")], pa.string())


def _hex(numbers: pa.Array) -> pa.Array:
    """16 hexadecimal digits; NULL for 0."""
    if len(numbers) and not numbers.null_count and ((plain := np.asarray(numbers)) == plain[0]).all():
        return repeated(_digits(int(plain[0])), len(numbers))
    coded = numbers.dictionary_encode()
    texts = [_digits(number) for number in coded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(coded.indices)


def _digits(number: int | None) -> str | None:
    return f"{number & (1 << 64) - 1:016x}" if number else None


def _padded(values: pa.Array) -> pa.Array:
    """NUL-padded bytes as text; NULL if empty."""
    coded = values.dictionary_encode()
    texts = [raw.rstrip(b"\0").decode("utf-8", "replace") or None for raw in coded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(coded.indices)


def _ledger(values: pa.Array) -> dict[str, pa.Array]:
    kind = values.type
    if not pa.types.is_fixed_size_list(kind) or kind.list_size != len(CATEGORY_NAMES) or values.null_count:
        raise BadInput(f"ledger_ns must be a fixed-size list of {len(CATEGORY_NAMES)} integers, in every row")
    sums = np.ascontiguousarray(np.asarray(values.flatten()).reshape(len(values), len(CATEGORY_NAMES)).T)
    return {f"{name}_ns": pa.array(sums[i]) for i, name in enumerate(CATEGORY_NAMES)}


def _located(rows: pa.Table, node: str, cluster: str) -> pa.Table:
    """The rows, with the batch's node and cluster where they name none."""
    for name, value in (("node_id", node), ("cluster_id", cluster)):
        if name not in rows.column_names and value:
            rows = rows.append_column(name, repeated(value, len(rows)))
    return rows


def _about(about: Any, node: str, cluster: str) -> dict[str, Any] | None:
    if not about or not node:
        return None
    if not isinstance(about, dict):
        raise BadInput("about in an Arrow request must be an object")
    out: dict[str, Any] = {"node_id": node, "cluster_id": cluster}
    for name, kind in _ABOUT.items():
        try:
            value = kind(about[name]) if about.get(name) not in (None, "") else None
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"about.{name} in an Arrow request: {about[name]!r} has the wrong type") from error
        if isinstance(value, int) and not 0 <= value <= _MAX_GPUS:
            raise BadInput(f"about.{name} in an Arrow request must be a number from 0 to {_MAX_GPUS:,}")
        out[name] = value[:200] if isinstance(value, str) else value
    return out if any(out[name] is not None for name in _ABOUT) else None
