"""The two OTLP ports: other exporters deliver their data, and every refusal has a standard form."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from stallscope.receive import grpc_port
from stallscope.receive.receiver import Receiver, RequestLimits
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

from ..store.hub.rows import without_commits
from .requests import NOW_NS, logs
from .senders import ARROW, AS_A, LOGS, METRICS, TRACES, Hub, authenticate, running

pytestmark = pytest.mark.live

PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running(tmp_path_factory.mktemp("hub"), bounds=RequestLimits(max_bytes=1 << 20)) as made:
        yield made


def post(hub: Hub, path: str, body: bytes, **headers: str) -> httpx.Response:
    sent = {**AS_A, **PROTOBUF, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return httpx.post(f"{hub.http_url}{path}", content=body, headers=sent, timeout=20)


def one_log(name: str, *, n: int = 1) -> bytes:
    return logs(
        [{"event_name": name, "time_unix_nano": time.time_ns() + i} for i in range(n)]
    ).SerializeToString()


def n_events(hub: Hub, name: str, tenant: str = "a") -> int:
    ((n,),) = hub.sql(f"SELECT count(*) FROM events WHERE name = '{name}'", tenant)
    return int(str(n))


def test_an_acknowledged_request_is_there_on_both_ports(hub: Hub):
    hub.call(LOGS, one_log("by grpc", n=3))
    assert post(hub, "/v1/logs", one_log("by http", n=4)).status_code == 200
    assert (n_events(hub, "by grpc"), n_events(hub, "by http")) == (3, 4)


def test_a_retry_is_stored_once_and_equal_records_of_different_batches_are_all_kept(hub: Hub):
    named = logs([{"event_name": "again"}], resource={"stallscope.batch.id": "b1"}).SerializeToString()
    answers = [hub.call(LOGS, named), hub.call(LOGS, named)]
    assert answers[0] == answers[1] and n_events(hub, "again") == 1
    body = one_log("equal")
    hub.call(LOGS, body)
    hub.call(LOGS, body)
    assert n_events(hub, "equal") == 2


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
def test_bodies_may_be_compressed(hub: Hub, encoding: str):
    import zlib

    packer = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding]
    answer = post(hub, "/v1/logs", packer(one_log(encoding)), content_encoding=encoding)
    assert (answer.status_code, n_events(hub, encoding)) == (200, 1)


def test_json_logs_are_stored_like_protobuf_logs(hub: Hub):
    body = {
        "resourceLogs": [
            {
                "resource": {"attributes": [{"key": "host.name", "value": {"stringValue": "n9"}}]},
                "scopeLogs": [
                    {
                        "logRecords": [
                            {
                                "timeUnixNano": str(NOW_NS),
                                "eventName": "as json",
                                "traceId": "000102030405060708090a0b0c0d0e0f",
                                "severityNumber": 9,
                                "body": {"stringValue": "hello"},
                                "attributes": [{"key": "rank", "value": {"intValue": "3"}}],
                                "somethingNew": 1,
                            }
                        ]
                    }
                ],
            }
        ]
    }
    answer = post(hub, "/v1/logs", json.dumps(body).encode(), **{"content_type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (
        200,
        "application/json",
        {},
    )
    ((node, rank, text, attrs),) = hub.sql(
        "SELECT node_id, rank, value_text, attrs FROM events WHERE name = 'as json'"
    )
    assert (node, rank, text) == ("n9", 3, "hello")
    assert json.loads(str(attrs))["otel.trace_id"] == "000102030405060708090a0b0c0d0e0f"


def test_tenants_come_from_the_token_and_never_meet(hub: Hub):
    message = logs([{"event_name": "mine", "attributes": {"tenant": "b"}}]).SerializeToString()
    hub.call(LOGS, message, {"authorization": "Bearer for-b"})
    assert (n_events(hub, "mine", "a"), n_events(hub, "mine", "b")) == (0, 1)


def test_a_record_too_large_is_a_partial_success(hub: Hub, tmp_path: Path):
    with running(tmp_path / "other") as roomy:
        message = logs([{"event_name": "ok"}, {"attributes": {"x": "y" * (2 << 20)}}])
        answer = ExportLogsServiceResponse.FromString(roomy.call(LOGS, message.SerializeToString()))
        assert answer.partial_success.rejected_log_records == 1
        assert "bytes" in answer.partial_success.error_message
        assert n_events(roomy, "ok") == 1


def refused(hub: Hub, method: str, body: bytes, headers: dict[str, str] | None = None) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        hub.call(method, body, AS_A if headers is None else headers)
    return error.value


GARBAGE = [b"\xff" * 30, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256))]


@pytest.mark.parametrize("method", [LOGS, METRICS, TRACES, ARROW])
@pytest.mark.parametrize("body", GARBAGE, ids=["ones", "http", "all bytes"])
def test_garbage_is_refused_for_good(hub: Hub, method: str, body: bytes):
    error = refused(hub, method, body)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "Traceback" not in error.details()
    assert rpc_status.from_call(error).code == 3


@pytest.mark.parametrize("path", ["/v1/logs", "/v1/metrics", "/v1/traces"])
@pytest.mark.parametrize("kind", [PROTOBUF, JSON], ids=["protobuf", "json"])
def test_garbage_over_http_is_a_400_with_a_status_body(hub: Hub, path: str, kind: dict[str, str]):
    answer = post(hub, path, b"\xff" * 30, content_type=kind["content-type"])
    assert answer.status_code == 400
    output = answer.json() if kind is JSON else Status.FromString(answer.content)
    assert "OTLP" in (output["message"] if kind is JSON else output.message)


@pytest.mark.parametrize(
    ("headers", "code", "http"),
    [
        ({}, grpc.StatusCode.UNAUTHENTICATED, 401),
        ({"authorization": "Bearer nobody"}, grpc.StatusCode.UNAUTHENTICATED, 401),
        ({"authorization": "Bearer reader"}, grpc.StatusCode.PERMISSION_DENIED, 403),
    ],
    ids=["none", "unknown", "may not send"],
)
def test_a_sender_without_permission_is_refused(
    hub: Hub, headers: dict[str, str], code: grpc.StatusCode, http: int
):
    assert refused(hub, LOGS, one_log("no"), headers).code() is code
    answer = httpx.post(f"{hub.http_url}/v1/logs", content=one_log("no"), headers={**PROTOBUF, **headers})
    assert answer.status_code == http and n_events(hub, "no") == 0


@pytest.mark.parametrize(
    ("method", "path", "kind", "wanted"),
    [
        ("GET", "/v1/logs", "application/x-protobuf", 415),
        ("POST", "/v1/nothing", "application/x-protobuf", 404),
        ("POST", "/v1/logs", "text/plain", 415),
    ],
)
def test_unknown_paths_methods_and_content_types_are_refused(
    hub: Hub, method: str, path: str, kind: str, wanted: int
):
    answer = httpx.request(method, f"{hub.http_url}{path}", headers={**AS_A, "content-type": kind})
    assert answer.status_code == wanted


def test_a_bomb_is_refused_before_it_goes_off(hub: Hub):
    bomb = gzip.compress(bytes(200 << 20))
    answer = post(hub, "/v1/logs", bomb, content_encoding="gzip")
    assert answer.status_code == 413
    with grpc.insecure_channel(hub.grpc_url, compression=grpc.Compression.Gzip) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(LOGS)(bytes(20 << 20), metadata=list(AS_A.items()), timeout=20)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    hub.call(LOGS, one_log("after the bomb"))
    assert n_events(hub, "after the bomb") == 1


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
def test_a_body_with_a_wrong_content_encoding_is_refused(hub: Hub, encoding: str):
    assert post(hub, "/v1/logs", one_log("no"), content_encoding=encoding).status_code == 400


def test_json_nested_without_end_is_refused(hub: Hub):
    deep = b'{"resourceLogs":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    assert post(hub, "/v1/logs", deep, content_type="application/json").status_code == 400


def test_a_full_hub_returns_a_retry_time_and_keeps_accepted_rows(tmp_path: Path):
    with running(tmp_path, limits=Limits(max_queue_rows=10, retry_after_s=1.5)) as hub:
        with without_commits(hub.store):
            waiting = [hub.receiver.otlp("logs", one_log(f"w{i}", n=8), "a") for i in range(1)]
            error = refused(hub, LOGS, one_log("too many", n=8))
            answer = post(hub, "/v1/logs", one_log("too many", n=8))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        info = RetryInfo()
        assert rpc_status.from_call(error).details[0].Unpack(info)
        assert info.retry_delay.ToMilliseconds() == 1500
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert [entry.future.result(20).n_rows for entry in waiting] == [8]
        assert n_events(hub, "too many") == 0 and n_events(hub, "w0") == 8
        assert hub.receiver.numbers()["batches_refused"] == 2


def exporters(hub: Hub, way: str) -> dict[str, object]:
    """The OpenTelemetry SDK's three exporters to this hub."""
    if way == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        given = {"endpoint": hub.grpc_url, "insecure": True, "headers": AS_A}
        return {
            "logs": OTLPLogExporter(**given),
            "metrics": OTLPMetricExporter(**given),
            "traces": OTLPSpanExporter(**given),
        }
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogs
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans

    more = {"headers": AS_A, "compression": Compression.Gzip}
    return {
        "logs": HttpLogs(endpoint=f"{hub.http_url}/v1/logs", **more),
        "metrics": HttpMetrics(endpoint=f"{hub.http_url}/v1/metrics", **more),
        "traces": HttpSpans(endpoint=f"{hub.http_url}/v1/traces", **more),
    }


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_data_from_the_opentelemetry_sdk_is_stored(hub: Hub, way: str):
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    to = exporters(hub, way)
    node = f"node-{way}"
    resource = Resource.create({"host.name": node, "k8s.cluster.name": "c1", "service.name": "job"})

    log_provider = LoggerProvider(resource=resource)
    log_provider.add_log_record_processor(BatchLogRecordProcessor(to["logs"]))
    for step in range(7):
        log_provider.get_logger("job").emit(
            LogRecord(
                timestamp=time.time_ns(),
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                body=f"step {step} is slow",
                attributes={"rank": 3, "step": step, "loss": 0.5, "tags": ["a", "b"]},
            )
        )
    log_provider.shutdown()

    tracer_provider = TracerProvider(resource=resource)
    tracer_provider.add_span_processor(BatchSpanProcessor(to["traces"]))
    with tracer_provider.get_tracer("job").start_as_current_span("backward", attributes={"rank": 3}) as span:
        span.add_event("half", {"x": 1})
    tracer_provider.shutdown()

    reader = PeriodicExportingMetricReader(to["metrics"], export_interval_millis=3_600_000)
    meter_provider = MeterProvider(metric_readers=[reader], resource=resource)
    meter = meter_provider.get_meter("job")
    steps, lag = meter.create_counter("steps", unit="1"), meter.create_histogram("lag", unit="ms")
    for amount in (2, 5):
        steps.add(amount, {"rank": 3})
        lag.record(amount * 1.5, {"rank": 3})
        meter_provider.force_flush()
    meter_provider.shutdown()

    rows = hub.sql(
        "SELECT step, rank, value_text, attrs, cluster_id FROM stored_events"
        f" WHERE node_id = '{node}' AND step IS NOT NULL ORDER BY step"
    )
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        (step, 3, f"step {step} is slow", "c1") for step in range(7)
    ]
    kept = [json.loads(str(row[3])) for row in rows]
    assert all(
        k["loss"] == 0.5 and k["tags"] == ["a", "b"] and k["otel.severity_text"] == "WARN" for k in kept
    )
    assert all(k["otel.resource"]["service.name"] == "job" for k in kept)

    ((duration_ns, attrs),) = hub.sql(
        f"SELECT duration_ns, attrs FROM stored_events WHERE node_id = '{node}' AND name = 'backward'"
    )
    assert duration_ns == span.end_time - span.start_time
    data = json.loads(str(attrs))
    assert data["otel.span_id"] == f"{span.context.span_id:016x}" and data["otel.events"][0]["name"] == "half"

    points = hub.sql(
        "SELECT value_double, increase, is_monotonic, is_cumulative, unit, rank FROM node_metrics"
        f" WHERE node_id = '{node}' AND name = 'steps' ORDER BY ts_ns LIMIT 2"
    )
    assert points == [(2.0, None, True, True, "1", 3), (7.0, 5.0, True, True, "1", 3)]
    ((n, total),) = hub.sql(
        f"SELECT max(n), max(value_double) FROM node_metrics WHERE node_id = '{node}' AND name = 'lag'"
    )
    assert (n, total) == (2, 10.5)


def test_handlers_end_before_the_loop_of_the_port(tmp_path: Path):
    """A handler that is destroyed in a closed loop prints a traceback, and keeps its slot."""
    has_begun, has_ended = threading.Event(), threading.Event()

    async def handler() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            has_ended.set()
            raise

    with closing(HubStore.open(tmp_path)) as store:
        server = grpc_port.Server(Receiver(store, authenticate), "127.0.0.1:0")
        server.start()
        asyncio.run_coroutine_threadsafe(handler(), server._loop)
        assert has_begun.wait(20)
        server.stop(0)
    assert has_ended.is_set()
