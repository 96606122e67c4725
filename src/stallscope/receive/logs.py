"""OTLP logs: from protobuf bytes to flat records.

Records of one shape are decoded together (uniform_records.py), others by ptars (Rust). Tests compare both with a third
decoder that loops over protobuf objects. Raises BadInput for an invalid ExportLogsServiceRequest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import BadInput
from stallscope.receive import uniform_records
from stallscope.receive.any_value import any_value, as_dict
from stallscope.receive.decoded import AlignedAttributes, Array, Attributes, FlatRecords, Group, dumped
from stallscope.receive.record_attributes import of_one_type, quoted
from stallscope.receive.record_shape import MixedShapes
from stallscope.receive.timestamps import moments
from stallscope.store.hub.arrow_tables import constant, nulls

_VALUES = ("string_value", "int_value", "double_value", "bool_value")
_Typed = tuple[pa.Array, pa.Array, pa.Array, pa.Array, pa.Array]
Decoder = Callable[[bytes, int], FlatRecords]


def decode(body: bytes, now_ns: int) -> FlatRecords:
    """Decode a request: as matrices if its records are uniform, otherwise by ptars. now_ns: the hub's time.

    Raises BadInput.
    """
    try:
        return by_shape(body, now_ns)
    except MixedShapes:
        return by_ptars(body, now_ns)


@cache
def _handler() -> Any:
    import ptars
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as service

    pool = ptars.HandlerPool([service.DESCRIPTOR])
    return pool.get_for_message(service.ExportLogsServiceRequest.DESCRIPTOR)


def by_shape(body: bytes, now_ns: int) -> FlatRecords:
    """Decode records that all have the same fields and attributes. Raises MixedShapes for other records."""
    decoded = uniform_records.records(body)
    fields, n = decoded.fields, decoded.attributes.n
    columns = RecordColumns(
        time=fields.get(1, np.zeros(n, np.uint64)),
        observed=fields.get(11),
        severity=fields.get(2),
        severity_text=fields.get(3),
        event_name=fields.get(12),
        flags=fields.get(8),
        dropped=fields.get(7),
        trace_id=fields.get(9),
        span_id=fields.get(10),
        body=of_one_type(fields[5]) if 5 in fields else None,
    )
    return flat_records(columns, decoded.attributes, decoded.group, decoded.groups, now_ns)


def by_ptars(body: bytes, now_ns: int) -> FlatRecords:
    """Decode in Rust, into Arrow, without a Python object for each attribute."""
    from google.protobuf.message import DecodeError

    try:
        return _flat_by_ptars(body, now_ns)
    except (ValueError, pa.ArrowException, OverflowError, DecodeError) as error:
        raise BadInput(f"the request is not a valid OTLP logs message: {str(error)[:200]}") from error


def _flat_by_ptars(body: bytes, now_ns: int) -> FlatRecords:
    batch = _handler().list_to_record_batch([body])
    resources = batch.column(0).flatten()
    scopes_of = resources.field("scope_logs")
    scopes = scopes_of.flatten()
    records_of = scopes.field("log_records")
    records = records_of.flatten()
    resource_of_scope = _parents(scopes_of)
    groups = _groups(resources, scopes, resource_of_scope)
    attributes = _attributes(records.field("attributes"))
    body_column = records.field("body")
    columns = RecordColumns(
        time=np.asarray(records.field("time_unix_nano")),
        observed=np.asarray(records.field("observed_time_unix_nano")),
        severity=np.asarray(records.field("severity_number")),
        severity_text=records.field("severity_text"),
        event_name=records.field("event_name"),
        flags=np.asarray(records.field("flags")),
        dropped=np.asarray(records.field("dropped_attributes_count")),
        trace_id=_hex(records.field("trace_id")),
        span_id=_hex(records.field("span_id")),
        body=_typed(body_column),
    )
    return flat_records(columns, attributes, _parents(records_of), groups, now_ns)


def group_of_scope(resource: dict[str, Any], resource_part: Any, scope_part: Any, index: int = 0) -> Group:
    """The data shared by a ResourceLogs (or -Metrics, -Spans) and its ScopeLogs."""
    return Group(
        resource,
        as_dict(scope_part.scope.attributes),
        scope_part.scope.name,
        scope_part.scope.version,
        scope_part.schema_url or resource_part.schema_url,
        index,
    )


@dataclass(frozen=True, kw_only=True)
class RecordColumns:
    """The records' top-level fields (n,) from a decoder; None for fields that no record has."""

    time: Array
    observed: Array | None
    severity: Array | None
    severity_text: pa.Array | None
    event_name: pa.Array | None
    flags: Array | None
    dropped: Array | None
    trace_id: pa.Array | None
    span_id: pa.Array | None
    body: _Typed | None


def flat_records(
    columns: RecordColumns,
    attributes: Attributes | AlignedAttributes,
    group: Array,
    groups: list[Group],
    now_ns: int,
) -> FlatRecords:
    n = len(group)
    times = moments(columns.time, columns.observed, now_ns)
    ts_ns = times.ts_ns.astype(np.uint64)
    direct_columns = {
        "ts_ns": pa.array(times.ts_ns),
        "name": _or_null(columns.event_name, n),
        **_of_body(columns.body),
    }
    extra = {
        "otel.time_unix_nano": _some(columns.time, (ts_ns != columns.time) & (columns.time != 0)),
        "otel.observed_time_unix_nano": None
        if columns.observed is None
        else _some(columns.observed, (columns.observed != 0) & (columns.observed != ts_ns)),
        "otel.severity_number": _not_zero(columns.severity),
        "otel.severity_text": _quoted(columns.severity_text),
        "otel.flags": _not_zero(columns.flags),
        "otel.dropped_attributes_count": _not_zero(columns.dropped),
        "otel.trace_id": _quoted(columns.trace_id),
        "otel.span_id": _quoted(columns.span_id),
    }
    output = {key: values for key, values in extra.items() if values is not None}
    counts = {"untimed_records": times.n_replaced} if times.n_replaced else {}
    return FlatRecords(n, direct_columns, output, attributes, group, groups, counts)


def _of_body(body: _Typed | None) -> dict[str, pa.Array]:
    """The columns of a body: text, and a number if it is numeric."""
    if body is None:
        return {}
    text, integer, number, truth, other = body
    numeric = pc.coalesce(number, integer.cast(pa.float64(), safe=False))
    numeric = pc.if_else(pc.is_finite(numeric).fill_null(False), numeric, pa.scalar(None, pa.float64()))
    is_null = pc.equal(other, constant("null")).fill_null(False)
    others = pc.if_else(is_null, pa.scalar(None, pa.string()), other)
    words = pc.coalesce(
        text, integer.cast(pa.string()), number.cast(pa.string()), truth.cast(pa.string()), others
    )
    return {"value_text": words, "value_double": numeric}


def _or_null(texts: pa.Array | None, n: int) -> pa.Array:
    """NULL for empty texts: protobuf returns an empty text for an unset field."""
    if texts is None:
        return nulls(n, pa.string())
    return pc.if_else(pc.equal(texts, constant("")), pa.scalar(None, pa.string()), texts)


def _quoted(texts: pa.Array | None) -> pa.Array | None:
    """Texts as JSON; None if all are empty."""
    if texts is None:
        return None
    texts_or_null = _or_null(texts, len(texts))
    return quoted(texts_or_null) if texts_or_null.null_count < len(texts_or_null) else None


def _not_zero(numbers: Array | None) -> pa.Array | None:
    return None if numbers is None else _some(numbers, numbers != 0)


def _some(numbers: Array, which: Array) -> pa.Array | None:
    """The selected numbers as JSON; None if none is selected."""
    return pa.array(numbers, mask=~which).cast(pa.string()) if which.any() else None


def _parents(lists: pa.ListArray) -> Array:
    """Index of the list to which each element of flatten() belongs."""
    return np.repeat(np.arange(len(lists)), np.asarray(pc.list_value_length(lists).fill_null(0)))


def _hex(values: pa.Array) -> pa.Array:
    """Bytes as hexadecimal digits; NULL for none. Few senders set them, so the loop is rare."""
    if not pc.any(pc.not_equal(pc.binary_length(values), 0)).as_py():
        return pa.nulls(len(values), pa.string())
    return pa.array([value.hex() or None for value in values.to_pylist()], pa.string())


def _attributes(lists: pa.ListArray) -> Attributes:
    pairs = lists.flatten()
    typed = _typed(pairs.field("value"))
    return Attributes(_parents(lists), pairs.field("key"), *typed)


def _typed(value: pa.StructArray) -> _Typed:
    """Text, integer, number, boolean, and JSON of other values, from AnyValue structs (m,)."""
    text, integer, number, truth = (_child(value, name) for name in _VALUES)
    is_plain = np.zeros(len(value), bool)
    for part in (text, integer, number, truth):
        if part.null_count < len(part):
            is_plain |= np.asarray(part.is_valid())
    if is_plain.all():
        return text, integer, number, truth, pa.nulls(len(value), pa.string())
    if value.null_count == len(value):
        nothing = pa.repeat(pa.scalar("null"), len(value))
        return text, integer, number, truth, nothing
    words: list[str | None] = [None] * len(value)  # bytes, as base64 text
    other: list[str | None] = [None] * len(value)
    for at in np.flatnonzero(~is_plain).tolist():
        inner = _nested(value[at].as_py())
        (words if isinstance(inner, str) else other)[at] = inner if isinstance(inner, str) else dumped(inner)
    return (
        pc.coalesce(text, pa.array(words, pa.string())),
        integer,
        number,
        truth,
        pa.array(other, pa.string()),
    )


def _child(value: pa.StructArray, name: str) -> pa.Array:
    """A field of a struct, NULL if the struct is NULL."""
    return pc.struct_field(value, name) if value.null_count else value.field(name)


def _nested(value: dict[str, Any] | None) -> Any:
    """The Python value of an AnyValue from ptars: values inside lists are protobuf bytes."""
    import base64

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    if value is None:
        return None
    for name in _VALUES:
        if value.get(name) is not None:
            return value[name]
    if value.get("bytes_value") is not None:
        return base64.b64encode(value["bytes_value"]).decode()
    if value.get("array_value") is not None:
        return [any_value(AnyValue.FromString(inner), 1) for inner in value["array_value"]["values"]]
    if value.get("kvlist_value") is not None:
        return dict(_nested_pair(pair) for pair in value["kvlist_value"]["values"])
    return None


def _nested_pair(pair: dict[str, Any] | bytes) -> tuple[str, Any]:
    """A KeyValue inside a map: ptars returns its fields, or its bytes below a certain depth."""
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    if isinstance(pair, bytes):
        message = KeyValue.FromString(pair)
        return message.key, any_value(message.value, 1)
    value = pair["value"]
    return pair["key"], any_value(AnyValue.FromString(value), 1) if isinstance(value, bytes) else _nested(
        value
    )


def _groups(resources: pa.StructArray, scopes: pa.StructArray, resource_of_scope: Array) -> list[Group]:
    resource_list = resources.field("resource").to_pylist()
    resource_urls = resources.field("schema_url").to_pylist()
    attributes = [_plain_dict((resource_fields or {}).get("attributes")) for resource_fields in resource_list]
    scope_fields = scopes.field("scope").to_pylist()
    scope_urls = scopes.field("schema_url").to_pylist()
    return [
        Group(
            attributes[parent],
            _plain_dict((scope or {}).get("attributes")),
            (scope or {}).get("name") or "",
            (scope or {}).get("version") or "",
            url or resource_urls[parent] or "",
            parent,
        )
        for scope, url, parent in zip(scope_fields, scope_urls, resource_of_scope.tolist(), strict=True)
    ]


def _plain_dict(pairs: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {pair["key"]: _nested(pair["value"]) for pair in pairs or []}
