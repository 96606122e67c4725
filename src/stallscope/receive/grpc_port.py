"""The gRPC port: OTLP's three services and the Arrow lane, as plain bytes, on grpcio's threads.

Handlers are generic (no generated stubs), since bytes go straight to the decoder. A handler's thread waits for the
commit, so there are as many threads as requests may be under way; what comes beyond waits in gRPC, up to a limit.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import grpc
from grpc_status import rpc_status

from stallscope.errors import Overloaded
from stallscope.receive import arrow
from stallscope.receive.error_status import status
from stallscope.receive.receiver import Accepted, Receiver

_OTLP = {
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": "logs",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": "metrics",
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": "traces",
}
_OVERHEAD_BYTES = 1 << 16
_MOST_REQUESTS = 1024


def server(
    receiver: Receiver, address: str, *, credentials: grpc.ServerCredentials | None = None
) -> tuple[grpc.Server, int]:
    """A gRPC server that has not been started, and its port. address: HOST:PORT; credentials: None is clear text.

    Raises OSError when the address cannot be had.
    """
    bounds = receiver.bounds
    made = grpc.server(
        ThreadPoolExecutor(bounds.workers, thread_name_prefix="otlp-grpc"),
        handlers=[_Handlers(receiver)],
        maximum_concurrent_rpcs=_MOST_REQUESTS,
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
    """grpcio asks it for the handler of each call."""

    def __init__(self, receiver: Receiver):
        self._receiver = receiver

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if call.method == arrow.METHOD:
            return grpc.unary_unary_rpc_method_handler(self._arrow)
        signal = _OTLP.get(call.method)
        return None if signal is None else grpc.unary_unary_rpc_method_handler(self._otlp(signal))

    def _otlp(self, signal: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def export(body: bytes, context: grpc.ServicerContext) -> bytes:
            message = self._answered(context, lambda tenant: self._receiver.otlp(signal, body, tenant))
            packed: bytes = message.SerializeToString()
            return packed

        return export

    def _arrow(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        return json.dumps(self._answered(context, lambda tenant: self._receiver.arrow(body, tenant))).encode()

    def _answered(self, context: grpc.ServicerContext, take: Callable[[str], Accepted]) -> Any:
        try:
            headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            accepted = take(self._receiver.sender(headers).tenant)
            try:
                receipt = accepted.future.result(timeout=self._receiver.bounds.max_waiting_s)
            except FutureTimeout:
                raise Overloaded(
                    "the hub did not come to store this in time; send again later", 2.0
                ) from None
            return accepted.answer(receipt)
        except Exception as error:  # noqa: BLE001 (the border: a sender gets one line, never a traceback)
            told = self._receiver.refused(error)
        return context.abort_with_status(rpc_status.to_status(status(told)))
