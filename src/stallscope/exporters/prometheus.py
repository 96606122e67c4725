"""The metrics of a node for Prometheus: GET /metrics, in the format that the scraper requests.

The formats are text, OpenMetrics and protobuf, which alone has native histograms.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from stallscope.errors import BadInput, remedy_for_extra
from stallscope.exporters.metric_table import Kind, Metric
from stallscope.exporters.metric_values import OVERFLOW, Meter, Series
from stallscope.exporters.prometheus_protobuf import CONTENT_TYPE, accepts_protobuf, family

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.core import Metric as Family


@contextmanager
def metrics_server(meter: Meter, address: str, *, node: str) -> Iterator[int]:
    """Serves the metrics inside the with block; yields the port.

    address: HOST:PORT, [V6]:PORT, :PORT (all interfaces) or PORT (this machine only); port 0 takes a free one.
    node: value of the label that each series has. Raises BadInput, for example if the port is in use.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise BadInput(
            f"--prometheus needs the package prometheus-client: {remedy_for_extra('export')}"
        ) from None
    host, port = host_and_port(address)
    registry = CollectorRegistry()
    registry.register(_Collector(meter, node))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadInput(f"--prometheus {address}: {error.strerror}; choose another address") from error
    server.set_app(_with_protobuf(server.get_app(), meter, node))
    try:
        yield _port(server)
    finally:
        _end(server, thread)


def host_and_port(address: str) -> tuple[str, int]:
    """Both parts of an address. Raises BadInput."""
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = "127.0.0.1", address
    if not port.isdecimal() or int(port) > 65535:
        raise BadInput(f"{address!r} is not a listen address: give HOST:PORT, for example 0.0.0.0:9464")
    return host.strip("[]") or "0.0.0.0", int(port)


def _port(server: WSGIServer) -> int:
    return int(server.server_port)


def _end(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


def _with_protobuf(app: "WSGIApplication | None", meter: Meter, node: str) -> "WSGIApplication":
    """The client library's application, and the protobuf format, which the library does not write."""
    assert app is not None

    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        is_metrics = environ.get("PATH_INFO") == "/metrics" and environ.get("REQUEST_METHOD") == "GET"
        if not (is_metrics and accepts_protobuf(environ.get("HTTP_ACCEPT", ""))):
            return app(environ, start)
        start("200 OK", [("Content-Type", CONTENT_TYPE)])
        return [
            family(
                metric,
                [(_labels(metric, entry, node), entry.histogram or entry.number) for entry in series],
            )
            for metric, series in meter.read()
        ]

    return answer


def _label_names(metric: Metric) -> list[str]:
    return [*map(label_name, metric.attributes), "node"]


def _labels(metric: Metric, entry: Series, node: str) -> dict[str, str]:
    return dict(zip(_label_names(metric), _label_values(metric, entry, node), strict=True))


def _label_values(metric: Metric, entry: Series, node: str) -> list[str]:
    """The values of a series' labels; the excess series has its mark as the last attribute."""
    if entry.values is not None:
        return [*entry.values, node]
    return [*[""] * (len(metric.attributes) - 1), OVERFLOW, node][-len(metric.attributes) - 1 :]


class _Collector:
    """Called by the client library at each scrape."""

    def __init__(self, meter: Meter, node: str):
        self._meter, self._node = meter, node

    def collect(self) -> "Iterator[Family]":
        for metric, series in self._meter.read():
            yield _family(metric, series, self._node)


def label_name(attribute: str) -> str:
    """An attribute's name as a label."""
    return attribute.replace(".", "_")


def _family(metric: Metric, series: list[Series], node: str) -> "Family":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels = _label_names(metric)
    name = metric.prometheus_name.removesuffix("_total")
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.meaning, labels=labels)
        for entry in series:
            if entry.histogram:
                values = _label_values(metric, entry, node)
                histogram.add_metric(values, _buckets(metric, entry.histogram.counts), entry.histogram.total)
        return histogram
    out: CounterMetricFamily | GaugeMetricFamily = (
        CounterMetricFamily(name, metric.meaning, labels=labels)
        if metric.kind is Kind.COUNTER
        else GaugeMetricFamily(name, metric.meaning, labels=labels)
    )
    for entry in series:
        out.add_metric(_label_values(metric, entry, node), entry.number)
    return out


def _buckets(metric: Metric, counts: list[int]) -> list[tuple[str, float]]:
    """Running sums by upper bound, in Prometheus' order."""
    edges = [*(repr(bound) for bound in metric.bounds), "+Inf"]
    total, out = 0, []
    for edge, n in zip(edges, counts, strict=True):
        total += n
        out.append((edge, float(total)))
    return out
