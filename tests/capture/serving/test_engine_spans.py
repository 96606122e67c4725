"""The spans of engines: received over HTTP, and turned into rows."""

import gzip
import http.client
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.patience import until

from stallscope.capture.serving import engine_spans
from stallscope.capture.serving.engine_spans import PATH, EngineSpans, id_hash, span_rows
from stallscope.capture.serving.request_capture import Serving
from stallscope.errors import BadInput
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN

trace_service_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

ARRIVAL_NS, BOOT_NS = 1_700_000_000_000_000_000, 1_600_000_000_000_000_000
TYPE = {"Content-Type": "application/x-protobuf"}


def message(*, request_id: str | None = "chatcmpl-7", **seconds: float):
    out = trace_service_pb2.ExportTraceServiceRequest()
    span = out.resource_spans.add().scope_spans.add().spans.add()
    span.start_time_unix_nano, span.end_time_unix_nano = ARRIVAL_NS, ARRIVAL_NS + 500_000_000
    texts = {"gen_ai.request.id": request_id, "gen_ai.response.model": "tiny"}
    for name, text in texts.items():
        if text:
            span.attributes.add(key=name).value.string_value = text
    for name, value in seconds.items():
        span.attributes.add(key=f"gen_ai.latency.{name}").value.double_value = value
    return out


@pytest.fixture
def spans() -> Iterator[EngineSpans]:
    made = EngineSpans(0)
    yield made
    made.close()


def post(spans: EngineSpans, body: bytes, *, path: str = PATH, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", spans.port, timeout=10)
    connection.request("POST", path, body, TYPE | headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_times_of_a_span_are_a_row():
    (row,) = span_rows(message(time_in_queue=0.25, time_to_first_token=0.5, e2e=2.0), BOOT_NS)
    assert row["ts_ns"] == ARRIVAL_NS - BOOT_NS
    assert (row["queue_ns"], row["first_ns"], row["whole_ns"]) == (250_000_000, 500_000_000, 2_000_000_000)
    assert (row["prefill_ns"], row["model"]) == (UNKNOWN, b"tiny")


def test_a_span_without_a_duration_of_its_own_has_its_length():
    (row,) = span_rows(message(), BOOT_NS)
    assert row["whole_ns"] == 500_000_000


def test_a_span_without_the_id_of_a_request_is_left_out():
    assert len(span_rows(message(request_id=None), BOOT_NS)) == 0


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, 1e20, 1e300, -1.0])
def test_an_impossible_number_is_an_unknown_time(seconds: float):
    (row,) = span_rows(message(e2e=seconds, time_to_first_token=seconds, time_in_queue=0.25), BOOT_NS)
    assert (row["queue_ns"], row["first_ns"], row["whole_ns"]) == (250_000_000, UNKNOWN, 500_000_000)


@pytest.mark.parametrize(
    ("begin_ns", "end_ns"),
    [
        ((1 << 64) - 1, (1 << 64) - 1),
        (ARRIVAL_NS, (1 << 64) - 1),
        (ARRIVAL_NS, (1 << 63) - 1),
        (ARRIVAL_NS, ARRIVAL_NS - 1),
        (0, 0),
    ],
)
def test_a_span_with_impossible_times_is_left_out(begin_ns: int, end_ns: int):
    two = message()
    two.MergeFrom(message(request_id="chatcmpl-8"))
    span = two.resource_spans[0].scope_spans[0].spans[0]
    span.start_time_unix_nano, span.end_time_unix_nano = begin_ns, end_ns
    assert span_rows(two, BOOT_NS)["id_hash"].tolist() == [id_hash("chatcmpl-8")]


def test_the_prompts_of_a_completion_have_the_id_of_its_response():
    assert id_hash("cmpl-7-0") == id_hash("cmpl-7")
    assert id_hash("chatcmpl-7-0") != id_hash("chatcmpl-7")
    assert id_hash("a") == 0xAF63DC4C8601EC8C - (1 << 64)  # FNV-1a's published test vector


def test_spans_are_received_once(spans: EngineSpans):
    body = message(e2e=1.0).SerializeToString()
    assert post(spans, body) == 200
    assert post(spans, gzip.compress(body), **{"Content-Encoding": "gzip"}) == 200
    rows = spans.take(3)
    assert rows["whole_ns"].tolist() == [10**9] * 2
    assert rows["node"].tolist() == [3, 3]
    assert len(spans.take(3)) == 0


def test_only_rows_with_room_are_kept(spans: EngineSpans, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_spans, "_MAX_ROWS", 3)
    two = message()
    two.MergeFrom(message())
    for _ in range(5):
        assert post(spans, two.SerializeToString()) == 200
    assert [len(rows if rows.base is None else rows.base) for rows in spans._rows] == [2, 1]
    assert (len(spans.take(0)), spans.n_dropped) == (3, 7)


def test_spans_are_delivered_if_requests_cannot_be_recorded(spans: EngineSpans):
    probes: Any = SimpleNamespace(records_requests=False)
    serving = Serving(3, probes, lambda: (), chosen=(), note=print, spans=spans)
    assert post(spans, message().SerializeToString()) == 200
    ((table, rows),) = serving.second(0)
    assert (table, len(rows)) == (layout.ENGINE_SPANS, 1)


@pytest.mark.parametrize(
    ("body", "options", "status"),
    [
        (b"\xff\xff\xff", {}, 400),
        (b"not gzip", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(bytes(9 << 20)), {"Content-Encoding": "gzip"}, 400),
        (b"{}", {"Content-Type": "application/json"}, 415),
        (b"", {"path": "/v1/metrics"}, 404),
        (b"", {"Content-Length": "99999999999"}, 413),
        (b"", {"Content-Length": "9" * 5000}, 413),
    ],
)
def test_other_messages_are_refused(spans: EngineSpans, body: bytes, options: dict[str, str], status: int):
    assert post(spans, body, **options) == status
    assert len(spans.take(0)) == 0


def test_a_port_in_use_is_refused(spans: EngineSpans):
    with pytest.raises(BadInput, match="choose another port"):
        EngineSpans(spans.port)


@contextmanager
def slow_client(spans: EngineSpans) -> Iterator[threading.Thread]:
    """Sends a long message byte by byte, until the server ends the connection."""
    is_over = threading.Event()

    def send(connection: socket.socket) -> None:
        try:
            while not is_over.wait(0.01):
                connection.sendall(b"x")
        except OSError:
            pass

    with socket.create_connection(("127.0.0.1", spans.port)) as connection:
        head = (
            f"POST {PATH} HTTP/1.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: 8000000\r\n\r\n"
        )
        connection.sendall(head.encode())
        sender = threading.Thread(target=send, args=(connection,))
        sender.start()
        try:
            yield sender
        finally:
            is_over.set()
            sender.join()


def test_a_slow_client_does_not_keep_the_port(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_spans, "_TIMEOUT_S", 0.5)
    spans = EngineSpans(0)
    with slow_client(spans) as sender:
        until(lambda: not sender.is_alive(), state=lambda: "the connection is still served")
    spans.close()


def test_the_end_does_not_wait_for_a_slow_client(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_spans, "_TIMEOUT_S", 10_000.0)
    spans = EngineSpans(0)
    is_served = threading.Event()
    respond = spans._server.finish_request

    def served(*request: Any) -> None:
        is_served.set()
        respond(*request)

    monkeypatch.setattr(spans._server, "finish_request", served)
    with slow_client(spans):
        until(is_served.is_set)
        closing = threading.Thread(target=spans.close)
        closing.start()
        until(lambda: not closing.is_alive(), state=lambda: "close() waits for the client")
