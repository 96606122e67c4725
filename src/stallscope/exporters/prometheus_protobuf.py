"""Metrics in Prometheus' protobuf format: each histogram with its classic buckets and as a native histogram.

A scraper that stores native histograms requests this format. Messages: io/prometheus/client/metrics.proto of
prometheus/client_model, each MetricFamily with its length before it.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from stallscope.exporters.metric_table import Kind, Metric
from stallscope.exporters.metric_values import NATIVE_SCHEMA, Histogram

CONTENT_TYPE = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
_TYPES = {Kind.COUNTER: 0, Kind.HISTOGRAM: 4}
_GAUGE = 1
_VARINT, _DOUBLE, _BYTES = 0, 1, 2
_MAX_GAP = 2
"""Fewer empty buckets than this are written as buckets: a new span costs more bytes."""

Labels = Mapping[str, str]


def accepts_protobuf(accept: str) -> bool:
    """Whether a scraper prefers this format, by its Accept header: the first format that it lists."""
    first = accept.split(",")[0].replace(" ", "").lower()
    return first.startswith("application/vnd.google.protobuf") and "encoding=delimited" in first


def family(metric: Metric, points: Iterable[tuple[Labels, float | Histogram]]) -> bytes:
    """A MetricFamily with its length."""
    body = _text(1, metric.prometheus_name) + _text(2, metric.meaning)
    body += _number(3, _TYPES.get(metric.kind, _GAUGE))
    for labels, value in points:
        pairs = b"".join(_message(1, _text(1, name) + _text(2, text)) for name, text in labels.items())
        body += _message(4, pairs + _value(metric, value))
    return _varint(len(body)) + body


def _value(metric: Metric, value: float | Histogram) -> bytes:
    if isinstance(value, Histogram):
        return _message(7, _histogram(metric.bounds, value))
    return _message(3 if metric.kind is Kind.COUNTER else 2, _double(1, value))


def _histogram(bounds: Sequence[float], histogram: Histogram) -> bytes:
    body = _number(1, histogram.n) + _double(2, histogram.total)
    for n, bound in zip(accumulate(histogram.counts), [*bounds, float("inf")], strict=True):
        body += _message(3, _number(1, n) + _double(2, bound))
    body += _number(5, _zigzag(NATIVE_SCHEMA)) + _double(6, 0.0) + _number(7, histogram.n_zero)
    return body + _native(histogram.native)


def _native(counts: Mapping[int, int]) -> bytes:
    """Spans of consecutive buckets, and the difference of each bucket to the bucket before."""
    spans: list[list[int]] = []
    deltas, before, end = [], 0, 0
    for i in sorted(counts):
        gap = i - end
        if not spans or gap > _MAX_GAP:
            spans.append([gap, 0])
            gap = 0
        for n in [*[0] * gap, counts[i]]:
            deltas.append(_zigzag(n - before))
            before = n
            spans[-1][1] += 1
        end = i + 1
    out = b"".join(_message(12, _number(1, _zigzag(offset)) + _number(2, n)) for offset, n in spans)
    return out + (_message(13, b"".join(map(_varint, deltas))) if deltas else b"")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _zigzag(number: int) -> int:
    """sint32 and sint64: small numbers of both signs have few bytes."""
    return number << 1 if number >= 0 else (-number << 1) - 1


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _number(field: int, number: int) -> bytes:
    return _key(field, _VARINT) + _varint(number)


def _double(field: int, number: float) -> bytes:
    return _key(field, _DOUBLE) + struct.pack("<d", number)


def _message(field: int, body: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
