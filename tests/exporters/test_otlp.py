"""Data at an OTLP receiver, over HTTP and gRPC: values, types, units, times; and refusals."""

import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import numpy as np
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from stallscope.errors import BadInput
from stallscope.exporters import metric_table as table_of
from stallscope.exporters.metric_values import Meter
from stallscope.exporters.otlp_messages import Incident, resource, spans_request
from stallscope.exporters.otlp_sender import OtlpSender
from stallscope.exporters.otlp_wire import headers_from, wire

from ..patience import until

pytestmark = pytest.mark.live

START_NS, BOOT_NS = 1_800_000_000 * 10**9, 1_700_000_000 * 10**9
INCIDENT = Incident(
    "abc", "stallscope.verdict straggler", START_NS, START_NS + 10**9, "rank 2", {"stallscope.ranks": [2]}
)


OWNED = INCIDENT._replace(
    incident_id="abd", owner={"k8s.pod.name": "train-0", "stallscope.owner.account": "ml"}
)


@pytest.mark.pure
def test_an_owner_is_a_resource_of_its_own():
    request = spans_request([INCIDENT, OWNED, OWNED._replace(incident_id="abe")], resource("node-7"))
    names = [
        {a.key: a.value.string_value for a in part.resource.attributes} for part in request.resource_spans
    ]
    assert [len(part.scope_spans[0].spans) for part in request.resource_spans] == [1, 2]
    assert names[1] == names[0] | OWNED.owner
    assert names[0]["host.name"] == "node-7"


@dataclass
class Receiver:
    """The received requests and the next answers: first the refusals, then acceptance."""

    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)
    spans: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    busy: tuple[int, int] = (0, 0)
    n_asked: int = 0

    def take(self, signal: str, body: bytes) -> None:
        if signal == "metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        else:
            self.spans.append(ExportTraceServiceRequest.FromString(body))


@contextmanager
def over_http(receiver: Receiver) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.n_asked += 1
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
            status = receiver.refusals.pop(0) if receiver.refusals else 200
            self.send_response(status)
            if status != 200:
                self.send_header("Retry-After", "0")
            self.send_header("content-length", "0")
            self.end_headers()
            if status == 200:
                receiver.take(self.path.rpartition("/")[2], gzip.decompress(body))

        def log_message(self, *words: object) -> None:
            pass

    receiver.busy = (503, 429)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def over_grpc(receiver: Receiver) -> Iterator[str]:
    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            signal = "metrics" if "Metrics" in details.method else "traces"
            receiver.headers.append(dict(details.invocation_metadata))

            def take(body: bytes, context: grpc.ServicerContext) -> bytes:
                receiver.n_asked += 1
                if receiver.refusals:
                    info = Any()
                    info.Pack(RetryInfo(retry_delay=Duration(nanos=10**7)))
                    status = Status(code=receiver.refusals.pop(0), details=[info])
                    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
                    code = next(c for c in grpc.StatusCode if c.value[0] == status.code)
                    context.abort(code, "refused")
                receiver.take(signal, body)
                return b""

            return grpc.unary_unary_rpc_method_handler(take)

    receiver.busy = (14, 8)  # UNAVAILABLE, RESOURCE_EXHAUSTED
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.fixture(params=[over_http, over_grpc], ids=["http", "grpc"])
def sent(
    request: pytest.FixtureRequest, meter: Meter
) -> Iterator[tuple[Receiver, Callable[..., OtlpSender]]]:
    receiver, started = Receiver(), []
    with request.param(receiver) as url:

        def start(**options: object) -> OtlpSender:
            channel = wire(url, {"OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20t,x=1"})
            started.append(OtlpSender(meter, channel, node="host-a", **{"every_s": 0.05, **options}))
            return started[-1]

        yield receiver, start
        for otlp_sender in started:
            otlp_sender.close()


@pytest.fixture
def meter() -> Meter:
    made = Meter(START_NS, BOOT_NS)
    made.add(table_of.COLLECTIVE_CALLS, 7, "2", "all_reduce")
    made.set(table_of.CPU_TIME, 1.5, "user")
    made.set(table_of.MEMORY_USAGE, 4096, "used")
    made.set(table_of.TEMPERATURE, 61.0, "GPU-1", "H100", "NVIDIA", "gpu")
    made.observe(table_of.COLLECTIVE_WAIT, np.array([0.002, 0.002, 0.5, 99.0]), "2")
    return made


def attributes(point: object) -> dict[str, object]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in point.attributes
    }


def test_metrics_arrive_with_value_type_unit_and_times(sent):
    receiver, start = sent
    start(wall_ns=lambda: START_NS + 5)
    until(lambda: receiver.metrics)
    (of_resource,) = receiver.metrics[0].resource_metrics
    assert attributes(of_resource.resource)["host.name"] == "host-a"
    assert attributes(of_resource.resource)["service.name"] == "stallscope"
    result = {metric.name: metric for metric in of_resource.scope_metrics[0].metrics}

    calls = result["nccl.collective.calls"]
    assert (calls.unit, calls.WhichOneof("data"), calls.sum.is_monotonic) == ("{call}", "sum", True)
    assert calls.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = calls.sum.data_points
    assert (point.as_int, point.start_time_unix_nano, point.time_unix_nano) == (7, START_NS, START_NS + 5)
    assert attributes(point) == {"nccl.rank": "2", "nccl.operation": "all_reduce"}

    cpu = result["system.cpu.time"]
    assert (cpu.unit, cpu.sum.is_monotonic, cpu.sum.data_points[0].as_double) == ("s", True, 1.5)
    assert cpu.sum.data_points[0].start_time_unix_nano == BOOT_NS

    memory = result["system.memory.usage"]
    assert (memory.unit, memory.sum.is_monotonic, memory.sum.data_points[0].as_int) == ("By", False, 4096)

    heat = result["hw.temperature"]
    assert (heat.unit, heat.WhichOneof("data"), heat.gauge.data_points[0].as_double) == ("Cel", "gauge", 61)

    wait = result["nccl.collective.wait.duration"]
    (point,) = wait.histogram.data_points
    assert (wait.unit, point.count, point.sum) == ("s", 4, pytest.approx(99.504))
    assert wait.histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert tuple(point.explicit_bounds) == table_of.COLLECTIVE_WAIT.bounds
    bucket = dict(zip([*point.explicit_bounds, None], point.bucket_counts, strict=True))
    assert {edge: n for edge, n in bucket.items() if n} == {3e-3: 2, 1.0: 1, None: 1}


def test_headers_of_the_environment_and_compression_are_used(sent):
    receiver, start = sent
    start()
    until(lambda: receiver.metrics)
    assert receiver.headers[0]["authorization"] == "Bearer t"
    assert (
        receiver.headers[0].get("content-encoding", receiver.headers[0].get("grpc-encoding", "gzip"))
        == "gzip"
    )


def test_an_incident_is_sent_once_as_a_span_with_deterministic_ids(sent):
    receiver, start = sent
    first, second = start(), start()
    for otlp_sender in (first, second):
        otlp_sender.incident(**INCIDENT._asdict())
    until(lambda: len(receiver.spans) >= 2)
    n_metrics = len(receiver.metrics)
    until(lambda: len(receiver.metrics) > n_metrics + 4)
    assert len(receiver.spans) == 2, "a span that was taken is not sent again"
    entry, other = (request.resource_spans[0].scope_spans[0].spans[0] for request in receiver.spans)
    assert (entry.trace_id, entry.span_id) == (other.trace_id, other.span_id)
    assert (len(entry.trace_id), len(entry.span_id)) == (16, 8)
    assert (entry.name, entry.status.message) == (INCIDENT.name, "rank 2")
    assert (entry.start_time_unix_nano, entry.end_time_unix_nano) == (INCIDENT.begin_ns, INCIDENT.end_ns)
    assert [v.int_value for v in entry.attributes[0].value.array_value.values] == [2]


def test_a_busy_receiver_is_retried_until_it_accepts_the_span(sent):
    receiver, start = sent
    receiver.refusals = list(receiver.busy)
    message: list[str] = []
    start(note=message.append).incident(**INCIDENT._asdict())
    until(lambda: receiver.spans)
    assert receiver.n_asked >= 4
    until(lambda: len(message) > 1)
    assert len(message) == 2, "told when it goes and when it is back, not each time"


def test_an_unreachable_receiver_is_reported_once(meter: Meter):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    message: list[str] = []
    otlp_sender = OtlpSender(
        meter, wire(f"http://127.0.0.1:{port}", {}), node="a", every_s=0.01, note=message.append
    )
    until(lambda: message)
    otlp_sender.close()
    assert len(message) == 1
    assert "refused" in message[0]


@pytest.mark.pure
@pytest.mark.parametrize("url", ["host:port", "ftp://host", "http://", "4317", "http://[::1", "host:99999"])
def test_a_url_that_is_none_is_refused(url: str):
    with pytest.raises(BadInput, match=r"HOST:4318 \(HTTP\)"):
        wire(url, {})


@pytest.mark.pure
def test_headers_are_decoded():
    assert headers_from("a=b%2Cc, D = e ,nothing") == {"a": "b,c", "d": "e"}
    assert headers_from("") == {}
