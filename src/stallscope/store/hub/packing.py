"""Rows as bytes for the journal, and back: one Arrow IPC stream (LZ4), encoded compactly.

The journal is written, synced and deleted within minutes, and every byte costs time of the single thread that writes
it. So a text that is equal in all rows is stored once, increasing integers (times, rounds, running sums) as
differences of 32 bits, and empty columns not at all.
"""

from typing import Any

import numpy as np
import pyarrow as pa

_FIRST, _FIRST_TIME = b"first", b"first_time"
"""Key in a field's metadata: the column's first value; the column itself contains differences."""

_TIME = pa.timestamp("us", "UTC")
_OPTIONS = {"compression": "lz4", "use_threads": False}


def packed(rows: pa.Table) -> memoryview:
    """Rows as one IPC stream. The column types are the types of the hub's tables."""
    fields, arrays = [], []
    for number, field in enumerate(rows.schema):
        values = rows.column(number)
        if number and values.null_count == len(rows):  # the first column preserves the number of rows
            continue
        narrow, field = _narrow(values.chunk(0) if values.num_chunks == 1 else values.combine_chunks(), field)
        arrays.append(narrow)
        fields.append(field)
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**_OPTIONS)) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def unpacked(ipc: bytes | memoryview) -> pa.Table:
    """The rows of a stream; columns may be missing."""
    with pa.ipc.open_stream(ipc) as reader:
        rows = reader.read_all()
    columns = {field.name: _wide(rows.column(number), field) for number, field in enumerate(rows.schema)}
    return pa.table(columns)


def _narrow(values: pa.Array, field: pa.Field) -> tuple[pa.Array, pa.Field]:
    if values.null_count or not len(values):
        return values, field
    if pa.types.is_string(field.type) and (text := shared_text(values)) is not None:
        coded = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(values), np.int8)), text)
        return coded, field.with_type(coded.type)
    if field.type in (pa.int64(), _TIME):
        numbers = np.frombuffer(values.buffers()[1], np.int64, len(values), 8 * values.offset)
        if numbers[0] == numbers[-1]:  # probably constant: LZ4 alone compresses it as well
            return values, field
        differences = np.zeros(len(numbers), np.int64)
        np.subtract(numbers[1:], numbers[:-1], out=differences[1:])
        short = differences.astype(np.int32)
        if (short == differences).all():
            first = _FIRST_TIME if field.type == _TIME else _FIRST
            return pa.array(short), pa.field(field.name, pa.int32(), metadata={first: str(numbers[0])})
    return values, field


def shared_text(texts: pa.Array) -> pa.Array | None:
    """The text (1,) that all rows share, None if they differ."""
    _, offsets, data = texts.buffers()
    offset_array = np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset)
    lengths = offset_array[1:] - offset_array[:-1]
    length, begin, n_bytes = int(lengths[0]), int(offset_array[0]), int(offset_array[-1] - offset_array[0])
    if n_bytes != length * len(texts) or (lengths != length).any():
        return None
    if n_bytes > length:  # each text equals the previous text
        before, after = data.slice(begin, n_bytes - length), data.slice(begin + length, n_bytes - length)
        if not after.equals(before):
            return None
    return texts.slice(0, 1)


def _wide(values: pa.ChunkedArray, field: pa.Field) -> Any:
    if pa.types.is_dictionary(field.type):
        return values.cast(field.type.value_type)
    metadata = field.metadata or {}
    first = metadata.get(_FIRST) or metadata.get(_FIRST_TIME)
    if first is None:
        return values
    numbers = pa.array(np.cumsum(np.asarray(values), dtype=np.int64) + np.int64(int(first)))
    return numbers.view(_TIME) if _FIRST_TIME in metadata else numbers
