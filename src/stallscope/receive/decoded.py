"""Decoded records in columns: the common format of all decoders, from which rows are created.

Attributes of all records are in flat arrays (m,), with the number of their record in `parent`. Every value is in
exactly one of the typed arrays and NULL in the others; `json` has values that are neither text, number nor boolean.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Group:
    """Data shared by the records of one scope: attributes as Python values by name. place: index of its ResourceLogs
    (or -Metrics, -Spans) in the request.
    """

    resource: dict[str, Any]
    scope: dict[str, Any] = field(default_factory=dict)
    scope_name: str = ""
    scope_version: str = ""
    schema_url: str = ""
    place: int = 0

    @cached_property
    def text(self) -> str:
        """as_json() without the enclosing braces."""
        return dumped(self.as_json())[1:-1]

    def as_json(self) -> dict[str, Any]:
        """The part of the group that is kept in `attrs`."""
        scope = {"name": self.scope_name, "version": self.scope_version, "attributes": self.scope}
        content = {key: value for key, value in scope.items() if value}
        out: dict[str, Any] = {}
        if self.resource:
            out["otel.resource"] = self.resource
        if content:
            out["otel.scope"] = content
        if self.schema_url:
            out["otel.schema_url"] = self.schema_url
        return out


@dataclass(frozen=True)
class Attributes:
    """The records' individual attributes, flat. parent: int64 (m,), ascending."""

    parent: Array
    key: pa.Array
    text: pa.Array
    integer: pa.Array
    number: pa.Array
    truth: pa.Array
    json: pa.Array

    @cached_property
    def names(self) -> list[str]:
        """The distinct keys, by code."""
        names: list[str] = self._coded.dictionary.to_pylist()
        return names

    @cached_property
    def code(self) -> Array:
        """Code of the key (m,)."""
        codes: Array = self._coded.indices.to_numpy()
        return codes

    @cached_property
    def is_integer(self) -> Array:
        """Whether each value is an integer (m,)."""
        return np.asarray(self.integer.is_valid())

    @cached_property
    def integers(self) -> Array:
        """The integers (m,); undefined for values of other types."""
        _, numbers = self.integer.buffers()
        plain = pa.Array.from_buffers(
            pa.int64(), len(self.integer), [None, numbers], offset=self.integer.offset
        )
        return np.asarray(plain)

    def listed(self) -> "Attributes":
        """The records themselves."""
        return self

    @cached_property
    def _coded(self) -> pa.DictionaryArray:
        return self.key.dictionary_encode()


@dataclass(frozen=True)
class AlignedAttributes:
    """Attributes of n records that all have the same keys, in the same order.

    columns: by key (n,), without NULL: string, int64, float64 or bool.
    """

    n: int
    columns: dict[str, pa.Array]

    @property
    def names(self) -> list[str]:
        """The distinct keys."""
        return list(self.columns)

    def listed(self) -> Attributes:
        """The same attributes, record by record."""
        k = len(self.columns)
        if not self.n * k:
            return AttributesBuilder().attributes()
        order = pa.array(np.arange(self.n * k).reshape(k, self.n).T.ravel())
        text, integer, number, truth = (
            pa.concat_arrays(
                [
                    values if values.type == kind else pa.nulls(self.n, kind)
                    for values in self.columns.values()
                ]
            ).take(order)
            for kind in (pa.string(), pa.int64(), pa.float64(), pa.bool_())
        )
        keys = pa.array(self.names, pa.string()).take(pa.array(np.tile(np.arange(k), self.n)))
        nothing = pa.nulls(self.n * k, pa.string())
        return Attributes(np.repeat(np.arange(self.n), k), keys, text, integer, number, truth, nothing)


@dataclass(frozen=True)
class FlatRecords:
    """n records. group: int64 (n,), index into groups.

    given: columns of the target table that do not come from attributes, by name (n,).
    extra: further content of `attrs`: JSON values as text by key, NULL if absent (n,).
    counts: irregularities, by counter name.
    """

    n: int
    given: dict[str, pa.Array]
    extra: dict[str, pa.Array]
    attributes: Attributes | AlignedAttributes
    group: Array
    groups: list[Group]
    counts: dict[str, int] = field(default_factory=dict)


class AttributesBuilder:
    """Collects attributes individually, for the decoders that loop in Python."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._key: list[str] = []
        self._values: tuple[list[Any], ...] = ([], [], [], [], [])

    def add(self, parent: int, key: str, value: Any) -> None:
        """Add one attribute; value: as returned by any_value()."""
        self._parent.append(parent)
        self._key.append(key)
        kind = _kind(value)
        for number, column in enumerate(self._values):
            column.append(None if number != kind else dumped(value) if kind == 4 else value)

    def attributes(self) -> Attributes:
        """The collected attributes."""
        types = (pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.string())
        arrays = [pa.array(values, kind) for values, kind in zip(self._values, types, strict=True)]
        return Attributes(np.array(self._parent, np.int64), pa.array(self._key, pa.string()), *arrays)


def _kind(value: Any) -> int:
    if isinstance(value, str):
        return 0
    if isinstance(value, bool):
        return 3
    if isinstance(value, int):
        return 1
    return 2 if isinstance(value, float) else 4


def dumped(value: Any) -> str:
    """JSON text of a value; numbers that JSON cannot express become text."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_without_nan(value), separators=(",", ":"), ensure_ascii=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list) else value
