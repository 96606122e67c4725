"""The records' own attributes as a table's columns, and as JSON if no column matches."""

import re
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.receive import sender_aliases
from stallscope.receive.attributes import keys_of
from stallscope.receive.decoded import AlignedAttributes, Array, Attributes, dumped
from stallscope.store.hub import schema
from stallscope.store.hub.arrow_tables import constant, nulls

INT = re.compile(r"-?\d{1,18}")
INT32 = 1 << 31
EXACT = 1 << 53
_HANDLES = ("comm_handle", "stream")
_TO_ESCAPE = r'["\\\x00-\x1f]'


class RecordAttributes(Protocol):
    """Attributes of n records. Call column() before fragments(), which leaves out the attributes used by columns."""

    def column(self, column: schema.Column) -> pa.Array | None:
        """The column's values (n,); None if no record has the attribute."""

    def fragments(self) -> list[pa.Array]:
        """`"key":value,...` of each record's attributes without a column; NULL if there are none."""


class MixedTypes(Exception):
    """Some records' values match the column's type and others do not."""


class AlignedRecordAttributes:
    """For records that all have the same attributes. column() raises MixedTypes."""

    def __init__(self, attributes: AlignedAttributes):
        self._attributes = attributes
        self._lifted: dict[
            str, Array | None
        ] = {}  # by key: the records whose value is in a column, None for all

    def column(self, column: schema.Column) -> pa.Array | None:
        """See RecordAttributes. Uses the best name whose values match the column's type."""
        for key in keys_of(column.name):
            values = self._attributes.columns.get(key)
            if values is None or not self._attributes.n:
                continue
            if column.kind in ("int32", "int64") and pa.types.is_int64(values.type):
                converted, fits = _as_wide(np.asarray(values), column.kind)
            else:
                converted, fits = _as_kind(column, of_one_type(values))
            if fits.all():
                self._lifted[key] = None
                if column.name in sender_aliases.TEXT:
                    converted, is_same = _in_our_words(converted, sender_aliases.TEXT[column.name])
                    self._lifted[key] = None if is_same.all() else is_same
                return _cast(converted, column)
            if fits.any():
                raise MixedTypes
        return None

    def fragments(self) -> list[pa.Array]:
        """See RecordAttributes."""
        return [
            self._fragment(key, values)
            for key, values in self._attributes.columns.items()
            if self._lifted.get(key, 0) is not None
        ]

    def _fragment(self, key: str, values: pa.Array) -> pa.Array:
        lifted = self._lifted.get(key)
        texts = member(key, _as_json(of_one_type(values)))
        return texts if lifted is None else pc.if_else(pa.array(lifted), pa.scalar(None, pa.string()), texts)


class ListedRecordAttributes:
    """For records with individual attributes."""

    def __init__(self, attributes: Attributes, n: int):
        self._attributes, self._n = attributes, n
        self._code_of = {name: code for code, name in enumerate(attributes.names)}
        self._is_lifted = np.zeros(len(attributes.code), bool)
        self._every = np.arange(n)

    def column(self, column: schema.Column) -> pa.Array | None:
        """See RecordAttributes."""
        codes = [self._code_of[key] for key in keys_of(column.name) if key in self._code_of]
        if not codes or not self._n:
            return None
        attributes = self._attributes
        # The best name is last, so that its value wins if a record has several names.
        at = np.concatenate([np.flatnonzero(attributes.code == code) for code in reversed(codes)])
        is_integer = column.kind in ("int32", "int64") and attributes.is_integer[at].all()
        if is_integer:
            values, fits = _as_wide(attributes.integers[at], column.kind)
        else:
            values, fits = _as_kind(column, _SelectedAttributes(attributes, at))
        if fits.all() and np.array_equal(
            attributes.parent[at], self._every
        ):  # typical of one program's records
            picked, source = values, at
        else:
            indexes = np.flatnonzero(fits)
            pick = np.full(self._n, -1, np.int64)
            pick[attributes.parent[at[indexes]]] = indexes
            is_found = pick >= 0
            if not is_found.any():
                return None
            picked = values.take(pa.array(pick, mask=~is_found))
            source = np.where(is_found, at[pick], -1)
        if column.name in sender_aliases.TEXT:
            picked, is_same = _in_our_words(picked, sender_aliases.TEXT[column.name])
            source = source[is_same]
        self._is_lifted[source[source >= 0]] = True
        return _cast(picked, column)

    def fragments(self) -> list[pa.Array]:
        """See RecordAttributes."""
        at = np.flatnonzero(~self._is_lifted)
        if not len(at):
            return []
        attributes = self._attributes
        keys = pa.array([quoted_key(name) for name in attributes.names], pa.string())
        texts = _as_json(_SelectedAttributes(attributes, at))
        fragments = pc.binary_join_element_wise(keys.take(pa.array(attributes.code[at])), texts, constant(""))
        parents = attributes.parent[at]
        offsets = np.searchsorted(parents, np.arange(self._n + 1)).astype(np.int32)
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), fragments), constant(","))
        return [pc.if_else(pc.equal(joined, constant("")), pa.scalar(None, pa.string()), joined)]


class _Values(Protocol):
    """Values of attributes, each in one of the arrays and NULL in the others."""

    @property
    def text(self) -> pa.Array: ...
    @property
    def integer(self) -> pa.Array: ...
    @property
    def number(self) -> pa.Array: ...
    @property
    def truth(self) -> pa.Array: ...
    @property
    def json(self) -> pa.Array: ...


class _SelectedAttributes:
    """The attributes at some positions of a list."""

    def __init__(self, attributes: Attributes, at: Array):
        self._attributes, self._where = attributes, pa.array(at)

    def __getattr__(self, name: str) -> pa.Array:
        taken = getattr(self._attributes, name).take(self._where)
        setattr(self, name, taken)
        return taken


class _SameTypeAttributes(NamedTuple):
    """The attributes of one key, all of the same type."""

    text: pa.Array
    integer: pa.Array
    number: pa.Array
    truth: pa.Array
    json: pa.Array


def of_one_type(values: pa.Array) -> _SameTypeAttributes:
    """Text, integer, number, boolean and JSON: NULL in all arrays except the array of the values' type."""
    text, integer, number, truth = (
        values if values.type == kind else nulls(len(values), kind)
        for kind in (pa.string(), pa.int64(), pa.float64(), pa.bool_())
    )
    return _SameTypeAttributes(text, integer, number, truth, nulls(len(values), pa.string()))


def _as_kind(column: schema.Column, values: _Values) -> tuple[pa.Array, Array]:
    """The values in the column's type, and which of them the column can hold."""
    if column.kind == "double":
        converted = pc.coalesce(values.number, values.integer.cast(pa.float64(), safe=False))
        return converted, np.asarray(pc.is_finite(converted).fill_null(False))
    if column.kind == "text":
        converted = _as_text(column.name, values.text, values.integer)
    elif column.kind == "bool":
        converted = values.truth
    elif column.name in _HANDLES:
        converted = _as_signed(values.text, values.integer)
    else:
        converted = _as_integer(values.text, values.integer, values.number)
    fits = np.asarray(converted.is_valid())
    if column.kind == "int32":
        fits = fits & _fits_int32(np.asarray(converted.fill_null(0)))
    return converted, fits


def _cast(values: pa.Array, column: schema.Column) -> pa.Array:
    kind = schema.arrow_type(column)
    return values if values.type == kind else values.cast(kind)


def _as_wide(numbers: Array, kind: str) -> tuple[pa.Array, Array]:
    """Integers in the column's width, if all fit; and which of them fit."""
    if kind == "int64":
        return pa.array(numbers), np.ones(len(numbers), bool)
    fits = _fits_int32(numbers)
    return pa.array(numbers.astype(np.int32) if fits.all() else numbers), fits


def _fits_int32(numbers: Array) -> Array:
    fits: Array = (numbers >= -INT32) & (numbers < INT32)
    return fits


def _as_text(name: str, text: pa.Array, integer: pa.Array) -> pa.Array:
    if integer.null_count == len(integer):
        return text
    if name not in sender_aliases.NUMBER:
        return pc.coalesce(text, integer.cast(pa.string()))
    coded = integer.dictionary_encode()
    own_rows = [sender_aliases.NUMBER[name](number) or None for number in coded.dictionary.to_pylist()]
    return pc.coalesce(text, pa.array(own_rows, pa.string()).take(coded.indices))


def _as_integer(text: pa.Array, integer: pa.Array, number: pa.Array) -> pa.Array:
    """Integers, including texts of digits and whole floating-point numbers."""
    values = integer
    if number.null_count < len(number):
        plain = np.asarray(number.fill_null(0.5))
        is_whole = (plain == np.floor(plain)) & (np.abs(plain) < EXACT)
        whole = np.where(is_whole, plain, 0).astype(np.int64)
        values = pc.coalesce(values, pa.array(whole, mask=~is_whole))
    if text.null_count < len(text):
        is_digits = pc.match_substring_regex(text, f"^{INT.pattern}$").fill_null(False)
        digits = pc.if_else(is_digits, text, pa.scalar(None, pa.string())).cast(pa.int64())
        values = pc.coalesce(values, digits)
    return values


def _as_signed(text: pa.Array, integer: pa.Array) -> pa.Array:
    """Handles: 16 hexadecimal digits as the signed number of the same bits."""
    signed = [None if word is None else sender_aliases.signed(word) for word in text.to_pylist()]
    return pc.coalesce(pa.array(signed, pa.int64()), integer)


def _in_our_words(texts: pa.Array, to_ours: Any) -> tuple[pa.Array, Array]:
    """The texts in our vocabulary, and which of them are unchanged."""
    coded = texts.dictionary_encode()
    before = coded.dictionary.to_pylist()
    own_rows = [to_ours(word) for word in before]
    if own_rows == before:
        return texts, np.ones(len(texts), bool)
    is_same = np.array([a == b for a, b in zip(before, own_rows, strict=True)])
    same = is_same[np.asarray(coded.indices.fill_null(0))]
    return pa.array(own_rows, pa.string()).take(coded.indices), same


def _as_json(values: _Values) -> pa.Array:
    """JSON text of the values."""
    parts = [quoted(values.text)] if values.text.null_count < len(values.text) else []
    for plain in (values.integer, values.truth):
        if plain.null_count < len(plain):
            parts.append(plain.cast(pa.string()))
    if values.number.null_count < len(values.number):
        parts.append(number_json(values.number))
    parts.append(values.json)
    texts = pc.coalesce(*parts) if len(parts) > 1 else parts[0]
    return texts.fill_null("null")


def quoted(texts: pa.Array) -> pa.Array:
    """Texts as JSON strings."""
    escaped = texts
    needs = pc.match_substring_regex(texts, _TO_ESCAPE).fill_null(False)
    if pc.any(needs).as_py():
        listed = zip(texts.to_pylist(), needs.to_pylist(), strict=True)
        escaped = pa.array([dumped(text)[1:-1] if bad else text for text, bad in listed], pa.string())
    return pc.binary_join_element_wise(constant('"'), escaped, constant('"'), constant(""))


def number_json(numbers: pa.Array) -> pa.Array:
    """Numbers as JSON; values that JSON cannot express (NaN, infinities) as text."""
    texts = numbers.cast(pa.string())
    finite = pc.is_finite(numbers)
    if pc.all(finite.fill_null(True)).as_py():
        return texts
    words_of = {"nan": '"NaN"', "-nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
    return pa.array([words_of.get(t, t) if t else None for t in texts.to_pylist()], pa.string())


def member(key: str, values: pa.Array) -> pa.Array:
    """`"key":value`, NULL if the value is NULL."""
    return pc.binary_join_element_wise(pa.scalar(quoted_key(key), pa.string()), values, constant(""))


@lru_cache(maxsize=4096)
def quoted_key(key: str) -> str:
    """A key as JSON, with the colon."""
    return dumped(key) + ":"
