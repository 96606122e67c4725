"""Rows on their way from the hub that received them to the hub that owns their slot.

Each hub has a port for other hubs: TLS with a certificate of its own, which it publishes in PostgreSQL, and a secret
from there. So every hub of the database can send to every other hub, and no other client can.
"""

import datetime
import hmac
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pyarrow as pa

from stallscope.errors import BadInput, Overloaded, StallscopeError
from stallscope.store.hub.batches import Batch, Receipt
from stallscope.store.shared.leases import Member

_METHOD = "/stallscope.v1.Peer/Append"
_NAME = "stallscope-hub"
_TIMEOUT_S = 20.0
_MAX_BYTES = 256 << 20
_THREADS = 32
_VALID_DAYS = 3650
_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_BYTES),
    ("grpc.max_receive_message_length", _MAX_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
)

Append = Callable[[int, Batch], "Future[Receipt]"]
"""Stores a batch of a slot of this hub. Raises Overloaded if the slot is another hub's."""


def certificate() -> tuple[bytes, bytes]:
    """A new certificate for the port of this process, and its key (PEM)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private


class Peers:
    """Sends batches to other hubs. Thread-safe."""

    def __init__(self, secret: str):
        self._metadata = (("authorization", f"Bearer {secret}"),)
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._under_way: dict[Any, tuple[int, str]] = {}

    def send(self, member: Member, slot: int, batch: Batch) -> "Future[Receipt]":
        """Store a batch at the owner of its slot. The future raises Overloaded if the owner does not answer."""
        call = self._channel(member).unary_unary(_METHOD)
        pending = call.future(_packed(slot, batch), timeout=_TIMEOUT_S, metadata=self._metadata)
        result: Future[Receipt] = Future()
        with self._lock:
            self._under_way[pending] = slot, member.name

        def ended(call: Any) -> None:
            with self._lock:
                self._under_way.pop(pending, None)
            _settle(call, result)

        pending.add_done_callback(ended)
        return result

    def cancel_moved(self, owner: Callable[[int], str]) -> None:
        """Give up on hubs that own their slot no longer: a hub that stopped would answer only after the time limit.

        owner: the name of a slot's owner.
        """
        with self._lock:
            under_way = list(self._under_way.items())
        for pending, (slot, name) in under_way:
            if owner(slot) != name:
                pending.cancel()

    def keep(self, names: set[str]) -> None:
        """Close the connections to hubs that are not among these."""
        with self._lock:
            gone = [self._channels.pop(name) for name in self._channels.keys() - names]
        for channel in gone:
            channel.close()

    def close(self) -> None:
        """Close all connections."""
        self.keep(set())

    def _channel(self, member: Member) -> grpc.Channel:
        with self._lock:
            channel = self._channels.get(member.name)
            if channel is None:
                credentials = grpc.ssl_channel_credentials(member.certificate.encode())
                options = (*_OPTIONS, ("grpc.ssl_target_name_override", _NAME))
                channel = self._channels[member.name] = grpc.secure_channel(member.peer, credentials, options)
            return channel


def server(append: Append, address: str, *, secret: str, cert: bytes, key: bytes) -> tuple[grpc.Server, int]:
    """The port for other hubs, not yet started, and its number. Raises OSError for an unavailable address."""
    made = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-peers"),
        handlers=[_Handlers(append, secret)],
        options=[("grpc.max_receive_message_length", _MAX_BYTES), ("grpc.so_reuseport", 0)],
    )
    try:
        port = made.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    return made, port


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, append: Append, secret: str):
        self._append, self._wanted = append, f"Bearer {secret}".encode()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if call.method != _METHOD:
            return None
        given = dict(call.invocation_metadata).get("authorization", "")
        is_peer = isinstance(given, str) and hmac.compare_digest(given.encode(), self._wanted)
        # A streaming handler refuses before the message is read, see receive/grpc_port.py.
        return grpc.stream_unary_rpc_method_handler(self._take if is_peer else _refuse)

    def _take(self, messages: Any, context: grpc.ServicerContext) -> bytes:
        try:
            slot, batch = _unpacked(next(messages))
            receipt = self._append(slot, batch).result(_TIMEOUT_S)
        except Overloaded as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, _error(str(error), error.retry_after_s))
        except BadInput as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _error(str(error), 0))
        except (StallscopeError, TimeoutError) as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, _error(str(error), 2.0))
        return json.dumps([receipt.n_rows, receipt.is_duplicate, receipt.received_us]).encode()


def _refuse(_: Any, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "only hubs of the same database may use this port")
    raise AssertionError("abort raises")


def _error(message: str, retry_after_s: float) -> str:
    return json.dumps({"message": message[:500], "retry_after_s": retry_after_s})


def _settle(ended: Any, result: "Future[Receipt]") -> None:
    if ended.code() is grpc.StatusCode.OK:
        n_rows, is_duplicate, received_us = json.loads(ended.result())
        result.set_result(Receipt(n_rows, is_duplicate, received_us))
        return
    try:
        known: Mapping[str, Any] = json.loads(ended.details() or "")
        message, retry_s = str(known["message"]), float(known["retry_after_s"])
    except (ValueError, KeyError, TypeError):
        message, retry_s = "the hub that owns the cluster does not answer; send again", 1.0
    is_bad = ended.code() is grpc.StatusCode.INVALID_ARGUMENT
    result.set_exception(BadInput(message) if is_bad else Overloaded(message, retry_s))


def _packed(slot: int, batch: Batch) -> bytes:
    streams = {name: _stream(rows) for name, rows in batch.tables.items()}
    head = {
        "slot": slot,
        "batch_id": batch.batch_id,
        "tenant": batch.tenant,
        "n_bytes": batch.n_bytes,
        "tables": [[name, len(stream)] for name, stream in streams.items()],
    }
    return b"".join([json.dumps(head).encode(), b"\n", *streams.values()])


def _stream(rows: pa.Table) -> Any:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    return memoryview(sink.getvalue())


def _unpacked(body: bytes) -> tuple[int, Batch]:
    end = body.index(b"\n")
    head, at = json.loads(body[:end]), end + 1
    tables: dict[str, pa.Table] = {}
    for name, n_bytes in head["tables"]:
        with pa.ipc.open_stream(memoryview(body)[at : at + n_bytes]) as reader:
            tables[name] = reader.read_all()
        at += n_bytes
    return head["slot"], Batch(head["batch_id"], head["tenant"], tables, head["n_bytes"])
