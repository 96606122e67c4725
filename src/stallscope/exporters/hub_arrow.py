"""The rows of a batch in the hub's Arrow format (docs/decisions/arrow-endpoint.md), written by nanoarrow.

Columns are the arrays unchanged: numbers of enumerations, -1 for unknown, the time ledger as one list.
"""

import io
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from stallscope.events.layout import UNKNOWN, Array, Field
from stallscope.exporters.hub_batches import TABLES

METHOD = "/stallscope.v1.Ingest/Append"
_TEXTS = frozenset({"symbol", "kind"})
"""Columns that the hub expects as text; it takes the others as bytes of fixed length."""
_GZIP = 31  # window bits: a gzip header around the deflate stream (zlib.h, deflateInit2)
_FAST = 1


def request(
    tables: Mapping[str, Array], *, batch_id: str, node: str, cluster: str, about: Mapping[str, str]
) -> bytes:
    """One line of JSON, then an Arrow stream for each table, all gzipped (ISA-L takes a fifth of zlib's time)."""
    from isal import isal_zlib

    streams = {name: _stream(name, rows) for name, rows in tables.items() if len(rows)}
    head = {
        "batch_id": batch_id,
        "node": node,
        "cluster": cluster,
        "compression": "gzip",
        "tables": [{"name": name, "n_bytes": len(stream)} for name, stream in streams.items()],
        "about": dict(about),
    }
    packer = isal_zlib.compressobj(_FAST, isal_zlib.DEFLATED, _GZIP)
    body = [packer.compress(stream) for stream in streams.values()]
    return b"".join([json.dumps(head).encode(), b"\n", *body, packer.flush()])


def _stream(name: str, rows: Array) -> bytes:
    import nanoarrow
    from nanoarrow import ipc

    known = {field.name for field in TABLES[name].fields}
    there = tuple(column for column in rows.dtype.names or () if column in known)
    kinds, schema = _kinds(name, there)
    children = [_column(kind, rows[field]) for field, kind in zip(there, kinds, strict=True)]
    batch = nanoarrow.c_array_from_buffers(schema, len(rows), [None], null_count=0, children=children)
    out = io.BytesIO()
    with ipc.StreamWriter.from_writable(out) as writer:
        writer.write_stream(batch)
    return out.getvalue()


@cache
def _kinds(name: str, there: tuple[str, ...]) -> tuple[tuple[Any, ...], Any]:
    """The Arrow type of each column of a table, and of the table."""
    import nanoarrow

    fields = {field.name: field for field in TABLES[name].fields}
    kinds = tuple(nanoarrow.c_schema(_kind(fields[column])) for column in there)
    return kinds, nanoarrow.c_schema(nanoarrow.struct(dict(zip(there, kinds, strict=True))))


def _kind(field: Field) -> Any:
    import nanoarrow

    if field.name in _TEXTS:
        return nanoarrow.string()
    if field.name == "is_synchronised":
        return nanoarrow.bool_()
    dtype = np.dtype(field.format)
    if dtype.kind == "S":
        return nanoarrow.fixed_size_binary(dtype.itemsize)
    if dtype.subdtype:
        return nanoarrow.fixed_size_list(nanoarrow.int64(), dtype.shape[0])
    return getattr(nanoarrow, dtype.name)()


def _column(kind: Any, values: Array) -> Any:
    """The array of one column."""
    import nanoarrow

    if kind.format == "u":
        return _text(values)
    if kind.format == "b":
        return _truth(values)
    plain = np.ascontiguousarray(values)
    if kind.format.startswith("w:"):
        return nanoarrow.c_array_from_buffers(kind, len(plain), [None, plain.view("u1")], null_count=0)
    if plain.ndim == 2:
        long = kind.child(0)
        inner = nanoarrow.c_array_from_buffers(long, plain.size, [None, plain.ravel()], null_count=0)
        return nanoarrow.c_array_from_buffers(kind, len(plain), [None], null_count=0, children=[inner])
    return nanoarrow.c_array_from_buffers(kind, len(plain), [None, plain], null_count=0)


def _text(values: Array) -> Any:
    import nanoarrow

    ends = np.cumsum(np.char.str_len(values), dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, np.int32), ends])
    data = np.frombuffer(b"".join(values.tolist()), np.uint8)
    return nanoarrow.c_array_from_buffers(
        nanoarrow.string(), len(values), [None, offsets, data], null_count=0
    )


def _truth(values: Array) -> Any:
    """0, 1 and unknown as Arrow's booleans: one bit for the value and one for its validity."""
    import nanoarrow

    known, true = (np.packbits(bits, bitorder="little") for bits in (values != UNKNOWN, values == 1))
    return nanoarrow.c_array_from_buffers(nanoarrow.bool_(), len(values), [known, true])
