"""The metrics of a node, and incidents as spans, as OTLP messages (opentelemetry-proto 1.x)."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from stallscope import __version__
from stallscope.exporters.metric_table import Kind, Metric
from stallscope.exporters.metric_values import OVERFLOW, Meter, Series

_CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE

Value = str | int | float | bool | Sequence[str] | Sequence[int]


class Incident(NamedTuple):
    """A closed incident, for a span. Times are wall-clock ns; attributes by name. owner: attributes of its resource.

    is_request: it is a late request to a server.
    """

    incident_id: str
    name: str
    begin_ns: int
    end_ns: int
    summary: str
    attributes: Mapping[str, Value]
    owner: Mapping[str, str] = MappingProxyType({})
    is_request: bool = False


def resource(node: str, cluster: str = "") -> Resource:
    """The sender: the agent of one node."""
    output: dict[str, Value] = {
        "service.name": "stallscope",
        "service.version": __version__,
        "service.instance.id": node,
        "host.name": node,
    }
    if cluster:
        output["k8s.cluster.name"] = cluster
    return Resource(attributes=_attributes(output))


def metrics_request(meter: Meter, resource_message: Resource, *, now_ns: int) -> ExportMetricsServiceRequest:
    """All current metrics. Sums and histograms are cumulative from their start, so that repetition does no harm."""
    request = ExportMetricsServiceRequest()
    of_resource = request.resource_metrics.add(resource=resource_message)
    scope = of_resource.scope_metrics.add(scope=_scope())
    for metric, series in meter.read():
        scope.metrics.append(_metric(metric, series, meter.since_wall_ns(metric), now_ns=now_ns))
    return request


def spans_request(incidents: Iterable[Incident], resource_message: Resource) -> ExportTraceServiceRequest:
    """Incidents as spans, under a resource for each owner.

    The ids are derived from the id of the incident, so that a repeated span replaces the first.
    """
    request = ExportTraceServiceRequest()
    scopes: dict[frozenset[tuple[str, str]], ScopeSpans] = {}
    for incident in incidents:
        owner = frozenset(incident.owner.items())
        if owner not in scopes:
            of_owner = request.resource_spans.add(resource=resource_message)
            of_owner.resource.attributes.extend(_attributes(incident.owner))
            scopes[owner] = of_owner.scope_spans.add(scope=_scope())
        scopes[owner].spans.append(
            Span(
                trace_id=_digest("trace", incident.incident_id, 16),
                span_id=_digest("span", incident.incident_id, 8),
                name=incident.name,
                kind=Span.SPAN_KIND_SERVER if incident.is_request else Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=incident.begin_ns,
                end_time_unix_nano=max(incident.end_ns, incident.begin_ns),
                attributes=_attributes(incident.attributes),
                status=Status(code=Status.STATUS_CODE_ERROR, message=incident.summary),
            )
        )
    return request


def _digest(what: str, incident_id: str, n_bytes: int) -> bytes:
    return hashlib.sha256(f"stallscope {what} {incident_id}".encode()).digest()[:n_bytes]


def _scope() -> InstrumentationScope:
    return InstrumentationScope(name="stallscope", version=__version__)


def _metric(metric: Metric, series: list[Series], since_ns: int, *, now_ns: int) -> metrics_pb2.Metric:
    out = metrics_pb2.Metric(name=metric.name, description=metric.meaning, unit=metric.unit)
    if metric.kind is Kind.HISTOGRAM:
        out.histogram.aggregation_temporality = _CUMULATIVE
        out.histogram.data_points.extend(
            _histogram_point(metric, entry, since_ns, now_ns=now_ns) for entry in series
        )
    elif metric.kind is Kind.GAUGE:
        out.gauge.data_points.extend(_number_point(metric, entry, 0, now_ns=now_ns) for entry in series)
    else:
        out.sum.aggregation_temporality = _CUMULATIVE
        out.sum.is_monotonic = metric.kind is Kind.COUNTER
        out.sum.data_points.extend(_number_point(metric, entry, since_ns, now_ns=now_ns) for entry in series)
    return out


def _number_point(
    metric: Metric, entry: Series, since_ns: int, *, now_ns: int
) -> metrics_pb2.NumberDataPoint:
    """Counts and bytes are integers; other units are doubles."""
    point = metrics_pb2.NumberDataPoint(
        attributes=_labels(metric, entry), start_time_unix_nano=since_ns, time_unix_nano=now_ns
    )
    if metric.unit.startswith("{") or metric.unit == "By":
        point.as_int = round(entry.number)
    else:
        point.as_double = entry.number
    return point


def _histogram_point(
    metric: Metric, entry: Series, since_ns: int, *, now_ns: int
) -> metrics_pb2.HistogramDataPoint:
    counts, total = (entry.histogram.counts, entry.histogram.total) if entry.histogram else ([], 0.0)
    return metrics_pb2.HistogramDataPoint(
        attributes=_labels(metric, entry),
        start_time_unix_nano=since_ns,
        time_unix_nano=now_ns,
        count=sum(counts),
        sum=total,
        bucket_counts=counts,
        explicit_bounds=metric.bounds,
    )


def _labels(metric: Metric, entry: Series) -> list[KeyValue]:
    if entry.values is None:
        return _attributes({OVERFLOW: True})
    return _attributes(dict(zip(metric.attributes, entry.values, strict=True)))


def _attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any(value)) for key, value in values.items()]


def _any(value: Value) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(array_value=ArrayValue(values=[_any(entry) for entry in value]))
