"""The hub: store, receivers, and the application that answers. The wiring, and how it ends.

What can be refused is refused before anything listens: certificates, tokens, the folder, the addresses.
"""

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from stallscope import rates
from stallscope.diagnose.stream import Stream
from stallscope.diagnose.thresholds import thresholds
from stallscope.ending import set_by_signals
from stallscope.errors import BadInput, NotAllowed, NotAuthenticated
from stallscope.receive import grpc_port, http_port
from stallscope.receive.receiver import CAPABILITIES, Receiver
from stallscope.serve.app import House, create_app
from stallscope.serve.audit import FILE_NAME as AUDIT_FILE
from stallscope.serve.audit import AuditLog
from stallscope.serve.front import front
from stallscope.serve.listening import Listening, address, bound
from stallscope.serve.numbers import expose
from stallscope.serve.tls import Certificates, Files
from stallscope.serve.tokens import FILE_NAME as TOKENS_FILE
from stallscope.serve.tokens import Identity, Tokens
from stallscope.settings import Settings
from stallscope.standing import Standing
from stallscope.store.hub.store import HubStore

_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where to keep, where to listen. tls: None is clear text."""

    db: Path
    otlp_grpc: str = ":4317"
    otlp_http: str = ":4318"
    api: str = ":8081"
    tls: Files | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Ports:
    """Where a running hub listens."""

    otlp_grpc: int
    otlp_http: int
    api: int


def run(options: Options, *, out: TextIO = sys.stderr) -> None:
    """Serve until SIGINT or SIGTERM; then take nothing more, commit what is there, and return.

    Raises BadInput, StorageFailed, NewerSchema before anything listens.
    """
    os.umask(
        0o077
    )  # files that the engine makes anew, like the write-ahead log, are ours alone from the first byte on
    stop = threading.Event()
    with set_by_signals(stop), started(options, out=out):
        stop.wait()
        _say(out, "ending: what has been received is being committed")
    _say(out, "ended")


@contextmanager
def started(options: Options, *, out: TextIO = sys.stderr) -> Iterator[Ports]:
    """A hub that serves inside the with block. Raises BadInput, StorageFailed, NewerSchema."""
    # Who asks has a token; a certificate is wanted from senders only.
    certificates = Certificates(options.tls) if options.tls else None
    for_api = Certificates(replace(options.tls, client_ca=None)) if options.tls else None
    _as_many_files_as_allowed()
    begin_s = time.monotonic()
    with ExitStack() as stack:
        tokens = Tokens(options.db / TOKENS_FILE)
        store = stack.enter_context(closing(HubStore.open(options.db)))
        standing = stack.enter_context(closing(Standing(store, _streams(options.settings))))
        audit = stack.enter_context(closing(AuditLog(options.db / AUDIT_FILE)))
        receiver = Receiver(store, _authenticate(tokens, audit))
        house = House(
            tokens=tokens,
            audit=audit,
            capabilities=lambda: CAPABILITIES,
            state=lambda: _state(receiver, certificates, begin_s),
            requests_per_minute=options.settings.hub_requests_per_minute,
        )
        expose(house.registry, "stallscope_hub", receiver.numbers)
        expose(house.registry, "stallscope_hub", lambda: asdict(standing.numbers))
        expose(house.registry, "stallscope_hub", lambda: {"uptime_seconds": time.monotonic() - begin_s})
        # Addresses first: nothing is served before all of them are ours.
        api = stack.enter_context(bound(options.api, "--api"))
        http = stack.enter_context(bound(options.otlp_http, "--otlp-http"))
        credentials = certificates.grpc() if certificates else None
        grpc, grpc_port_number = _grpc_server(receiver, options.otlp_grpc, credentials)
        parts, lifespan = stack.enter_context(front(store, rates.load(options.settings.rates)))
        app = create_app(parts, house=house, lifespan=lifespan)
        grpc.start()
        stack.callback(lambda: grpc.stop(_GRACE_S).wait())
        served = [
            stack.enter_context(_served(http_port.app(receiver), http, certificates, "otlp-http")),
            stack.enter_context(_served(app, api, for_api, "api")),
        ]
        ports = Ports(grpc_port_number, *(one.port for one in served))
        _announce(out, options, ports, tokens)
        yield ports


def _streams(settings: Settings) -> Callable[[], Stream]:
    """What makes the stream of a cluster, with the limits and the price of the settings."""
    limits, price = thresholds(settings), settings.usd_per_gpu_hour
    return lambda: Stream(limits=limits, usd_per_gpu_hour=price)


def _authenticate(tokens: Tokens, audit: AuditLog) -> Callable[[Mapping[str, str]], Identity]:
    """Who sends: looked up in the tokens; whoever may not is written down."""

    def authenticate(headers: Mapping[str, str]) -> Identity:
        try:
            who = tokens.identity(headers.get("authorization"))
        except NotAuthenticated as error:
            audit.info("refused", port="otlp", status=error.http_status, reason=str(error))
            raise
        try:
            who.require("ingest")
        except NotAllowed as error:
            told = {"tenant": who.tenant, "token_id": who.token_id, "reason": str(error)}
            audit.info("refused", port="otlp", status=error.http_status, **told)
            raise
        return who

    return authenticate


def _state(receiver: Receiver, certificates: Certificates | None, begin_s: float) -> dict[str, object]:
    """What /api/v1/health tells who has a token."""
    return {
        "uptime_s": round(time.monotonic() - begin_s, 1),
        "tls": "none" if certificates is None else certificates.trouble or "good",
        "numbers": receiver.numbers(),
    }


def _grpc_server(receiver: Receiver, text: str, credentials: Any) -> tuple[Any, int]:
    """The gRPC server, not started, and its port. Raises BadInput when the address is not to be had."""
    host, port = address(text, "--otlp-grpc")
    if not host:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    told = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return grpc_port.server(receiver, told, credentials=credentials)
    except OSError as error:
        raise BadInput(f"--otlp-grpc: cannot listen at {text}: choose another address") from error


@contextmanager
def _served(
    app: Any, listener: socket.socket, certificates: Certificates | None, name: str
) -> Iterator[Listening]:
    context = certificates.context() if certificates else None
    server = Listening(app, listener, context=context, name=name)
    try:
        yield server
    finally:
        server.stop()


def _as_many_files_as_allowed() -> None:
    """A connection is a file: the soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(out: TextIO, options: Options, ports: Ports, tokens: Tokens) -> None:
    scheme = "https" if options.tls else "http"
    if not options.tls:
        _say(out, "INSECURE: no TLS; tokens and data travel in clear text")
    if not tokens.listed():
        _say(
            out,
            "no token yet, so nobody can send or ask: "
            f"stallscope hub token create --db {options.db} --scope ingest",
        )
    _say(
        out,
        f"ready: OTLP over gRPC at port {ports.otlp_grpc}, over HTTP at {ports.otlp_http}; "
        f"{scheme} API at {ports.api}; data in {options.db}; Ctrl-C ends it",
    )


def _say(out: TextIO, text: str) -> None:
    with suppress(OSError):  # nobody reads any more: the hub goes on
        print(f"stallscope hub: {text}", file=out, flush=True)
