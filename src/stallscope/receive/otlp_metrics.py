"""OTLP metrics: each data point becomes one flat record for `node_metrics`.

Raises BadInput for an invalid ExportMetricsServiceRequest.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from stallscope.errors import BadInput
from stallscope.receive.any_value import any_value, as_dict
from stallscope.receive.cumulative_counters import Series, digest
from stallscope.receive.decoded import AttributesBuilder, FlatRecords, Group, dumped
from stallscope.receive.logs import group_of_scope
from stallscope.receive.timestamps import moments

_CUMULATIVE = 2
_NO_VALUE = 1  # DataPointFlags.NO_RECORDED_VALUE
_KINDS = ("gauge", "sum", "histogram", "exponential_histogram", "summary")


class _Point(NamedTuple):
    metric: Any
    kind: str
    point: Any
    group: int


def decode(body: bytes, now_ns: int, *, tenant: str, series: Series) -> FlatRecords:
    """The data points of a request. series: remembers the previous points."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    try:
        message = ExportMetricsServiceRequest.FromString(body)
    except DecodeError as error:
        raise BadInput(f"the request is not a valid OTLP metrics message: {error}") from error
    groups: list[Group] = []
    counts: Counter[str] = Counter()
    points = list(_points(message, groups, counts))
    attributes = AttributesBuilder()
    shared = [digest(dumped(group.as_json())) for group in groups]
    rows: list[dict[str, Any]] = []
    extra: list[dict[str, str]] = []
    times = moments(np.array([p.point.time_unix_nano for p in points], np.uint64), None, now_ns)
    counts["untimed_records"] += times.n_replaced
    for number, (point_entry, ts_ns) in enumerate(zip(points, times.ts_ns.tolist(), strict=True)):
        point_attributes = {pair.key: any_value(pair.value) for pair in point_entry.point.attributes}
        for key, value in point_attributes.items():
            attributes.add(number, key, value)
        row, more = _row(point_entry, ts_ns)
        if point_entry.point.time_unix_nano not in (0, ts_ns):
            more["otel.time_unix_nano"] = str(point_entry.point.time_unix_nano)
        value = row["value_double"]
        if value is not None and not math.isfinite(value):
            counts["not_finite_values"] += 1
            more["otel.value"] = dumped(value)
            row["value_double"] = None
        elif value is not None and row["is_cumulative"]:
            key = digest(
                shared[point_entry.group].hex(),
                point_entry.metric.name,
                point_entry.kind,
                dumped(sorted(point_attributes.items(), key=str)),
            )
            grown = series.growth(
                tenant,
                key,
                ts_ns=ts_ns,
                start_ns=point_entry.point.start_time_unix_nano,
                value=value,
                is_monotonic=bool(row["is_monotonic"]),
            )
            row["increase"], row["is_reset"] = grown
            counts["counter_resets"] += grown.is_reset
        rows.append(row)
        extra.append(more)
    return FlatRecords(
        len(points),
        {"ts_ns": pa.array(times.ts_ns), **_columns(rows)},
        _extra(extra),
        attributes.attributes(),
        np.array([p.group for p in points], np.int64),
        groups,
        {name: n for name, n in counts.items() if n},
    )


def _points(message: Any, groups: list[Group], counts: Counter[str]) -> Iterator[_Point]:
    """All data points. Also fills groups, and counts irregularities."""
    for resource_metrics in message.resource_metrics:
        resource = as_dict(resource_metrics.resource.attributes)
        for scope_metrics in resource_metrics.scope_metrics:
            groups.append(group_of_scope(resource, resource_metrics, scope_metrics))
            observed: set[str] = set()
            for metric in scope_metrics.metrics:
                counts["repeated_metric_names"] += metric.name in observed
                observed.add(metric.name)
                kind = metric.WhichOneof("data")
                if kind is None:
                    counts["empty_metrics"] += 1
                    continue
                for point in getattr(metric, kind).data_points:
                    yield _Point(metric, kind, point, len(groups) - 1)


def _row(data_point: _Point, ts_ns: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The point's columns, and the JSON of values without a column."""
    data, point = getattr(data_point.metric, data_point.kind), data_point.point
    start_ns = point.start_time_unix_nano
    row: dict[str, Any] = {
        "name": data_point.metric.name or None,
        "unit": data_point.metric.unit or None,
        "kind": data_point.kind,
        "is_cumulative": None if data_point.kind == "gauge" else _is_cumulative(data, data_point.kind),
        "is_monotonic": bool(data.is_monotonic) if data_point.kind == "sum" else None,
        "start_ns": start_ns if 0 < start_ns <= ts_ns else None,
        "value_double": None,
        "increase": None,
        "is_reset": None,
        "n": None,
    }
    more: dict[str, str] = {}
    if data_point.metric.description:
        more["otel.description"] = dumped(data_point.metric.description)
    if start_ns and row["start_ns"] is None:
        more["otel.start_time_unix_nano"] = str(start_ns)
    if point.flags:
        more["otel.flags"] = str(point.flags)
    if getattr(point, "exemplars", None):
        more["otel.exemplars"] = dumped([_exemplar(exemplar) for exemplar in point.exemplars])
    if point.flags & _NO_VALUE:
        return row, more
    if data_point.kind in ("gauge", "sum"):
        which = point.WhichOneof("value")
        if which:
            row["value_double"] = float(getattr(point, which))
            if which == "as_int" and int(row["value_double"]) != point.as_int:
                more["otel.value"] = str(point.as_int)  # beyond 2^53 a double is not exact
    else:
        row["n"] = min(point.count, (1 << 63) - 1)
        row["value_double"] = point.sum if data_point.kind == "summary" or point.HasField("sum") else None
        row["is_monotonic"] = True if data_point.kind != "summary" else None
        more |= _shape(data_point.kind, point)
    return row, more


def _is_cumulative(data: Any, kind: str) -> bool:
    return kind == "summary" or data.aggregation_temporality == _CUMULATIVE


def _shape(kind: str, point: Any) -> dict[str, str]:
    """JSON of a distribution: buckets, smallest and largest, quantiles."""
    if kind == "summary":
        return {"otel.quantiles": dumped([[q.quantile, q.value] for q in point.quantile_values])}
    out = {name: dumped(getattr(point, name)) for name in ("min", "max") if point.HasField(name)}
    if kind == "histogram":
        out |= {"bounds": dumped(list(point.explicit_bounds)), "counts": dumped(list(point.bucket_counts))}
    else:
        out |= {"scale": str(point.scale), "zero_count": str(point.zero_count)}
        out["zero_threshold"] = dumped(point.zero_threshold)
        for side in ("positive", "negative"):
            buckets = getattr(point, side)
            out[side] = dumped({"offset": buckets.offset, "counts": list(buckets.bucket_counts)})
    return {f"otel.{name}": text for name, text in out.items()}


def _exemplar(exemplar: Any) -> dict[str, Any]:
    which = exemplar.WhichOneof("value")
    return {
        "ts_ns": exemplar.time_unix_nano,
        "value": getattr(exemplar, which) if which else None,
        "trace_id": exemplar.trace_id.hex(),
        "span_id": exemplar.span_id.hex(),
        "attributes": as_dict(exemplar.filtered_attributes),
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, pa.Array]:
    kinds = {
        "name": pa.string(),
        "unit": pa.string(),
        "kind": pa.string(),
        "is_cumulative": pa.bool_(),
        "is_monotonic": pa.bool_(),
        "start_ns": pa.int64(),
        "value_double": pa.float64(),
        "increase": pa.float64(),
        "is_reset": pa.bool_(),
        "n": pa.int64(),
    }
    return {name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()}


def _extra(extra: list[dict[str, str]]) -> dict[str, pa.Array]:
    keys = dict.fromkeys(key for more in extra for key in more)
    return {key: pa.array([more.get(key) for more in extra], pa.string()) for key in keys}
