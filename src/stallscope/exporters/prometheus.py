"""The metrics of a node for Prometheus: GET /metrics, in the text or OpenMetrics format that the scraper requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from stallscope.errors import BadInput
from stallscope.exporters.metric_table import Kind, Metric
from stallscope.exporters.metric_values import OVERFLOW, Meter, Series

if TYPE_CHECKING:
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
            "--prometheus needs the package prometheus-client: pip install 'stallscope[export]'"
        ) from None
    host, port = host_and_port(address)
    registry = CollectorRegistry()
    registry.register(_Collector(meter, node))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadInput(f"--prometheus {address}: {error.strerror}; choose another address") from error
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

    labels = [*map(label_name, metric.attributes), "node"]
    beyond = [*[""] * (len(metric.attributes) - 1), OVERFLOW, node][-len(labels) :]
    name = metric.prometheus_name.removesuffix("_total")
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.meaning, labels=labels)
        for entry in series:
            if entry.histogram:
                values = beyond if entry.values is None else [*entry.values, node]
                histogram.add_metric(values, _buckets(metric, entry.histogram.counts), entry.histogram.total)
        return histogram
    family: CounterMetricFamily | GaugeMetricFamily = (
        CounterMetricFamily(name, metric.meaning, labels=labels)
        if metric.kind is Kind.COUNTER
        else GaugeMetricFamily(name, metric.meaning, labels=labels)
    )
    for entry in series:
        family.add_metric(beyond if entry.values is None else [*entry.values, node], entry.number)
    return family


def _buckets(metric: Metric, counts: list[int]) -> list[tuple[str, float]]:
    """Running sums by upper bound, in Prometheus' order."""
    edges = [*(repr(bound) for bound in metric.bounds), "+Inf"]
    total, out = 0, []
    for edge, n in zip(edges, counts, strict=True):
        total += n
        out.append((edge, float(total)))
    return out
