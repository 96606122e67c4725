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

_MOST_VARINT = 10
_MOST_SEVERITY = 24
_WORD = 8


class Unlike(Exception):
    """Records differ in shape, or are irregular: a general decoder has to read them."""


class Place(NamedTuple):
    """Position of a value in a record. kind: text, bytes, varint, truth, number, fixed64 or fixed32."""

    kind: str
    begin: int
    end: int


@dataclass(frozen=True)
class Shape:
    """fields: by number; attributes: by key, in order. mask: the structural bits of each byte."""

    fields: dict[int, Place]
    attributes: dict[str, Place]
    mask: bytes

    def is_like(self, other: "Shape") -> bool:
        """Whether it has the same fields and attributes of the same kinds; lengths may differ."""
        return {number: place.kind for number, place in self.fields.items()} == {
            number: place.kind for number, place in other.fields.items()
        } and [(key, place.kind) for key, place in self.attributes.items()] == [
            (key, place.kind) for key, place in other.attributes.items()
        ]


def shape_of(record: bytes) -> Shape:
    """The shape of a record. Raises Unlike for irregular records: lists, duplicate or unknown fields."""
    reading = _Reading(record, bytearray(_ALL * len(record)))
    fields: dict[int, Place] = {}
    attributes: dict[str, Place] = {}
    at = 0
    while at < len(record):
        tag = record[at]
        if tag == tag_of(6, 2):
            begin, at = reading.told(at + 1, len(record))
            key, place = reading.attribute(begin, at)
            if key in attributes:
                raise Unlike
            attributes[key] = place
            continue
        if tag >> 3 in fields or tag not in _READ:
            raise Unlike
        place = fields[tag >> 3] = _READ[tag](reading, at + 1)
        at = place.end
    return Shape(fields, attributes, bytes(reading.mask))


def tag_of(field: int, kind: int) -> int:
    """The first byte of a field. kind: 0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes."""
    return field << 3 | kind


@dataclass(frozen=True)
class _Reading:
    """One pass over a record; each method reads the element at an offset, and clears value bytes in the mask."""

    record: bytes
    mask: bytearray

    def told(self, at: int, end: int) -> tuple[int, int]:
        """Begin and end of a length-delimited element."""
        length, begin = 0, self._end_of_varint(at, end)
        for place in range(begin - 1, at - 1, -1):
            length = length << 7 | self.record[place] & 0x7F
        if begin + length > end:
            raise Unlike
        return begin, begin + length

    def bytes_(self, at: int, end: int, kind: str = "bytes") -> Place:
        begin, stop = self.told(at, end)
        return self._value(kind, begin, stop, _NONE)

    def varint(self, at: int, end: int, kind: str = "varint") -> Place:
        return self._value(kind, at, self._end_of_varint(at, end), _GOES_ON)

    def fixed(self, at: int, end: int, n: int, kind: str) -> Place:
        if at + n > end:
            raise Unlike
        return self._value(kind, at, at + n, _NONE)

    def attribute(self, at: int, end: int) -> tuple[str, Place]:
        """A KeyValue: field 1 the key, field 2 the value."""
        if self.record[at : at + 1] != bytes([tag_of(1, 2)]):
            raise Unlike
        begin, stop = self.told(at + 1, end)
        if self.record[stop : min(stop + 1, end)] != bytes([tag_of(2, 2)]):
            raise Unlike
        value, value_end = self.told(stop + 1, end)
        if value_end != end:
            raise Unlike
        return as_text(self.record[begin:stop]), self.any_value(value, end)

    def any_value(self, at: int, end: int) -> Place:
        """An AnyValue that is a text, a boolean, an integer or a number."""
        tag = self.record[at] if at < end else None
        if tag == tag_of(1, 2):
            place = self.bytes_(at + 1, end, "text")
        elif tag == tag_of(3, 0):
            place = self.varint(at + 1, end)
        elif tag == tag_of(4, 1):
            place = self.fixed(at + 1, end, _WORD, "number")
        elif tag == tag_of(2, 0):
            place = self.varint(at + 1, end, "truth")
        else:
            raise Unlike
        if place.end != end:
            raise Unlike
        return place

    def body(self, at: int) -> Place:
        return self.any_value(*self.told(at, len(self.record)))

    def _end_of_varint(self, at: int, end: int) -> int:
        for place in range(at, min(at + _MOST_VARINT, end)):
            if self.record[place] < 0x80:
                return place + 1
        raise Unlike

    def _value(self, kind: str, begin: int, end: int, mask: bytes) -> Place:
        self.mask[begin:end] = mask * (end - begin)
        return Place(kind, begin, end)


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


def values(place: Place, records: Array) -> Any:
    """The values at the same position of all records (n, bytes).

    text: a string if all are equal, otherwise an Arrow array, as for bytes, which become hexadecimal digits; others:
    numpy arrays (n,): uint64 of fixed64, int64 of varints, float64, bool. Raises Unlike.
    """
    found = records[:, place.begin : place.end]
    if place.kind in ("text", "bytes"):
        return _texts(found) if place.kind == "text" else _digits(found)
    if place.kind == "fixed32":
        return np.ascontiguousarray(found).view("<u4").ravel().astype(np.uint64)
    if place.kind in ("fixed64", "number"):
        return np.ascontiguousarray(found).view("<u8" if place.kind == "fixed64" else "<f8").ravel()
    numbers = _varints(found)
    if (most := _MOST.get(place.kind)) is not None and numbers.max() > most:
        raise Unlike
    return numbers.astype(bool) if place.kind == "truth" else numbers.view(np.int64)


_MOST = {"truth": 1, "severity": _MOST_SEVERITY, "uint32": (1 << 32) - 1}


def _varints(found: Array) -> Array:
    """Decodes varints of equal length (n, bytes): seven bits per byte, the lowest first."""
    out = (found[:, 0] & 0x7F).astype(np.uint64)
    for number in range(1, found.shape[1]):
        part = found[:, number] & 0x7F
        if number == _MOST_VARINT - 1 and part.max() > 1:
            raise Unlike  # more than 64 bits
        out |= part.astype(np.uint64) << np.uint64(7 * number)
    return out


def _texts(found: Array) -> str | pa.Array:
    n, n_bytes = found.shape
    if (found == found[0]).all():
        return as_text(found[0].tobytes())
    plain = np.ascontiguousarray(found)
    offsets = pa.py_buffer(np.arange(n + 1, dtype=np.int32) * np.int32(n_bytes))
    texts = pa.StringArray.from_buffers(n, offsets, pa.py_buffer(plain), None, 0)
    if plain.max() >= 0x80:
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid as error:
            raise Unlike from error
    return texts


def _digits(found: Array) -> pa.Array:
    """Hexadecimal digits; NULL for empty bytes."""
    n, n_bytes = found.shape
    digits = found.tobytes().hex()
    return pa.array([digits[2 * n_bytes * i : 2 * n_bytes * (i + 1)] or None for i in range(n)], pa.string())


def as_text(raw: bytes) -> str:
    """UTF-8 as text. Raises Unlike."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Unlike from error
