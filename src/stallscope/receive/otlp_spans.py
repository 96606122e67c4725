"""OTLP traces: each span becomes one flat record for `events`, with its duration.

Raises BadInput for an invalid ExportTraceServiceRequest.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from stallscope.errors import BadInput
from stallscope.receive.any_value import any_value, as_dict
from stallscope.receive.decoded import AttributesBuilder, FlatRecords, Group, dumped
from stallscope.receive.logs import group_of_scope
from stallscope.receive.timestamps import moments

_KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
_MAX_NS = 1 << 62


def decode(body: bytes, now_ns: int) -> FlatRecords:
    """The spans of a request."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        message = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise BadInput(f"the request is not a valid OTLP trace message: {error}") from error
    groups: list[Group] = []
    spans: list[Any] = []
    group_of: list[int] = []
    for resource_spans in message.resource_spans:
        resource = as_dict(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            group_of += [len(groups)] * len(scope_spans.spans)
            groups.append(group_of_scope(resource, resource_spans, scope_spans))
            spans += scope_spans.spans
    attributes = AttributesBuilder()
    for number, span in enumerate(spans):
        for pair in span.attributes:
            attributes.add(number, pair.key, any_value(pair.value))
    times = moments(np.array([s.start_time_unix_nano for s in spans], np.uint64), None, now_ns)
    more = [_more(span, ts_ns) for span, ts_ns in zip(spans, times.ts_ns.tolist(), strict=True)]
    keys = dict.fromkeys(key for fields in more for key in fields)
    return FlatRecords(
        len(spans),
        {
            "ts_ns": pa.array(times.ts_ns),
            "name": pa.array([span.name or None for span in spans], pa.string()),
            "duration_ns": pa.array([_duration_ns(span) for span in spans], pa.int64()),
        },
        {key: pa.array([fields.get(key) for fields in more], pa.string()) for key in keys},
        attributes.attributes(),
        np.array(group_of, np.int64),
        groups,
        {"untimed_records": times.n_replaced} if times.n_replaced else {},
    )


def _duration_ns(span: Any) -> int | None:
    length = span.end_time_unix_nano - span.start_time_unix_nano
    return length if span.start_time_unix_nano and 0 <= length < _MAX_NS else None


def _more(span: Any, ts_ns: int) -> dict[str, str]:
    """JSON of values without a column."""
    out: dict[str, Any] = {
        "otel.trace_id": span.trace_id.hex(),
        "otel.span_id": span.span_id.hex(),
        "otel.parent_span_id": span.parent_span_id.hex(),
        "otel.trace_state": span.trace_state,
        "otel.kind": _KINDS[span.kind] if 0 < span.kind < len(_KINDS) else "",
        "otel.flags": span.flags,
        "otel.status_code": span.status.code,
        "otel.status_message": span.status.message,
        "otel.dropped_attributes_count": span.dropped_attributes_count,
        "otel.events": [
            {"name": e.name, "ts_ns": e.time_unix_nano, "attributes": as_dict(e.attributes)}
            for e in span.events
        ],
        "otel.links": [
            {"trace_id": k.trace_id.hex(), "span_id": k.span_id.hex(), "attributes": as_dict(k.attributes)}
            for k in span.links
        ],
    }
    if span.start_time_unix_nano not in (0, ts_ns):
        out["otel.start_time_unix_nano"] = span.start_time_unix_nano
    if _duration_ns(span) is None and span.end_time_unix_nano:
        out["otel.end_time_unix_nano"] = span.end_time_unix_nano
    return {key: dumped(value) for key, value in out.items() if value}
