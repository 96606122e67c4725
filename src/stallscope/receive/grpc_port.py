"""The gRPC port: OTLP's three services and the Arrow endpoint, as plain bytes, on grpcio's threads.

Handlers are generic (no generated stubs), because the bytes go directly to the decoder. The sender is authenticated
and a slot is reserved when the headers arrive. Handlers are declared as streaming, because grpcio (1.85, `_server.py`)
gives a unary handler to a thread that then waits for the message: a sender without a token could block every thread.
A streaming handler runs before the message is read, and a refusal never reads it. Both are the same on the wire.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from stallscope import health
from stallscope.errors import BadInput, Overloaded
from stallscope.receive import arrow
from stallscope.receive.error_status import status
from stallscope.receive.receiver import Accepted, Receiver

_OTLP = {
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": "logs",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": "metrics",
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": "traces",
}
_OVERHEAD_BYTES = 1 << 16
_REFUSING_THREADS = 2
_CHECK_EVERY_S = 0.5

Handler = Callable[[Iterator[bytes], grpc.ServicerContext], bytes]


def server(
    receiver: Receiver, address: str, *, credentials: grpc.ServerCredentials | None = None
) -> tuple[grpc.Server, int]:
    """A gRPC server, not yet started, and its port. address: HOST:PORT; credentials: None for clear text.

    Raises OSError if the address is unavailable.
    """
    bounds = receiver.bounds
    made = grpc.server(
        ThreadPoolExecutor(bounds.max_requests, thread_name_prefix="otlp-grpc"),
        handlers=[_Handlers(receiver)],
        options=[
            ("grpc.max_receive_message_length", bounds.max_bytes + _OVERHEAD_BYTES),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.max_connection_idle_ms", 600_000),
            ("grpc.server_handshake_timeout_ms", 15_000),
            ("grpc.max_concurrent_streams", 128),
        ],
    )
    try:
        port = (
            made.add_insecure_port(address)
            if credentials is None
            else made.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    return made, port


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """grpcio calls service() for each call when its headers have arrived, in one thread."""

    def __init__(self, receiver: Receiver):
        self._receiver = receiver
        self._deadlines = _Deadlines(receiver.bounds.max_reading_s)
        self._refusing = ThreadPoolExecutor(_REFUSING_THREADS, thread_name_prefix="otlp-grpc-refusing")

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        signal = _OTLP.get(call.method)
        if signal is None and call.method not in (arrow.METHOD, health.METHOD):
            return None
        headers = {key: value for key, value in call.invocation_metadata if isinstance(value, str)}
        try:
            tenant = self._receiver.sender(headers).tenant
            self._receiver.requests.take(tenant)
        except Exception as error:  # noqa: BLE001 (the boundary: the refusing handler reports it)
            return grpc.stream_unary_rpc_method_handler(self._refusal(error))
        handler = self._health(tenant) if call.method == health.METHOD else self._export(signal, tenant)
        return grpc.stream_unary_rpc_method_handler(handler)

    def _refusal(self, error: Exception) -> Handler:
        """A handler that returns an error without reading a message."""

        def refuse(_: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            return self._abort(context, error)

        refuse.experimental_thread_pool = self._refusing  # type: ignore[attr-defined]
        return refuse

    def _export(self, signal: str | None, tenant: str) -> Handler:
        def export(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            try:
                answer = self._answer(signal, tenant, messages, context)
            except Exception as error:  # noqa: BLE001 (the boundary: a sender gets one line, never a traceback)
                if not context.is_active():
                    return b""  # the sender has disconnected
                return self._abort(context, error)
            finally:
                self._receiver.requests.give(tenant)
            packed: bytes = json.dumps(answer).encode() if signal is None else answer.SerializeToString()
            return packed

        return export

    def _health(self, tenant: str) -> Handler:
        """A handler of a report on a machine's health, which stores no rows."""

        def report(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            try:
                body = self._message(tenant, messages, context) or b""
                return json.dumps(self._receiver.cohorts.report(body, tenant)).encode()
            except Exception as error:  # noqa: BLE001 (the boundary: a sender gets one line, never a traceback)
                return self._abort(context, error)
            finally:
                self._receiver.requests.give(tenant)

        return report

    def _answer(
        self, signal: str | None, tenant: str, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Any:
        receiver = self._receiver
        body = self._message(tenant, messages, context)
        if body is None:
            raise BadInput("the request has no message")
        accepted: Accepted
        with receiver.bodies.held(tenant, len(body)):
            accepted = receiver.arrow(body, tenant) if signal is None else receiver.otlp(signal, body, tenant)
            del body
        try:
            receipt = accepted.future.result(timeout=receiver.bounds.max_waiting_s)
        except FutureTimeout:
            raise Overloaded("the hub did not store the rows in time; send again later", 2.0) from None
        return accepted.answer(receipt)

    def _message(self, tenant: str, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        """The message of a call; None if the sender closes without one. Bounds the messages that are arriving."""
        receiver = self._receiver
        with (
            receiver.reading.held(tenant, patience_s=receiver.bounds.patience_s),
            self._deadlines.of(context),
        ):
            return next(messages, None)

    def _abort(self, context: grpc.ServicerContext, error: Exception) -> bytes:
        refusal = self._receiver.refused(error, peer=_address(context.peer()))
        context.abort_with_status(rpc_status.to_status(status(refusal)))
        raise AssertionError("abort_with_status raises")


class _Deadlines:
    """Cancels calls whose message does not arrive in time, so that a sender cannot hold a slot for long."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._until_s: dict[grpc.ServicerContext, float] = {}
        threading.Thread(target=self._run, name="otlp-grpc-deadlines", daemon=True).start()

    @contextmanager
    def of(self, context: grpc.ServicerContext) -> Iterator[None]:
        """The call is cancelled if the with block takes longer than the limit."""
        with self._lock:
            self._until_s[context] = time.monotonic() + self._limit_s
        try:
            yield
        finally:
            with self._lock:
                del self._until_s[context]

    def _run(self) -> None:
        while True:
            time.sleep(_CHECK_EVERY_S)
            with self._lock:
                now_s = time.monotonic()
                late = [context for context, until_s in self._until_s.items() if until_s < now_s]
            for context in late:
                context.cancel()


def _address(peer: str) -> str:
    """The address in gRPC's peer name: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000, unix:..."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer[:100]
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").removeprefix("[").removesuffix("]")
