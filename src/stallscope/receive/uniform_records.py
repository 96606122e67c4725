"""Decodes OTLP logs whose records all have one shape: field by field for all records together.

A program that sends in a loop produces such records: the same fields and attributes in the same order, values of the
same types. They are by far the largest part of a busy hub's load, and decoding them together costs a fifth as much.
Records of several shapes, and irregular records, are left to the general decoders."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from stallscope.receive.any_value import as_dict
from stallscope.receive.decoded import AlignedAttributes, Array, Group
from stallscope.receive.record_shape import (
    BODY,
    MixedShapes,
    Position,
    Shape,
    as_text,
    shape_of,
    tag_of,
    values,
)
from stallscope.store.hub.arrow_tables import repeated

_REMEMBERED_BYTES = 4096
_WORD = 8
_FEW_SHAPES, _FEWEST = 3, 256
"""Allowed shapes, plus one more per this many records: detecting a shape costs as much as decoding many records."""

_FIRST, _SHAPES_AT_FIRST, _CHECKED_BYTES = 64, 8, 1 << 17
"""Checking the first records avoids scanning thousands of records that have too many shapes."""

_RUN = 4
"""Number of records of equal length after which the next records are compared in blocks."""


class _UniformGroup(NamedTuple):
    """Records of one shape: their indexes, ascending, and their bytes (n, bytes)."""

    shape: Shape
    which: Array
    records: Array


class Records:
    """Records of one shape. fields: by field number; attributes: of every record; group: int64 (n,)."""

    def __init__(
        self, fields: dict[int, Any], attributes: AlignedAttributes, group: Array, groups: list[Group]
    ):
        self.fields, self.attributes, self.group, self.groups = fields, attributes, group, groups


def records(body: bytes) -> Records:
    """The records of an ExportLogsServiceRequest.

    Their fields: times and flags as numpy arrays, texts, event name and the body as Arrow arrays, trace and span ids
    as hexadecimal digits; fields that no record has are missing. Raises MixedShapes.
    """
    groups: list[Group] = []
    indexes: list[tuple[list[int], list[int]]] = []
    for number, (tag, begin, end) in enumerate(_parts(body, 0, len(body))):
        if tag != tag_of(1, 2):
            raise MixedShapes
        _add_resource(body, begin, end, number, groups, indexes)
    starts = [start for part_starts, _ in indexes for start in part_starts]
    if not starts:
        raise MixedShapes
    group = np.repeat(np.arange(len(groups)), [len(part_starts) for part_starts, _ in indexes])
    at = np.array(starts, np.int64)
    ends = np.array([end for _, part_starts in indexes for end in part_starts], np.int64)
    kin = _split(body, at, ends - at, most=_FEW_SHAPES + len(at) // _FEWEST)
    order = None if len(kin) == 1 else np.argsort(np.concatenate([same.which for same in kin]))
    first = kin[0].shape
    fields = {
        number: _column(
            position.kind,
            [(same.shape.fields[number], same.records) for same in kin],
            order,
        )
        for number, position in first.fields.items()
    }
    attributes = {
        key: _as_arrow(
            _column(
                position.kind,
                [(same.shape.attributes[key], same.records) for same in kin],
                order,
            )
        )
        for key, position in first.attributes.items()
    }
    if BODY in fields:
        fields[BODY] = _as_arrow(fields[BODY])
    return Records(fields, AlignedAttributes(len(at), attributes), group, groups)


def _as_arrow(column: Any) -> pa.Array:
    return pa.array(column) if isinstance(column, np.ndarray) else column


def _parts(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Tag, start and end of each part of a message with only length-delimited parts. Raises MixedShapes."""
    while at < end:
        tag, at = body[at], at + 1
        length, at = _length(body, at, end)
        yield tag, at, at + length
        at += length


def _length(body: bytes, at: int, end: int) -> tuple[int, int]:
    """A length, and the offset where its content begins. Raises MixedShapes if the content would end after end."""
    length, shift = 0, 0
    while at < end and body[at] >= 0x80 and shift < 28:
        length |= (body[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    if at >= end or body[at] >= 0x80:
        raise MixedShapes
    length |= body[at] << shift
    at += 1
    if at + length > end:
        raise MixedShapes
    return length, at


def _add_resource(
    body: bytes,
    at: int,
    end: int,
    number: int,
    groups: list[Group],
    places: list[tuple[list[int], list[int]]],
) -> None:
    """The groups of a ResourceLogs, and the starts and ends of each group's records."""
    resource: dict[str, Any] | None = None
    url = ""
    scopes: list[tuple[bytes, str, tuple[list[int], list[int]]]] = []
    for tag, begin, stop in _parts(body, at, end):
        if tag == tag_of(1, 2) and resource is None:
            resource = _attributes_of(body[begin:stop])
        elif tag == tag_of(2, 2):
            scopes.append(_scope(body, begin, stop, is_checked=not (number or scopes)))
        elif tag == tag_of(3, 2):
            url = as_text(body[begin:stop])
        else:
            raise MixedShapes
    for scope, own_url, offsets in scopes:
        name, version, attributes = _scope_fields(scope)
        groups.append(Group(resource or {}, attributes, name, version, own_url or url, number))
        places.append(offsets)


def _scope(
    body: bytes, at: int, end: int, *, is_checked: bool
) -> tuple[bytes, str, tuple[list[int], list[int]]]:
    """The bytes of a ScopeLogs' scope, its schema URL, and the starts and ends of its records.

    is_checked: check the shapes of the first records if many follow.
    """
    scope, url = None, ""
    starts: list[int] = []
    ends: list[int] = []
    record, n_same, before = tag_of(2, 2), 0, 0
    while at < end:
        tag = body[at]
        begin, size = at + 2, body[at + 1] if at + 1 < end else 0
        if size >= 0x80 or begin + size > end:
            size, begin = _length(body, at + 1, end)
        if tag == record:
            if is_checked and len(starts) == _FIRST and end - at > _CHECKED_BYTES:
                _check_first(body, starts, ends)
            starts.append(begin)
            ends.append(begin + size)
            n_same = n_same + 1 if begin + size - at == before else 0
            before = begin + size - at
            if n_same == _RUN:
                n_more = _n_same(body, at, end, begin - at, before)
                starts += range(begin + before, begin + before * (n_more + 1), before)
                ends += range(begin + size + before, begin + size + before * (n_more + 1), before)
                n_same, begin = 0, begin + before * n_more
        elif tag == tag_of(1, 2) and scope is None:
            scope = body[begin : begin + size]
        elif tag == tag_of(3, 2):
            url = as_text(body[begin : begin + size])
        else:
            raise MixedShapes
        at = begin + size
    return scope or b"", url, (starts, ends)


def _check_first(body: bytes, starts: list[int], ends: list[int]) -> None:
    """Raises MixedShapes if these records already have too many shapes."""
    at = np.array(starts, np.int64)
    _split(body, at, np.array(ends, np.int64) - at, most=_SHAPES_AT_FIRST)


def _n_same(body: bytes, at: int, end: int, n_head: int, n_bytes: int) -> int:
    """Number of following records with the same length as the record at an offset. n_head: bytes of tag and length."""
    n = (end - at) // n_bytes
    heads = np.frombuffer(body, np.uint8, n * n_bytes, at).reshape(n, n_bytes)[:, :n_head]
    differs = np.flatnonzero((heads != heads[0]).any(axis=1))
    return (int(differs[0]) if len(differs) else n) - 1


def _attributes_of(raw: bytes) -> dict[str, Any]:
    return _remembered_resource(raw) if len(raw) <= _REMEMBERED_BYTES else _resource(raw)


@lru_cache(maxsize=1024)
def _remembered_resource(raw: bytes) -> dict[str, Any]:
    """Cached: a sender sends the same resource in each of its requests."""
    return _resource(raw)


def _resource(raw: bytes) -> dict[str, Any]:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    try:
        return as_dict(Resource.FromString(raw).attributes)
    except DecodeError as error:
        raise MixedShapes from error


def _scope_fields(raw: bytes) -> tuple[str, str, dict[str, Any]]:
    """Name, version and attributes of a scope."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope

    try:
        scope = InstrumentationScope.FromString(raw)
    except DecodeError as error:
        raise MixedShapes from error
    return scope.name, scope.version, as_dict(scope.attributes)


def _split(body: bytes, at: Array, lengths: Array, *, most: int) -> list[_UniformGroup]:
    """The records, grouped by shape. Raises MixedShapes for too many shapes, or irregular records."""
    padded = body + bytes(_WORD)
    if len(np.unique(lengths)) > most:
        raise MixedShapes
    groups: list[_UniformGroup] = []
    rest = np.arange(len(at))
    while len(rest):
        first = rest[0]
        length = int(lengths[first])
        begin = int(at[first])
        shape = shape_of(body[begin : begin + length])
        if not length or len(groups) == most or (groups and not shape.is_like(groups[0].shape)):
            raise MixedShapes
        is_same = lengths[rest] == length
        which = rest if is_same.all() else rest[is_same]
        width = -(-length // _WORD) * _WORD
        matrix = np.ndarray((len(padded) - width + 1, width), np.uint8, padded, strides=(1, 1))[at[which]]
        words, mask = matrix.view("<u8"), np.frombuffer(shape.mask.ljust(width, b"\0"), "<u8")
        differs = (words ^ words[0]) & mask
        if not differs.any():
            rest = rest[:0] if which is rest else rest[~is_same]
        else:
            is_like = ~differs.any(axis=1)
            which, matrix = which[is_like], matrix[is_like]
            is_left = np.ones(len(at), bool)
            is_left[which] = False
            rest = rest[is_left[rest]]
        groups.append(_UniformGroup(shape, which, matrix))
    return groups


def _column(kind: str, places: list[tuple[Position, Array]], order: Array | None) -> Any:
    """One value of all records. places: its position in the records of each shape, and their bytes; order: the
    position of each record in the result.
    """
    parts = [values(position, matrix) for position, matrix in places]
    if kind not in ("text", "bytes"):
        numbers = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return numbers if order is None else numbers[order]
    if all(isinstance(part, str) and part == parts[0] for part in parts):
        return repeated(parts[0], sum(len(matrix) for _, matrix in places))
    arrays = [
        repeated(part, len(matrix)) if isinstance(part, str) else part
        for part, (_, matrix) in zip(parts, places, strict=True)
    ]
    texts = pa.concat_arrays(arrays)
    return texts if order is None else texts.take(pa.array(order))
