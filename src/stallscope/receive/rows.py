"""From decoded records to rows: attributes fill columns, and attributes without a column go into `attrs`.

Nothing is dropped. A value that does not match its column (non-numeric text, a rank beyond 32 bits), that a better
name of the same fact overrides, or that uses another vocabulary, stays in `attrs` as it was sent.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.receive import record_attributes, sender_aliases
from stallscope.receive.attributes import ABOUT_NODE, keys_of, lifted_columns
from stallscope.receive.decoded import AlignedAttributes, Attributes, FlatRecords, Group
from stallscope.store.hub import schema
from stallscope.store.hub.arrow_tables import constant

_MAX_ABOUT = 200

REQUEST = "request"
"""Not a column of any table: rows of several requests carry their request's number in it until they are split."""


def table_rows(flat: FlatRecords, table: str) -> pa.Table:
    """The rows of a table for the records; without the columns that no record fills."""
    if isinstance(flat.attributes, AlignedAttributes):
        with suppress(record_attributes.MixedTypes):
            return _rows(flat, record_attributes.AlignedRecordAttributes(flat.attributes), table)
    return _rows(flat, record_attributes.ListedRecordAttributes(flat.attributes.listed(), flat.n), table)


def _rows(flat: FlatRecords, attributes: record_attributes.RecordAttributes, table: str) -> pa.Table:
    lifting = _RecordPass(flat, attributes)
    columns: dict[str, pa.Array] = {}
    for column in lifted_columns(table):
        values = lifting.column(column)
        direct = flat.given.get(column.name)
        if direct is not None:
            values = direct if values is None or not direct.null_count else pc.coalesce(direct, values)
        if values is not None:
            columns[column.name] = values
    for name in ("ts_ns", *(n for n in flat.given if n == REQUEST or n in schema.TABLES[table].names)):
        columns.setdefault(name, flat.given[name])
    if "attrs" in schema.TABLES[table].names:
        columns["attrs"] = lifting.left_over()
    return pa.table(columns)


def about_nodes(flat: FlatRecords, request: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Rows for `nodes`, by request: the machine's description from resources, and from records that describe a GPU.
    request: the request number of each group.
    """
    columns = {column.name: column for column in schema.NODES.columns}
    sources = [(i, group.scope) for i, group in enumerate(flat.groups) if _tells_of_node(group)]
    sources += [(int(flat.group[number]), about) for number, about in _of_gpu_model(flat.attributes)]
    by_request: dict[int, dict[tuple[Any, Any], dict[str, Any]]] = {}
    for i, attributes in sources:
        source = (attributes, flat.groups[i].resource)
        about = {name: _of_group(columns[name], source) for name in ABOUT_NODE}
        node = (_of_group(columns["cluster_id"], source), _of_group(columns["node_id"], source))
        if node[1] and any(value is not None for value in about.values()):
            known = by_request.setdefault(request[i], {}).setdefault(node, dict.fromkeys(ABOUT_NODE))
            known |= {name: value for name, value in about.items() if value is not None}
    return {
        number: [
            {"cluster_id": cluster, "node_id": name, **about} for (cluster, name), about in nodes.items()
        ]
        for number, nodes in by_request.items()
    }


def _tells_of_node(group: Group) -> bool:
    about = _keys_about_node()
    return not (about.isdisjoint(group.scope) and about.isdisjoint(group.resource))


@cache
def _keys_about_node() -> frozenset[str]:
    return frozenset(key for name in ABOUT_NODE for key in keys_of(name))


def _of_gpu_model(attribute_table: AlignedAttributes | Attributes) -> list[tuple[int, dict[str, Any]]]:
    """Index and attributes of records that name a GPU model; at most a few thousand."""
    if _keys_about_node().isdisjoint(attribute_table.names):
        return []
    attributes = attribute_table.listed()
    about = [code for code, name in enumerate(attributes.names) if name in _keys_about_node()]
    result: dict[int, dict[str, Any]] = {}
    for at in np.flatnonzero(np.isin(attributes.code, about))[:_MAX_ABOUT].tolist():
        values = (attributes.text[at], attributes.integer[at], attributes.number[at])
        known = [value.as_py() for value in values if value.is_valid]
        if known:
            result.setdefault(int(attributes.parent[at]), {})[attributes.key[at].as_py()] = known[0]
    return list(result.items())


@dataclass
class _RecordPass:
    """One pass over the records."""

    flat: FlatRecords
    attributes: record_attributes.RecordAttributes

    def __post_init__(self) -> None:
        groups = self.flat.groups
        self._shared = {key for group in groups for source in (group.scope, group.resource) for key in source}

    def column(self, column: schema.Column) -> pa.Array | None:
        """The column's values from record, scope and resource; None if none of them has the attribute."""
        own_rows = self.attributes.column(column)
        if self._shared.isdisjoint(keys_of(column.name)):
            return own_rows
        shared = [_of_group(column, (group.scope, group.resource)) for group in self.flat.groups]
        if all(value is None for value in shared):
            return own_rows
        kind = schema.arrow_type(column)
        if len(shared) == 1:
            scalar = pa.scalar(shared[0], kind)
            if own_rows is None:
                return pa.repeat(scalar, self.flat.n)
            return own_rows.fill_null(scalar) if own_rows.null_count else own_rows
        rows = pa.array(shared, kind).take(pa.array(self.flat.group))
        return rows if own_rows is None else pc.coalesce(own_rows, rows)

    def left_over(self) -> pa.Array:
        """JSON of attributes without a column: the record's own, then the decoder's, then scope and resource."""
        parts = [
            *self.attributes.fragments(),
            *(record_attributes.member(key, values) for key, values in self.flat.extra.items()),
        ]
        shared = [group.text for group in self.flat.groups]
        if not self.flat.n or not (parts or any(shared)):
            return pa.nulls(self.flat.n, pa.string())
        if any(shared):
            begin, end = ("", "") if parts else ("{", "}")
            texts = pa.array([f"{begin}{text}{end}" if text else None for text in shared], pa.string())
            parts.append(texts.take(pa.array(self.flat.group)))
            if len(parts) == 1:
                return parts[0]
        # Not with null_handling="skip": that drops rows in which all parts are NULL (pyarrow 26).
        parts = _without_nulls_joined(parts)
        joined = parts[0]
        for part in parts[1:]:
            joined = pc.coalesce(pc.binary_join_element_wise(joined, part, constant(",")), joined, part)
        return pc.binary_join_element_wise(constant("{"), joined, constant("}"), constant(""))


def _without_nulls_joined(parts: Sequence[pa.Array]) -> list[pa.Array]:
    """The parts, with neighbours that have no NULL joined at once: each further join copies the whole text."""
    out: list[pa.Array] = []
    for has_nulls, group in groupby(parts, key=lambda part: bool(part.null_count)):
        neighbours = list(group)
        if has_nulls or len(neighbours) == 1:
            out += neighbours
        else:
            out.append(pc.binary_join_element_wise(*neighbours, constant(",")))
    return out


def _of_group(column: schema.Column, sources: tuple[dict[str, Any], ...]) -> Any:
    """The value of the first matching source for a column, in the column's type; None if none matches."""
    for source in sources:
        for key in keys_of(column.name):
            if key in source and (value := _fitting(column, source[key])) is not None:
                return value
    return None


def _fitting(column: schema.Column, value: Any) -> Any:
    if column.kind == "text":
        if isinstance(value, str):
            return sender_aliases.TEXT.get(column.name, str)(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return sender_aliases.NUMBER.get(column.name, str)(value) or None
        return None
    if column.kind == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if column.kind == "double":
        return float(value) if isinstance(value, int | float) and np.isfinite(value) else None
    if isinstance(value, str):
        value = int(value) if record_attributes.INT.fullmatch(value) else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) < record_attributes.EXACT else None
    most = record_attributes.INT32 if column.kind == "int32" else 1 << 63
    return value if isinstance(value, int) and -most <= value < most else None
