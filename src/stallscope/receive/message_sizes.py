"""Estimates the memory that decoding an OTLP request needs, before the request is decoded.

An attribute of two bytes becomes an object or a row of a dozen columns, so the size of a body does not bound its
memory. Only a body that could exceed the limit is read field by field; resources and scopes, which are few, are always
counted.
Field numbers: opentelemetry-proto 1.7, protobuf.dev "Encoding".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_GROUP_BYTES = 1024
"""Size of a resource or a scope: a Python object with its attributes."""

_OBJECT_BYTES = 400
"""Size of a message that protobuf decodes to Python objects: traces, metrics and nested values."""

_ROW_BYTES = 128
"""Size of an attribute of a log record, which is decoded to columns."""

_NUMBER_BYTES = 64
"""Size of a number in a list."""

_DELIMITED = 2
_MAX_VARINT = 10


@dataclass(frozen=True)
class _Kind:
    """A kind of message. inside: kinds of its fields. numbers: fields of packed numbers, with their minimum size."""

    n_bytes: int
    inside: Mapping[int, "_Kind"] = field(default_factory=dict)
    numbers: Mapping[int, int] = field(default_factory=dict)


def _any_value(n_bytes: int) -> _Kind:
    """AnyValue; values in lists and maps become Python objects."""
    nested: dict[int, _Kind] = {}
    pair_or_value: dict[int, _Kind] = {5: _Kind(0, nested)}
    value = _Kind(_OBJECT_BYTES, pair_or_value)
    pair_or_value[6] = _Kind(0, {1: _Kind(_OBJECT_BYTES, {2: value})})
    nested[1] = value
    return _Kind(n_bytes, pair_or_value)


def _attribute(n_bytes: int) -> _Kind:
    return _Kind(n_bytes, {2: _any_value(0)})


_COLUMN, _PYTHON = _attribute(_ROW_BYTES), _attribute(_OBJECT_BYTES)
_RESOURCE, _SCOPE = _Kind(0, {1: _PYTHON}), _Kind(0, {3: _PYTHON})
_EXEMPLAR = _Kind(_OBJECT_BYTES, {7: _PYTHON})
_BUCKETS = _Kind(_OBJECT_BYTES, numbers={2: 1})
_NUMBER_POINTS = _Kind(0, {1: _Kind(_OBJECT_BYTES, {5: _EXEMPLAR, 7: _PYTHON})})
_HISTOGRAM_POINTS = _Kind(0, {1: _Kind(_OBJECT_BYTES, {8: _EXEMPLAR, 9: _PYTHON}, {6: 8, 7: 8})})
_EXPONENTIAL_POINTS = _Kind(
    0, {1: _Kind(_OBJECT_BYTES, {1: _PYTHON, 8: _BUCKETS, 9: _BUCKETS, 11: _EXEMPLAR})}
)
_SUMMARY_POINTS = _Kind(0, {1: _Kind(_OBJECT_BYTES, {6: _Kind(_OBJECT_BYTES), 7: _PYTHON})})
_RECORD = {
    "logs": _Kind(_ROW_BYTES, {5: _any_value(0), 6: _COLUMN}),
    "traces": _Kind(
        _OBJECT_BYTES,
        {9: _PYTHON, 11: _Kind(_OBJECT_BYTES, {3: _PYTHON}), 13: _Kind(_OBJECT_BYTES, {4: _PYTHON})},
    ),
    "metrics": _Kind(
        _OBJECT_BYTES,
        {
            5: _NUMBER_POINTS,
            7: _NUMBER_POINTS,
            9: _HISTOGRAM_POINTS,
            10: _EXPONENTIAL_POINTS,
            11: _SUMMARY_POINTS,
            12: _PYTHON,
        },
    ),
}
_REQUEST = {
    signal: _Kind(0, {1: _Kind(_GROUP_BYTES, {1: _RESOURCE, 2: _Kind(_GROUP_BYTES, {1: _SCOPE, 2: record})})})
    for signal, record in _RECORD.items()
}
_GROUPS = _Kind(0, {1: _Kind(_GROUP_BYTES, {2: _Kind(_GROUP_BYTES)})})
_TAGS_OF_LOGS = (b"\x0a", b"\x32")
"""Of the attributes of records and resources, and of nested values."""


def exceeds(signal: str, body: bytes, limit: int) -> bool:
    """Whether the messages of a body take more than limit bytes; False for an invalid body, which fails to decode."""
    if _Counting(limit).exceeds(_GROUPS, body):
        return True
    if signal == "logs":
        least = _ROW_BYTES * sum(body.count(tag) for tag in _TAGS_OF_LOGS)
    else:
        least = _OBJECT_BYTES * (len(body) // 2)
    return least > limit and _Counting(limit).exceeds(_REQUEST[signal], body)


class _Counting:
    def __init__(self, limit: int):
        self._left = limit

    def exceeds(self, kind: _Kind, body: bytes) -> bool:
        """Whether a message and the messages inside it take more than the limit."""
        open_: list[tuple[_Kind, int, int]] = [(kind, 0, len(body))]
        while open_:
            kind, at, end = open_.pop()
            while at < end:
                tag, at = _varint(body, at)
                wire = tag & 7
                if wire == _DELIMITED:
                    length, at = _varint(body, at)
                    if inner := kind.inside.get(tag >> 3):
                        self._left -= inner.n_bytes
                        if length and (inner.inside or inner.numbers):
                            open_.append((inner, at, min(at + length, end)))
                    elif size := kind.numbers.get(tag >> 3):
                        self._left -= _NUMBER_BYTES * (min(length, end - at) // size)
                    at += length
                elif wire == 0:
                    if tag >> 3 in kind.numbers:
                        self._left -= _NUMBER_BYTES
                    _, at = _varint(body, at)
                elif wire in _FIXED:
                    if tag >> 3 in kind.numbers:
                        self._left -= _NUMBER_BYTES
                    at += _FIXED[wire]
                else:
                    return False
                if self._left < 0:
                    return True
        return False


_FIXED = {1: 8, 5: 4}


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A number and the offset after it; beyond the body, zeros."""
    value = shift = 0
    for index in range(at, min(at + _MAX_VARINT, len(body))):
        byte = body[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    return value, len(body)
