"""The spans that inference engines send: OTLP over HTTP with protobuf, at a loopback port.

    spans = EngineSpans(4318)
    rows = spans.take(node)          # rows of ENGINE_SPANS since the last call

vLLM sends them with --otlp-traces-endpoint http://127.0.0.1:PORT/v1/traces and OTEL_EXPORTER_OTLP_TRACES_PROTOCOL set
to http/protobuf. A span is kept if it has the id of a request and a time of the engine; the prompt is not in it.
"""

import gzip
import http.server
import io
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stallscope.errors import BadInput, remedy_for_extra
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array

PATH = "/v1/traces"
_MAX_BYTES = 8 << 20
_MAX_ROWS = 20_000
"""Kept until the next take(): a second of a very busy engine. Further spans are dropped and counted."""

_MAX_S = 366 * 86_400
"""A request does not take longer: a greater number is a mistake."""

_TIMEOUT_S = 2.0
"""For a whole request, since requests are served one after another."""
_END_POLL_S = 0.1
"""close() takes at most this long: the server checks this often whether it is to end."""

_ID = "gen_ai.request.id"
_MODELS = ("gen_ai.response.model", "gen_ai.request.model")
_TIMES = {
    "queue_ns": "gen_ai.latency.time_in_queue",
    "prefill_ns": "gen_ai.latency.time_in_model_prefill",
    "decode_ns": "gen_ai.latency.time_in_model_decode",
    "first_ns": "gen_ai.latency.time_to_first_token",
    "whole_ns": "gen_ai.latency.e2e",
}
"""Columns of ENGINE_SPANS, and the attributes of vLLM's spans, in seconds."""

_LENGTH = re.compile("[0-9]{1,20}")
_NUMBERED = re.compile(r"^(cmpl-.+)-\d+$")
"""vLLM numbers the prompts of a completion; the response has the id without the number."""

_OFFSET, _PRIME, _MASK = 14695981039346656037, 1099511628211, (1 << 64) - 1


def id_hash(request_id: str) -> int:
    """The 64-bit FNV-1a hash of an id as bpf/serving.bpf.c computes it, as a signed number."""
    match = _NUMBERED.match(request_id)
    out = _OFFSET
    for byte in (match[1] if match else request_id).encode():
        out = (out ^ byte) * _PRIME & _MASK
    return out - (1 << 64) if out >> 63 else out


def span_rows(message: Any, wall_offset_ns: int) -> Array:
    """Rows of ENGINE_SPANS of an ExportTraceServiceRequest. wall_offset_ns: wall clock minus monotonic clock."""
    spans = [
        span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]
    known = [
        (span, attributes)
        for span in spans
        if _has_possible_times(span) and _ID in (attributes := _attributes(span.attributes))
    ]
    rows = layout.empty(layout.ENGINE_SPANS, len(known))
    for row, (span, attributes) in zip(rows, known, strict=True):
        row["ts_ns"] = span.start_time_unix_nano - wall_offset_ns
        row["id_hash"] = id_hash(str(attributes[_ID]))
        row["model"] = next((str(attributes[name]) for name in _MODELS if name in attributes), "").encode()[
            :64
        ]
        for column, name in _TIMES.items():
            row[column] = _time_ns(attributes.get(name))
        if row["whole_ns"] == UNKNOWN:
            row["whole_ns"] = span.end_time_unix_nano - span.start_time_unix_nano
    return rows


def _has_possible_times(span: Any) -> bool:
    begin_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
    return 0 < begin_ns <= end_ns < 1 << 63 and end_ns - begin_ns <= _MAX_S * 10**9


def _time_ns(seconds: object) -> int:
    """UNKNOWN for a value that is not the time of a request."""
    if isinstance(seconds, int | float) and 0 <= seconds <= _MAX_S:  # false for NaN
        return round(seconds * 1e9)
    return UNKNOWN


def _attributes(pairs: Iterable[Any]) -> dict[str, object]:
    """The attributes with a text or a number."""
    out: dict[str, object] = {}
    for pair in pairs:
        if kind := pair.value.WhichOneof("value"):
            out[pair.key] = getattr(pair.value, kind)
    return out


@dataclass
class EngineSpans:
    """Listens from its creation until close(). port: 0 takes a free one. Raises BadInput if it cannot listen."""

    port: int
    n_dropped: int = 0
    _rows: list[Array] = field(default_factory=list)
    _n_rows: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        try:
            from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
        except ImportError:
            raise BadInput(
                f"engine_spans_port needs the package opentelemetry-proto: {remedy_for_extra('export')}"
            ) from None
        self._request, self._response = (
            trace_service_pb2.ExportTraceServiceRequest,
            trace_service_pb2.ExportTraceServiceResponse,
        )
        try:
            self._server = _Server(("127.0.0.1", self.port), _handler(self))
        except OSError as error:
            raise BadInput(f"engine_spans_port {self.port}: {error.strerror}; choose another port") from error
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_END_POLL_S,), name="engine-spans", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the listener, and the connection that it serves."""
        self._server.end_connection()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, node: int) -> Array:
        """The rows of ENGINE_SPANS since the last call."""
        with self._lock:
            rows, self._rows, self._n_rows = self._rows, [], 0
        out = layout.joined([layout.empty(layout.ENGINE_SPANS), *rows])
        out["node"] = node
        return out

    def receive(self, body: bytes) -> bytes:
        """Keep the spans of a message. Returns the response. Raises ValueError for another message."""
        from google.protobuf.message import DecodeError

        try:
            rows = span_rows(self._request.FromString(body), time.time_ns() - time.monotonic_ns())
        except DecodeError as error:
            raise ValueError(str(error)) from error
        with self._lock:
            room = max(_MAX_ROWS - self._n_rows, 0)
            self.n_dropped += max(len(rows) - room, 0)
            if kept := min(len(rows), room):
                self._rows.append(rows[:kept].copy())  # a view would keep all rows in memory
                self._n_rows += kept
        return bytes(self._response().SerializeToString())


class _Server(http.server.HTTPServer):
    """Serves one connection at a time, each for at most _TIMEOUT_S."""

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]):
        self._connection_lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_ending = False
        super().__init__(address, handler)

    def end_connection(self) -> None:
        """End the connection that is served now; further connections are not served."""
        with self._connection_lock:
            self._is_ending = True
            if self._connection:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._connection_lock:
            self._connection = None if self._is_ending else request
        if self._connection:
            self.finish_request(request, client_address)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._connection_lock:
            self._connection = None
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has closed its connection is not reported."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Reader(io.RawIOBase):
    """The bytes of a connection until a deadline; then raises TimeoutError."""

    def __init__(self, connection: socket.socket, timeout_s: float):
        self._connection, self._end_s = connection, time.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining_s)
        return self._connection.recv_into(buffer)


def _handler(spans: EngineSpans) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(_Reader(self.connection, _TIMEOUT_S))

        def do_POST(self) -> None:
            status, body = self._answer()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, bytes]:
            length = self.headers.get("Content-Length", "")
            if self.path != PATH:
                return 404, b""
            if self.headers.get_content_type() != "application/x-protobuf":
                return 415, b""
            if not _LENGTH.fullmatch(length) or int(length) > _MAX_BYTES:
                return 413, b""
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                return 400, b""
            try:
                if self.headers.get("Content-Encoding") == "gzip":
                    body = _unpacked(body)
                return 200, spans.receive(body)
            except (ValueError, OSError, EOFError, zlib.error):
                return 400, b""

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    return Handler


def _unpacked(body: bytes) -> bytes:
    """The content of a gzip file. Raises ValueError if it is too large."""
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
        out = file.read(_MAX_BYTES + 1)
    if len(out) > _MAX_BYTES:
        raise ValueError("too large")
    return out
