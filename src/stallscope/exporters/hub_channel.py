"""The connection of an agent to its hub: gRPC with TLS and a token, on the Arrow or the OTLP logs endpoint.

The Arrow endpoint is tried first. A hub or collector without it gets OTLP logs, and the Arrow endpoint is tried again
after a while. An answer of the Arrow endpoint may name another hub that owns the cluster (hub_owners.py). The token
file is read for each batch, so that a token can be replaced while the agent runs.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from stallscope.errors import BadInput, NotFound
from stallscope.events.layout import Array
from stallscope.exporters.hub_arrow import METHOD as ARROW
from stallscope.exporters.hub_arrow import request as arrow_request
from stallscope.exporters.hub_logs import METHOD as LOGS
from stallscope.exporters.hub_logs import request as logs_request
from stallscope.exporters.hub_owners import HubChoice
from stallscope.exporters.hub_sender import Answer, Outcome
from stallscope.exporters.otlp_retry import LATER_CODES, is_bad_request, retry_after_s
from stallscope.health import METHOD as HEALTH

_TIMEOUT_S = 20.0
_HEALTH_TIMEOUT_S = 5.0
_ASK_AGAIN_S = 600.0
_MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # exporters/hub_sender.py retries, with the same batch id
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_UNKNOWN_TABLE = re.compile(r"table '(\w+)' does not accept rows")
_SHUT_OUT = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
_AWAY = _SHUT_OUT | {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Codes after which the hub accepts no batch either. An older hub answers UNIMPLEMENTED to a report of the health."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A hub and the agent's credentials. address: HOST:PORT. token: called for each batch. insecure: no TLS.

    client_cert, client_key: for a hub with mutual TLS. hosts: permitted hosts of other hubs, see hub_owners.py.
    """

    address: str
    node: str
    cluster: str
    token: Callable[[], str]
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure: bool = False
    about: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] = ()


class _Connection:
    """The methods of one hub."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None):
        """credentials: None for clear text."""
        self.address = address
        self._channel = (
            grpc.insecure_channel(address, _OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, _OPTIONS)
        )
        self.arrow = self._channel.unary_unary(ARROW)
        self.logs = self._channel.unary_unary(LOGS)
        self.health = self._channel.unary_unary(HEALTH)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


class HubChannel:
    """An open connection, which reconnects by itself. For one sending thread."""

    def __init__(
        self, target: Target, clock_s: Callable[[], float] = time.monotonic, *, only_logs: bool = False
    ):
        """Raises BadInput for unreadable certificate files. Does not wait for the hub.

        only_logs: send OTLP logs even to a hub with the Arrow endpoint.
        """
        self._target = target
        self._clock_s = clock_s
        credentials = None if target.insecure else _credentials(target)
        self._hubs = HubChoice(
            _Connection(target.address, credentials),
            lambda address: _Connection(address, credentials),
            hosts=target.hosts,
            clock_s=clock_s,
        )
        self._no_arrow_until_s = float("inf") if only_logs else 0.0
        self._refused_until_s: dict[str, float] = {}
        self._complaint = ""
        self._lock = threading.Lock()

    def send(self, batch_id: str, tables: Mapping[str, Array], done: Callable[[Answer], None]) -> None:
        """Start sending a batch; `done` is called with the result."""
        try:
            metadata = (("authorization", f"Bearer {self._target.token()}"),)
        except (BadInput, NotFound) as error:
            done(Answer(Outcome.SHUT_OUT, reason=str(error)))
            return
        with self._lock:
            now_s = self._clock_s()
            is_arrow = now_s >= self._no_arrow_until_s
            refused = {
                name for name, until_s in self._refused_until_s.items() if is_arrow and now_s < until_s
            }
        request = arrow_request if is_arrow else logs_request
        message = request(
            {name: rows for name, rows in tables.items() if name not in refused},
            batch_id=batch_id,
            node=self._target.node,
            cluster=self._target.cluster,
            about=self._target.about,
        )
        hub = self._hubs.take()
        try:
            method = hub.arrow if is_arrow else hub.logs
            call = method.future(message, timeout=_TIMEOUT_S, metadata=metadata)
        except BaseException:
            self._hubs.give(hub)
            raise

        def ended(call: Any) -> None:
            self._hubs.give(hub)
            if call.code() is grpc.StatusCode.OK:
                if is_arrow and (owner := _owner(call.result())):
                    self._hubs.follow(owner)
            elif call.code() is not grpc.StatusCode.INVALID_ARGUMENT and self._hubs.has_failed(hub):
                after_s = retry_after_s(call.trailing_metadata()) or 0.0
                reason = f"{hub.address}: {_reason(call.code(), call.details() or '')}"
                done(Answer(Outcome.LATER, after_s, reason))
                return
            if is_arrow and call.code() is grpc.StatusCode.UNIMPLEMENTED:
                with self._lock:
                    self._no_arrow_until_s = self._clock_s() + _ASK_AGAIN_S
                done(Answer(Outcome.LATER, retry_after_s=0.0, reason="changing to OTLP"))
                return
            if (table := _refused_table(call)) in tables:
                with self._lock:
                    self._refused_until_s[table] = self._clock_s() + _ASK_AGAIN_S
                done(Answer(Outcome.LATER, retry_after_s=0.0, reason=f"leaving out the table {table}"))
                return
            answer = _answer(call)
            if answer.outcome is Outcome.ACKNOWLEDGED:
                self._complaint = ""
            done(answer)

        call.add_done_callback(ended)

    def report_health(self, report: bytes) -> bytes | None:
        """Report the machine's health. Returns the hub's thresholds; None if it does not answer, or is older."""
        try:
            metadata = (("authorization", f"Bearer {self._target.token()}"),)
        except (BadInput, NotFound) as error:
            self._complaint = str(error)
            return None
        hub = self._hubs.take()
        try:
            answer: bytes = hub.health(report, timeout=_HEALTH_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            is_away = error.code() in _AWAY
            self._complaint = _reason(error.code(), error.details() or "") if is_away else ""
            return None
        except ValueError:  # the channel is closed
            return None
        finally:
            self._hubs.give(hub)
        self._complaint = ""
        return answer

    def complaint(self) -> str:
        """The reason why the hub did not answer the last report of the machine's health; otherwise empty.

        Without a job the agent sends no batch, so only these reports show that the hub is unusable.
        """
        return self._complaint

    def close(self) -> None:
        """End the connections."""
        self._hubs.close()


def _owner(answer: bytes) -> str:
    """The hub that owns the cluster, HOST:PORT; empty if the answer names no other hub."""
    try:
        owner = json.loads(answer).get("owner", "")
    except (ValueError, AttributeError):  # an older hub, or another receiver
        return ""
    return owner if isinstance(owner, str) else ""


def _refused_table(call: Any) -> str:
    """The table that an earlier release of the hub does not know; empty for any other answer."""
    is_refused = call.code() is grpc.StatusCode.INVALID_ARGUMENT
    match = _UNKNOWN_TABLE.search(call.details() or "") if is_refused else None
    return match[1] if match else ""


def _answer(call: Any) -> Answer:
    code = call.code()
    if code is grpc.StatusCode.OK:
        return Answer(Outcome.ACKNOWLEDGED)
    reason = _reason(code, call.details() or "")
    if code in _SHUT_OUT:
        return Answer(Outcome.SHUT_OUT, reason=reason)
    after_s = retry_after_s(call.trailing_metadata())
    if code.name in LATER_CODES or after_s is not None:
        return Answer(Outcome.LATER, after_s, reason)
    if code is grpc.StatusCode.INVALID_ARGUMENT or is_bad_request(call.trailing_metadata()):
        return Answer(Outcome.BAD_BATCH, reason=reason)
    return Answer(Outcome.FAILED, reason=reason)


def _reason(code: grpc.StatusCode, details: str) -> str:
    """A short reason: gRPC describes a failed connection at length."""
    if "ALPN" in details:
        return "its TLS does not speak gRPC: give the port of OTLP over gRPC (4317) in --hub"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not use TLS: --hub-insecure"
    if "ertificate" in details or "SSL" in details or "TLS" in details:
        return "its certificate is not trusted: --ca-cert, --hub"
    if "failed to connect" in details and "Socket closed" in details:
        return "it closed the connection: if it requires a client certificate, --client-cert and --client-key"
    if "onnection refused" in details:
        return "connection refused"
    if "DNS" in details or "name resolution" in details or "address lookup failed" in details:
        return "its name is not known"
    if code in _SHUT_OUT:  # the hub's advice is for its administrator
        return f"{' '.join(details.partition(';')[0].split())[:120]}: --token-file"
    return " ".join((details or code.name.lower().replace("_", " ")).split())[:120]


def _credentials(target: Target) -> grpc.ChannelCredentials:
    def content(path: Path | None) -> bytes | None:
        if path is None:
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror}): name a PEM file") from error

    ca, key, chain = content(target.ca_file), content(target.client_key), content(target.client_cert)
    if target.ca_file and b"-----BEGIN CERTIFICATE-----" not in (ca or b""):
        raise BadInput(f"--ca-cert: {target.ca_file} contains no certificate: name a PEM file")
    return grpc.ssl_channel_credentials(ca, key, chain)
