"""The shape of a LogRecord: which bytes encode its structure, and the positions of its values.

Two records that differ only in the bytes of values have the same shape. The values of thousands of such records are
columns of one byte matrix. Protobuf's wire format: protobuf.dev, Encoding. Fields:
opentelemetry/proto/logs/v1/logs.proto.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from stallscope.receive.decoded import Array

_ALL, _GOES_ON, _NONE = b"\xff", b"\x80", b"\x00"
"""Mask bits of a structural byte; of a varint byte, whose highest bit marks a continuation; of a value byte."""

BODY = 5
"""Field number of the record's body."""

_MAX_VARINT = 10
_MAX_SEVERITY = 24
_WORD = 8


class MixedShapes(Exception):
    """Records differ in shape, or are irregular: a general decoder has to read them."""


class Position(NamedTuple):
    """Position of a value in a record. kind: text, bytes, varint, truth, number, fixed64 or fixed32."""

    kind: str
    begin: int
    end: int


@dataclass(frozen=True)
class Shape:
    """fields: by number; attributes: by key, in order. mask: the structural bits of each byte."""

    fields: dict[int, Position]
    attributes: dict[str, Position]
    mask: bytes

    def is_like(self, other: "Shape") -> bool:
        """Whether it has the same fields and attributes of the same kinds; lengths may differ."""
        return {number: position.kind for number, position in self.fields.items()} == {
            number: position.kind for number, position in other.fields.items()
        } and [(key, position.kind) for key, position in self.attributes.items()] == [
            (key, position.kind) for key, position in other.attributes.items()
        ]


def shape_of(record: bytes) -> Shape:
    """The shape of a record. Raises MixedShapes for irregular records: lists, duplicate or unknown fields."""
    reading = _Reading(record, bytearray(_ALL * len(record)))
    fields: dict[int, Position] = {}
    attributes: dict[str, Position] = {}
    at = 0
    while at < len(record):
        tag = record[at]
        if tag == tag_of(6, 2):
            begin, at = reading.delimited(at + 1, len(record))
            key, position = reading.attribute(begin, at)
            if key in attributes or len(attributes) >= _MAX_ATTRIBUTES:
                raise MixedShapes
            attributes[key] = position
            continue
        if tag >> 3 in fields or tag not in _READ:
            raise MixedShapes
        position = fields[tag >> 3] = _READ[tag](reading, at + 1)
        at = position.end
    return Shape(fields, attributes, bytes(reading.mask))


def tag_of(field: int, kind: int) -> int:
    """The first byte of a field. kind: 0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes."""
    return field << 3 | kind


_MAX_ATTRIBUTES = 256
"""Each attribute costs as much as a column, so records with more attributes are decoded row by row."""


@dataclass(frozen=True)
class _Reading:
    """One pass over a record; each method reads the element at an offset, and clears value bytes in the mask."""

    record: bytes
    mask: bytearray

    def delimited(self, at: int, end: int) -> tuple[int, int]:
        """Start and end of a length-delimited element."""
        length, begin = 0, self._end_of_varint(at, end)
        for index in range(begin - 1, at - 1, -1):
            length = length << 7 | self.record[index] & 0x7F
        if begin + length > end:
            raise MixedShapes
        return begin, begin + length

    def bytes_(self, at: int, end: int, kind: str = "bytes") -> Position:
        begin, stop = self.delimited(at, end)
        return self._value(kind, begin, stop, _NONE)

    def varint(self, at: int, end: int, kind: str = "varint") -> Position:
        return self._value(kind, at, self._end_of_varint(at, end), _GOES_ON)

    def fixed(self, at: int, end: int, n: int, kind: str) -> Position:
        if at + n > end:
            raise MixedShapes
        return self._value(kind, at, at + n, _NONE)

    def attribute(self, at: int, end: int) -> tuple[str, Position]:
        """A KeyValue: field 1 the key, field 2 the value."""
        if self.record[at : at + 1] != bytes([tag_of(1, 2)]):
            raise MixedShapes
        begin, stop = self.delimited(at + 1, end)
        if self.record[stop : min(stop + 1, end)] != bytes([tag_of(2, 2)]):
            raise MixedShapes
        value, value_end = self.delimited(stop + 1, end)
        if value_end != end:
            raise MixedShapes
        return as_text(self.record[begin:stop]), self.any_value(value, end)

    def any_value(self, at: int, end: int) -> Position:
        """An AnyValue that is a text, a boolean, an integer or a number."""
        tag = self.record[at] if at < end else None
        if tag == tag_of(1, 2):
            position = self.bytes_(at + 1, end, "text")
        elif tag == tag_of(3, 0):
            position = self.varint(at + 1, end)
        elif tag == tag_of(4, 1):
            position = self.fixed(at + 1, end, _WORD, "number")
        elif tag == tag_of(2, 0):
            position = self.varint(at + 1, end, "truth")
        else:
            raise MixedShapes
        if position.end != end:
            raise MixedShapes
        return position

    def body(self, at: int) -> Position:
        return self.any_value(*self.delimited(at, len(self.record)))

    def _end_of_varint(self, at: int, end: int) -> int:
        for index in range(at, min(at + _MAX_VARINT, end)):
            if self.record[index] < 0x80:
                return index + 1
        raise MixedShapes

    def _value(self, kind: str, begin: int, end: int, mask: bytes) -> Position:
        self.mask[begin:end] = mask * (end - begin)
        return Position(kind, begin, end)


_READ = {
    tag_of(1, 1): lambda reading, at: reading.fixed(at, len(reading.record), _WORD, "fixed64"),
    tag_of(11, 1): lambda reading, at: reading.fixed(at, len(reading.record), _WORD, "fixed64"),
    tag_of(8, 5): lambda reading, at: reading.fixed(at, len(reading.record), _WORD // 2, "fixed32"),
    tag_of(2, 0): lambda reading, at: reading.varint(at, len(reading.record), "severity"),
    tag_of(7, 0): lambda reading, at: reading.varint(at, len(reading.record), "uint32"),
    tag_of(3, 2): lambda reading, at: reading.bytes_(at, len(reading.record), "text"),
    tag_of(12, 2): lambda reading, at: reading.bytes_(at, len(reading.record), "text"),
    tag_of(9, 2): lambda reading, at: reading.bytes_(at, len(reading.record)),
    tag_of(10, 2): lambda reading, at: reading.bytes_(at, len(reading.record)),
    tag_of(BODY, 2): lambda reading, at: reading.body(at),
}
"""LogRecord's fields by their first byte: times, flags, severity, dropped attributes, texts, ids, the body."""


def values(position: Position, records: Array) -> Any:
    """The values at the same position of all records (n, bytes).

    text: a string if all are equal, otherwise an Arrow array, as for bytes, which become hexadecimal digits; others:
    numpy arrays (n,): uint64 of fixed64, int64 of varints, float64, bool. Raises MixedShapes.
    """
    matrix = records[:, position.begin : position.end]
    if position.kind in ("text", "bytes"):
        return _texts(matrix) if position.kind == "text" else _digits(matrix)
    if position.kind == "fixed32":
        return np.ascontiguousarray(matrix).view("<u4").ravel().astype(np.uint64)
    if position.kind in ("fixed64", "number"):
        return np.ascontiguousarray(matrix).view("<u8" if position.kind == "fixed64" else "<f8").ravel()
    numbers = _varints(matrix)
    if (most := _MOST.get(position.kind)) is not None and numbers.max() > most:
        raise MixedShapes
    return numbers.astype(bool) if position.kind == "truth" else numbers.view(np.int64)


_MOST = {"truth": 1, "severity": _MAX_SEVERITY, "uint32": (1 << 32) - 1}


def _varints(matrix: Array) -> Array:
    """Decodes varints of equal length (n, bytes): seven bits per byte, the lowest first."""
    out = (matrix[:, 0] & 0x7F).astype(np.uint64)
    for number in range(1, matrix.shape[1]):
        part = matrix[:, number] & 0x7F
        if number == _MAX_VARINT - 1 and part.max() > 1:
            raise MixedShapes  # more than 64 bits
        out |= part.astype(np.uint64) << np.uint64(7 * number)
    return out


def _texts(matrix: Array) -> str | pa.Array:
    n, n_bytes = matrix.shape
    if (matrix == matrix[0]).all():
        return as_text(matrix[0].tobytes())
    plain = np.ascontiguousarray(matrix)
    offsets = pa.py_buffer(np.arange(n + 1, dtype=np.int32) * np.int32(n_bytes))
    texts = pa.StringArray.from_buffers(n, offsets, pa.py_buffer(plain), None, 0)
    if plain.max() >= 0x80:
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid as error:
            raise MixedShapes from error
    return texts


def _digits(matrix: Array) -> pa.Array:
    """Hexadecimal digits; NULL for empty bytes."""
    n, n_bytes = matrix.shape
    digits = matrix.tobytes().hex()
    return pa.array([digits[2 * n_bytes * i : 2 * n_bytes * (i + 1)] or None for i in range(n)], pa.string())


def as_text(raw: bytes) -> str:
    """UTF-8 as text. Raises MixedShapes."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise MixedShapes from error
