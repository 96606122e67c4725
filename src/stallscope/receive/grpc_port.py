"""The gRPC port: OTLP's three services and the Arrow endpoint, as plain bytes, in one event loop.

Handlers are generic (no generated stubs), because the bytes go directly to the decoder. The sender is authenticated
and a slot is reserved when the headers arrive. Handlers are declared as streaming, because grpcio (1.85,
`aio/server.pyx.pxi`) reads the message of a unary call before it calls the handler. A streaming handler runs before the
message is read, and a refusal never reads it. Both are the same on the wire.

grpcio's server with a thread for each request needs about twice the processor time for a small request: the thread
waits for the message and again for the commit, and each wait costs two switches.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from stallscope import health
from stallscope.errors import BadInput, Overloaded
from stallscope.receive import arrow
from stallscope.receive.completions import Completions
from stallscope.receive.error_status import status
from stallscope.receive.receiver import Accepted, Receiver

_OTLP = {
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": "logs",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": "metrics",
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": "traces",
}
_OVERHEAD_BYTES = 1 << 16
_ENDING_S = 5.0

Answer = Callable[[str, bytes], Awaitable[bytes]]
"""From the tenant and the message to the response."""


class Server:
    """A gRPC server with an event loop in a thread of its own; not listening until start()."""

    def __init__(
        self, receiver: Receiver, address: str, *, credentials: grpc.ServerCredentials | None = None
    ):
        """address: HOST:PORT; credentials: None for clear text. Raises OSError if the address is unavailable."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="otlp-grpc", daemon=True)
        self._thread.start()
        try:
            self._server, self.port = self._result(_bound(receiver, address, credentials))
        except RuntimeError as error:
            self._end()
            raise OSError(f"cannot listen on {address}") from error

    def start(self) -> None:
        """Accept connections."""
        self._result(self._server.start())

    def stop(self, grace_s: float) -> None:
        """Accept no more calls, answer the pending calls for this long, then end."""
        self._result(self._server.stop(grace_s))
        self._result(_ended_calls())
        self._end()

    def _result(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _ended_calls() -> None:
    """Wait until the handlers of cancelled calls have ended: a handler in a closed loop ends with a traceback."""
    handlers = asyncio.all_tasks() - {asyncio.current_task()}
    for handler in handlers:
        handler.cancel()
    if handlers:
        await asyncio.wait(handlers, timeout=_ENDING_S)


async def _bound(
    receiver: Receiver, address: str, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(
        handlers=[_Handlers(receiver)],
        options=[
            ("grpc.max_receive_message_length", receiver.bounds.max_bytes + _OVERHEAD_BYTES),
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
    if credentials is None:
        return server, server.add_insecure_port(address)
    return server, server.add_secure_port(address, credentials)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """grpcio calls the handler of a method when the headers of a call have arrived, in the event loop."""

    def __init__(self, receiver: Receiver):
        self._receiver = receiver
        self._completions = Completions(asyncio.get_running_loop())
        self._threads = ThreadPoolExecutor(receiver.bounds.max_requests, thread_name_prefix="otlp-grpc")
        answers: dict[str, Answer] = {
            method: partial(self._stored, signal) for method, signal in _OTLP.items()
        }
        answers |= {arrow.METHOD: partial(self._stored, None), health.METHOD: self._health_report}
        self._handlers = {
            method: grpc.stream_unary_rpc_method_handler(self._handler(answer))
            for method, answer in answers.items()
        }

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(call.method)

    def _handler(
        self, answer: Answer
    ) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[bytes]]:
        requests = self._receiver.requests

        async def handle(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
            try:
                headers = {
                    key: value for key, value in context.invocation_metadata() if isinstance(value, str)
                }
                tenant = self._receiver.sender(headers).tenant
                requests.take(tenant)
            except Exception as error:  # noqa: BLE001 (the boundary: a sender gets one line, never a traceback)
                return await self._abort(context, error)
            try:
                return await answer(tenant, await self._message(tenant, context))
            except Exception as error:  # noqa: BLE001 (as above)
                return await self._abort(context, error)
            finally:
                requests.give(tenant)

        return handle

    async def _message(self, tenant: str, context: grpc.aio.ServicerContext) -> bytes:
        """The message of a call. Bounds the messages that are arriving, and the time that each may take."""
        bounds, reading = self._receiver.bounds, self._receiver.reading
        await reading.take_in_loop(tenant, patience_s=bounds.patience_s)
        try:
            async with asyncio.timeout(bounds.max_reading_s):
                message: bytes = await context.read()
        except TimeoutError:
            raise Overloaded("the message did not arrive in time; send again later", 2.0) from None
        finally:
            reading.give(tenant)
        if message is grpc.aio.EOF:
            raise BadInput("the request has no message")
        return message

    async def _stored(self, signal: str | None, tenant: str, body: bytes) -> bytes:
        """The answer to a request once its rows are on disk. signal: None is the Arrow endpoint."""
        receiver = self._receiver
        store = partial(receiver.arrow, body, tenant)
        if signal is not None:
            store = partial(receiver.otlp, signal, body, tenant)
        accepted: Accepted
        if receiver.is_queued(signal, len(body)):
            accepted = store()
        else:
            accepted = await self._in_thread(store, tenant, len(body))
        del body, store
        try:
            async with asyncio.timeout(receiver.bounds.max_waiting_s):
                receipt = await self._completions.result(accepted.future)
        except TimeoutError:
            raise Overloaded("the hub did not store the rows in time; send again later", 2.0) from None
        answer = accepted.answer(receipt)
        packed: bytes = json.dumps(answer).encode() if signal is None else answer.SerializeToString()
        return packed

    async def _health_report(self, tenant: str, body: bytes) -> bytes:
        """The answer to a report on a machine's health, which stores no rows."""
        report = partial(self._receiver.cohorts.report, body, tenant)
        return json.dumps(await self._in_thread(report, tenant, len(body))).encode()

    async def _in_thread(self, work: Callable[[], Any], tenant: str, n_bytes: int) -> Any:
        """The result of work with a body, whose bytes are held until the end even if the sender disconnects."""
        bodies = self._receiver.bodies
        bodies.take(tenant, n_bytes)
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: bodies.give(tenant, n_bytes))
        return await asyncio.wrap_future(future)

    async def _abort(self, context: grpc.aio.ServicerContext, error: Exception) -> bytes:
        refusal = self._receiver.refused(error, peer=_address(context.peer()))
        answer = rpc_status.to_status(status(refusal))
        await context.abort(answer.code, answer.details, answer.trailing_metadata)
        raise AssertionError("abort raises")


def _address(peer: str) -> str:
    """The address in gRPC's peer name: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000, unix:..."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer[:100]
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").removeprefix("[").removesuffix("]")
