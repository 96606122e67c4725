"""OTLP requests for tests, from plain Python values."""

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

NOW_NS = 1_795_000_000 * 10**9
"""A moment in 2026 at which the tests' hub lives."""


def value(plain: Any) -> AnyValue:
    """The AnyValue of a Python value; None is a value that is not set."""
    if isinstance(plain, bool):
        return AnyValue(bool_value=plain)
    if isinstance(plain, int):
        return AnyValue(int_value=plain)
    if isinstance(plain, float):
        return AnyValue(double_value=plain)
    if isinstance(plain, str):
        return AnyValue(string_value=plain)
    if isinstance(plain, bytes):
        return AnyValue(bytes_value=plain)
    out = AnyValue()
    if isinstance(plain, list):
        out.array_value.SetInParent()
        out.array_value.values.extend(value(inner) for inner in plain)
    elif isinstance(plain, dict):
        out.kvlist_value.SetInParent()
        out.kvlist_value.values.extend(pairs(plain))
    return out


def pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes as OTLP has them."""
    return [KeyValue(key=key, value=value(plain)) for key, plain in attributes.items()]


def logs(
    records: Iterable[Mapping[str, Any]],
    *,
    resource: Mapping[str, Any] | None = None,
    scope: Mapping[str, Any] | None = None,
) -> ExportLogsServiceRequest:
    """Log records of one scope; keys of a record: attributes, body, and the fields of LogRecord."""
    message = ExportLogsServiceRequest()
    add_logs(message, records, resource=resource, scope=scope)
    return message


def add_logs(
    message: ExportLogsServiceRequest,
    records: Iterable[Mapping[str, Any]],
    *,
    resource: Mapping[str, Any] | None = None,
    scope: Mapping[str, Any] | None = None,
) -> None:
    """More records, of one more resource."""
    part = message.resource_logs.add()
    part.resource.attributes.extend(pairs(resource or {}))
    inner = part.scope_logs.add()
    inner.scope.attributes.extend(pairs(scope or {}))
    for record in records:
        fields = {k: v for k, v in record.items() if k not in ("attributes", "body")}
        made = inner.log_records.add(**{"time_unix_nano": NOW_NS, **fields})
        made.attributes.extend(pairs(record.get("attributes", {})))
        if "body" in record:
            made.body.CopyFrom(value(record["body"]))


def numbers(
    points: Iterable[Mapping[str, Any]],
    *,
    name: str = "gpu.power",
    kind: str = "gauge",
    resource: Mapping[str, Any] | None = None,
    **data: Any,
) -> ExportMetricsServiceRequest:
    """Points of one metric; keys of a point: attributes, and the fields of NumberDataPoint."""
    message = ExportMetricsServiceRequest()
    add_numbers(message, points, name=name, kind=kind, resource=resource, **data)
    return message


def add_numbers(
    message: ExportMetricsServiceRequest,
    points: Iterable[Mapping[str, Any]],
    *,
    name: str,
    kind: str = "gauge",
    resource: Mapping[str, Any] | None = None,
    **data: Any,
) -> None:
    """Points of one more metric, in the same scope as those before."""
    if not message.resource_metrics:
        part = message.resource_metrics.add()
        part.resource.attributes.extend(pairs(resource or {}))
        part.scope_metrics.add()
    metric = message.resource_metrics[0].scope_metrics[0].metrics.add(name=name, unit="1")
    inner = getattr(metric, kind)
    for field, given in data.items():
        setattr(inner, field, given)
    for point in points:
        fields = {k: v for k, v in point.items() if k != "attributes"}
        made = inner.data_points.add(**{"time_unix_nano": NOW_NS, **fields})
        made.attributes.extend(pairs(point.get("attributes", {})))


def spans(
    made: Iterable[Mapping[str, Any]], *, resource: Mapping[str, Any] | None = None
) -> ExportTraceServiceRequest:
    """Spans of one scope; keys of a span: attributes, and the fields of Span."""
    message = ExportTraceServiceRequest()
    part = message.resource_spans.add()
    part.resource.attributes.extend(pairs(resource or {}))
    inner = part.scope_spans.add()
    for span in made:
        fields = {k: v for k, v in span.items() if k != "attributes"}
        inner.spans.add(**fields).attributes.extend(pairs(span.get("attributes", {})))
    return message
