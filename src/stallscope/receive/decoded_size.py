"""The size of a request's rows, computed before decoding: a few bytes can expand to gigabytes.

Four encodings expand: compressed buffers of an Arrow stream, dictionary-coded columns, attributes that a sender states
once for many records, and many tiny messages or record batches. Each size is computed from lengths and counts that the
request itself declares.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import BadInput, TooLarge
from stallscope.receive import message_sizes
from stallscope.receive.decoded import FlatRecords
from stallscope.store.hub import schema

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_RECORDS_PER_TAG = 8
"""The tag of a record; it also precedes most attribute values."""

_TAG = {"logs": b"\x12", "traces": b"\x12", "metrics": b"\x0a"}
"""The byte before each record: LogRecord and Span are field 2 of their scope, data points field 1."""

_CELL_BYTES = 8

_MESSAGE_BYTES, _BUFFER_BYTES = 2048, 256
"""Memory of a message of an Arrow stream and of each of its buffers, regardless of their lengths."""


_JSON_BYTES = 256
"""Memory of a JSON object or list."""


def too_large(limit: int) -> TooLarge:
    """The error of a request whose rows would exceed the limit."""
    return TooLarge(f"the decoded rows of a request exceed {limit:,} bytes; send smaller requests")


def row_bytes(table: str) -> int:
    """Bytes of a row in memory, without its texts."""
    return _CELL_BYTES * len(schema.TABLES[table].columns)


def check_otlp_body(signal: str, body: bytes, limit: int) -> None:
    """Raises TooLarge before decoding, for a body with many more records or attributes than the limit allows."""
    if body.count(_TAG[signal]) * row_bytes("events") // _RECORDS_PER_TAG > limit:
        raise too_large(limit)
    if message_sizes.exceeds(signal, body, limit):
        raise too_large(limit)


def check_json_body(body: bytes, limit: int) -> None:
    """Raises TooLarge before decoding, for a body with more objects and lists than the limit allows."""
    if _JSON_BYTES * (body.count(b"{") + body.count(b"[")) > limit:
        raise too_large(limit)


def check_flat(flat: FlatRecords, limit: int) -> None:
    """Raises TooLarge if the rows of the records, including the shared attributes of groups, exceed the limit."""
    shared = np.array([len(group.text) for group in flat.groups], np.int64)
    n_shared = 0 if not flat.n else int(shared[flat.group].sum())
    if flat.n * row_bytes("events") + 2 * n_shared > limit:  # both in `attrs` and in separate columns
        raise too_large(limit)


def check_types(names_and_types: Iterator[tuple[str, pa.DataType]]) -> None:
    """Raises BadInput for a column type whose size does not follow from its lengths, such as nested columns."""
    for name, kind in names_and_types:
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        if name == "ledger_ns" and pa.types.is_fixed_size_list(kind):
            plain = kind.value_type
        is_known = (
            pa.types.is_primitive(plain)
            or pa.types.is_string(plain)
            or pa.types.is_large_string(plain)
            or pa.types.is_fixed_size_binary(plain)
            or pa.types.is_null(plain)
        )
        if not is_known:
            raise BadInput(f"column {name} has the unsupported type {str(kind)[:80]}; send numbers or text")


def batch_bytes(batch: pa.RecordBatch, table: str, wide: Sequence[int]) -> int:
    """Bytes of a batch's rows after its dictionaries are decoded. wide: the numbers of its non-primitive columns."""
    n_bytes = batch.num_rows * row_bytes(table)
    for number in wide:
        column = batch.column(number)
        if pa.types.is_dictionary(column.type) and not pa.types.is_primitive(column.type.value_type):
            n_bytes += _text_bytes(column)
        else:
            n_bytes += column.nbytes
    return n_bytes


def _text_bytes(coded: pa.DictionaryArray) -> int:
    values = coded.dictionary
    if pa.types.is_null(values.type) or not len(values):
        return 0
    lengths = pc.binary_length(values).fill_null(0)
    most = int(pc.max(lengths).as_py() or 0)
    if most * len(coded) < 1 << 16:
        return most * len(coded)
    counts = np.bincount(np.asarray(coded.indices.drop_null()).astype(np.int64), minlength=len(values))
    return int((counts * np.asarray(lengths).astype(np.int64)).sum())


def messages_of(stream: pa.Buffer, limit: int) -> tuple[list[pa.ipc.Message], int]:
    """The messages of an Arrow IPC stream, and their bytes after decompression, as their buffers declare.

    Reading ends soon after the limit. Layout: format/Message.fbs of Arrow; a compressed buffer begins with its unpacked
    length, int64, -1 for plain. Raises BadInput for an unreadable stream.
    """
    messages: list[pa.ipc.Message] = []
    total = 0
    try:
        reader = pa.ipc.MessageReader.open_stream(stream)
        while total <= limit:
            try:
                message = reader.read_next_message()
            except StopIteration:
                break
            total += _MESSAGE_BYTES
            messages.append(message)
            if message.body is not None:
                total += _body_bytes(memoryview(message.metadata), memoryview(message.body))
        return messages, total
    except (pa.ArrowException, OSError, struct.error, ValueError) as error:
        raise BadInput(f"the request is not a valid Arrow stream: {str(error)[:200]}") from error


def _body_bytes(metadata: memoryview, body: memoryview) -> int:
    """Bytes of a message's buffers after decompression, with the memory of each buffer."""
    root = struct.unpack_from("<I", metadata)[0]
    kind_at, batch_at = _field(metadata, root, 1), _field(metadata, root, 2)
    if not kind_at or not batch_at or metadata[kind_at] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return 0
    batch = _target(metadata, batch_at)
    if metadata[kind_at] == _DICTIONARY_BATCH:
        data_at = _field(metadata, batch, 1)
        if not data_at:
            return 0
        batch = _target(metadata, data_at)
    buffers_at = _field(metadata, batch, 2)
    if not buffers_at:
        return 0
    vector = _target(metadata, buffers_at)
    (n_buffers,) = struct.unpack_from("<I", metadata, vector)
    buffers = np.frombuffer(metadata, "<i8", 2 * n_buffers, vector + 4).reshape(n_buffers, 2)
    total = _BUFFER_BYTES * n_buffers
    if not _field(metadata, batch, 3):  # not compressed
        return total + _sum_of(buffers[:, 1])
    for offset, length in buffers.tolist():
        size = struct.unpack_from("<q", body, offset)[0] if length >= 8 else length
        total += length if size < 0 else size
    return total


def _sum_of(lengths: np.ndarray[Any, Any]) -> int:
    """The sum of lengths, which a sender may choose so that a sum in 64 bits overflows."""
    if lengths.size and (lengths.min() < 0 or lengths.max() > 1 << 40):
        raise ValueError("a buffer has an impossible length")
    return int(lengths.sum())


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Offset of a field in a flatbuffer's table; 0 if absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (n_bytes,) = struct.unpack_from("<H", metadata, vtable)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + at)[0] if at < n_bytes else 0
    return table + offset if offset else 0


def _target(metadata: memoryview, at: int) -> int:
    return at + int(struct.unpack_from("<I", metadata, at)[0])
