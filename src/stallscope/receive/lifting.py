"""From decoded records to rows: attributes fill columns, and what has no column goes into `attrs`. Nothing is dropped.

A value that does not fit its column (text that is no number, a rank beyond 32 bits), that another name of the same
fact comes before, or that is written in other words than ours stays in `attrs` as it was sent.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.receive import words
from stallscope.receive.attributes import ABOUT_NODE, keys_of, lifted_columns
from stallscope.receive.flat import Array, Attributes, Flat, Group, dumped
from stallscope.store.hub import schema

_INT = re.compile(r"-?\d{1,18}")
_INT32 = 1 << 31
_EXACT = 1 << 53
_HANDLES = ("comm_handle", "stream")
_MOST_ABOUT = 200
_TO_ESCAPE = r'["\\\x00-\x1f]'

REQUEST = "request"
"""Not a column of any table: rows of several requests carry the number of theirs in it until they are parted."""


def rows(flat: Flat, table: str) -> pa.Table:
    """The rows of a table that the records are; without the columns that no record fills."""
    lifting = _Lifting(flat)
    columns: dict[str, pa.Array] = {}
    for column in lifted_columns(table):
        found = lifting.column(column)
        given = flat.given.get(column.name)
        if given is not None:
            found = given if found is None or not given.null_count else pc.coalesce(given, found)
        if found is not None:
            columns[column.name] = found
    for name in ("ts_ns", *(n for n in flat.given if n == REQUEST or n in schema.TABLES[table].names)):
        columns.setdefault(name, flat.given[name])
    if "attrs" in schema.TABLES[table].names:
        columns["attrs"] = lifting.left_over()
    return pa.table(columns)


def about_nodes(flat: Flat, request: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Rows for `nodes`, by request: what resources, and records that say what GPU they are about, tell of their
    machine. request: the number of each group's request.
    """
    columns = {column.name: column for column in schema.NODES.columns}
    sources = [(i, group.scope) for i, group in enumerate(flat.groups) if _tells_of_node(group)]
    sources += [(int(flat.group[number]), own) for number, own in _of_gpu_model(flat.attributes)]
    found: dict[int, dict[tuple[Any, Any], dict[str, Any]]] = {}
    for i, own in sources:
        source = (own, flat.groups[i].resource)
        told = {name: _of_group(columns[name], source) for name in ABOUT_NODE}
        node = (_of_group(columns["cluster_id"], source), _of_group(columns["node_id"], source))
        if node[1] and any(value is not None for value in told.values()):
            known = found.setdefault(request[i], {}).setdefault(node, dict.fromkeys(ABOUT_NODE))
            known |= {name: value for name, value in told.items() if value is not None}
    return {
        number: [{"cluster_id": cluster, "node_id": name, **told} for (cluster, name), told in nodes.items()]
        for number, nodes in found.items()
    }


def _tells_of_node(group: Group) -> bool:
    about = _keys_about_node()
    return not (about.isdisjoint(group.scope) and about.isdisjoint(group.resource))


@cache
def _keys_about_node() -> frozenset[str]:
    return frozenset(key for name in ABOUT_NODE for key in keys_of(name))


def _of_gpu_model(attributes: Attributes) -> list[tuple[int, dict[str, Any]]]:
    """Number and attributes of records that name a GPU model; of few thousand at most."""
    about = [code for code, name in enumerate(attributes.names) if name in _keys_about_node()]
    if not about:
        return []
    found: dict[int, dict[str, Any]] = {}
    for at in np.flatnonzero(np.isin(attributes.code, about))[:_MOST_ABOUT].tolist():
        values = (attributes.text[at], attributes.integer[at], attributes.number[at])
        known = [value.as_py() for value in values if value.is_valid]
        if known:
            found.setdefault(int(attributes.parent[at]), {})[attributes.key[at].as_py()] = known[0]
    return list(found.items())


@dataclass
class _Lifting:
    """One pass over the records."""

    flat: Flat

    def __post_init__(self) -> None:
        groups = self.flat.groups
        self._code_of = {name: code for code, name in enumerate(self.flat.attributes.names)}
        self._is_lifted = np.zeros(len(self.flat.attributes.code), bool)
        self._every = np.arange(self.flat.n)
        self._shared = {key for group in groups for source in (group.scope, group.resource) for key in source}

    def column(self, column: schema.Column) -> pa.Array | None:
        """The column's values from record, scope and resource; None where nobody says anything."""
        own = self._own(column)
        if self._shared.isdisjoint(keys_of(column.name)):
            return own
        shared = [_of_group(column, (group.scope, group.resource)) for group in self.flat.groups]
        if all(value is None for value in shared):
            return own
        kind = schema.arrow_type(column)
        if len(shared) == 1:
            scalar = pa.scalar(shared[0], kind)
            if own is None:
                return pa.repeat(scalar, self.flat.n)
            return own.fill_null(scalar) if own.null_count else own
        theirs = pa.array(shared, kind).take(pa.array(self.flat.group))
        return theirs if own is None else pc.coalesce(own, theirs)

    def _own(self, column: schema.Column) -> pa.Array | None:
        """The column's values from the records' own attributes."""
        codes = [self._code_of[key] for key in keys_of(column.name) if key in self._code_of]
        if not codes or not self.flat.n:
            return None
        attributes = self.flat.attributes
        # The best name last, so that it stays where a record has several.
        at = np.concatenate([np.flatnonzero(attributes.code == code) for code in reversed(codes)])
        values, fits = _as_kind(column, attributes, at)
        if fits.all() and np.array_equal(attributes.parent[at], self._every):  # as one program's records are
            picked, source = values, at
        else:
            place = np.flatnonzero(fits)
            pick = np.full(self.flat.n, -1, np.int64)
            pick[attributes.parent[at[place]]] = place
            is_found = pick >= 0
            if not is_found.any():
                return None
            picked = values.take(pa.array(pick, mask=~is_found))
            source = np.where(is_found, at[pick], -1)
        if column.name in words.TEXT:
            picked, is_same = _in_our_words(picked, words.TEXT[column.name])
            source = source[is_same]
        self._is_lifted[source[source >= 0]] = True
        return picked.cast(schema.arrow_type(column))

    def left_over(self) -> pa.Array:
        """JSON of what has no column: own attributes, then what the decoder adds, then scope and resource."""
        parts = [*self._own_fragments(), *(_member(key, values) for key, values in self.flat.extra.items())]
        shared = [dumped(group.as_json())[1:-1] for group in self.flat.groups]
        if not self.flat.n or not (parts or any(shared)):
            return pa.nulls(self.flat.n, pa.string())
        if any(shared):
            begin, end = ("", "") if parts else ("{", "}")
            texts = pa.array([f"{begin}{text}{end}" if text else None for text in shared], pa.string())
            parts.append(texts.take(pa.array(self.flat.group)))
            if len(parts) == 1:
                return parts[0]
        # Not with null_handling="skip": that drops rows in which all parts are NULL (pyarrow 26).
        joined = parts[0]
        for part in parts[1:]:
            joined = pc.coalesce(pc.binary_join_element_wise(joined, part, ","), joined, part)
        return pc.binary_join_element_wise("{", joined, "}", "")

    def _own_fragments(self) -> list[pa.Array]:
        """`"key":value,...` of each record's attributes that have no column; NULL where it has none."""
        at = np.flatnonzero(~self._is_lifted)
        if not len(at):
            return []
        attributes = self.flat.attributes
        keys = pa.array([_quoted_key(name) for name in attributes.names], pa.string())
        fragments = pc.binary_join_element_wise(
            keys.take(pa.array(attributes.code[at])), _as_json(attributes, at), ""
        )
        parents = attributes.parent[at]
        offsets = np.searchsorted(parents, np.arange(self.flat.n + 1)).astype(np.int32)
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), fragments), ",")
        return [pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)]


def _as_kind(column: schema.Column, attributes: Attributes, at: Array) -> tuple[pa.Array, Array]:
    """The values at these places as a column would have them, and which of them it can hold."""
    is_integer = attributes.is_integer[at]
    if column.kind in ("int32", "int64") and is_integer.all():
        return _as_wide(attributes.integers[at], column.kind)
    where = pa.array(at)
    if column.kind == "text":
        values = attributes.text.take(where)
        if is_integer.any():
            values = _as_text(column.name, values, attributes.integer.take(where))
    elif column.kind == "bool":
        values = attributes.truth.take(where)
    elif column.kind == "double":
        number, integer = attributes.number.take(where), attributes.integer.take(where)
        values = pc.coalesce(number, integer.cast(pa.float64(), safe=False))
        return values, np.asarray(pc.is_finite(values).fill_null(False))
    elif column.name in _HANDLES:
        values = _as_signed(attributes.text.take(where), attributes.integer.take(where))
    else:
        values = _as_integer(
            attributes.text.take(where), attributes.integer.take(where), attributes.number.take(where)
        )
    fits = np.asarray(values.is_valid())
    if column.kind == "int32":
        numbers = np.asarray(values.fill_null(0))
        fits = fits & _fits_int32(numbers)
    return values, fits


def _as_wide(numbers: Array, kind: str) -> tuple[pa.Array, Array]:
    """Integers as a column of this kind has them, where all fit; and which of them do."""
    if kind == "int64":
        return pa.array(numbers), np.ones(len(numbers), bool)
    fits = _fits_int32(numbers)
    return pa.array(numbers.astype(np.int32) if fits.all() else numbers), fits


def _fits_int32(numbers: Array) -> Array:
    fits: Array = (numbers >= -_INT32) & (numbers < _INT32)
    return fits


def _as_text(name: str, text: pa.Array, integer: pa.Array) -> pa.Array:
    if name not in words.NUMBER:
        return pc.coalesce(text, integer.cast(pa.string()))
    coded = integer.dictionary_encode()
    ours = [words.NUMBER[name](number) or None for number in coded.dictionary.to_pylist()]
    return pc.coalesce(text, pa.array(ours, pa.string()).take(coded.indices))


def _as_integer(text: pa.Array, integer: pa.Array, number: pa.Array) -> pa.Array:
    """Integers; texts of digits and whole numbers, too."""
    values = integer
    if number.null_count < len(number):
        plain = np.asarray(number.fill_null(0.5))
        is_whole = (plain == np.floor(plain)) & (np.abs(plain) < _EXACT)
        whole = np.where(is_whole, plain, 0).astype(np.int64)
        values = pc.coalesce(values, pa.array(whole, mask=~is_whole))
    if text.null_count < len(text):
        is_digits = pc.match_substring_regex(text, f"^{_INT.pattern}$").fill_null(False)
        digits = pc.if_else(is_digits, text, pa.scalar(None, pa.string())).cast(pa.int64())
        values = pc.coalesce(values, digits)
    return values


def _as_signed(text: pa.Array, integer: pa.Array) -> pa.Array:
    """Handles: 16 hexadecimal digits as the signed number of the same bits."""
    signed = [None if word is None else words.signed(word) for word in text.to_pylist()]
    return pc.coalesce(pa.array(signed, pa.int64()), integer)


def _of_group(column: schema.Column, sources: tuple[dict[str, Any], ...]) -> Any:
    """The value that the first source has for a column, as the column's type; None where none fits."""
    for source in sources:
        for key in keys_of(column.name):
            if key in source and (value := _fitting(column, source[key])) is not None:
                return value
    return None


def _fitting(column: schema.Column, value: Any) -> Any:
    if column.kind == "text":
        if isinstance(value, str):
            return words.TEXT.get(column.name, str)(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return words.NUMBER.get(column.name, str)(value) or None
        return None
    if column.kind == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if column.kind == "double":
        return float(value) if isinstance(value, int | float) and np.isfinite(value) else None
    if isinstance(value, str):
        value = int(value) if _INT.fullmatch(value) else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) < _EXACT else None
    most = _INT32 if column.kind == "int32" else 1 << 63
    return value if isinstance(value, int) and -most <= value < most else None


def _in_our_words(texts: pa.Array, to_ours: Any) -> tuple[pa.Array, Array]:
    """The texts in our words, and which of them are the same as before."""
    coded = texts.dictionary_encode()
    before = coded.dictionary.to_pylist()
    ours = [to_ours(word) for word in before]
    if ours == before:
        return texts, np.ones(len(texts), bool)
    is_same = np.array([a == b for a, b in zip(before, ours, strict=True)])
    same = is_same[np.asarray(coded.indices.fill_null(0))]
    return pa.array(ours, pa.string()).take(coded.indices), same


def _as_json(attributes: Attributes, at: Array) -> pa.Array:
    """JSON text of the values at these places."""
    where = pa.array(at)
    texts = attributes.text.take(where)
    parts = [quoted(texts)] if texts.null_count < len(texts) else []
    for values in (attributes.integer, attributes.truth):
        here = values.take(where)
        if here.null_count < len(here):
            parts.append(here.cast(pa.string()))
    numbers = attributes.number.take(where)
    if numbers.null_count < len(numbers):
        parts.append(number_json(numbers))
    parts.append(attributes.json.take(where))
    found = pc.coalesce(*parts) if len(parts) > 1 else parts[0]
    return found.fill_null("null")


def quoted(texts: pa.Array) -> pa.Array:
    """Texts as JSON strings."""
    escaped = texts
    needs = pc.match_substring_regex(texts, _TO_ESCAPE).fill_null(False)
    if pc.any(needs).as_py():
        listed = zip(texts.to_pylist(), needs.to_pylist(), strict=True)
        escaped = pa.array([dumped(text)[1:-1] if bad else text for text, bad in listed], pa.string())
    return pc.binary_join_element_wise('"', escaped, '"', "")


def number_json(numbers: pa.Array) -> pa.Array:
    """Numbers as JSON; those that JSON does not know as text."""
    texts = numbers.cast(pa.string())
    finite = pc.is_finite(numbers)
    if pc.all(finite.fill_null(True)).as_py():
        return texts
    words_of = {"nan": '"NaN"', "-nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
    return pa.array([words_of.get(t, t) if t else None for t in texts.to_pylist()], pa.string())


def _member(key: str, values: pa.Array) -> pa.Array:
    """`"key":value`, NULL where the value is."""
    return pc.binary_join_element_wise(_quoted_key(key), values, "")


@lru_cache(maxsize=4096)
def _quoted_key(key: str) -> str:
    return dumped(key) + ":"
