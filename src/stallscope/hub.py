"""The hub: store, receivers, and the application that answers. Wiring and shutdown.

Certificates, tokens, the folder and the addresses are checked before anything listens.
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
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from stallscope import rates, shared_hub
from stallscope.alerts import service as alerts
from stallscope.alerts.config import load as load_alerts
from stallscope.alerts.state import AlertState, state_path
from stallscope.continuous import BacklogLimits, ContinuousDiagnosis
from stallscope.diagnose import Retention, Stream, thresholds_of
from stallscope.ending import set_by_signals
from stallscope.errors import BadInput, StallscopeError
from stallscope.page.identity_provider import IdentityProvider, ProviderOptions
from stallscope.page.page import is_open, opened
from stallscope.page.sessions import FILE_NAME as SESSIONS_FILE
from stallscope.page.sessions import Sessions
from stallscope.page.sign_in import SignIn
from stallscope.receive import grpc_port, http_port
from stallscope.receive.receiver import CAPABILITIES, Audit, Receiver, RequestLimits
from stallscope.serve import alerts_api, shared_api
from stallscope.serve.app import AppContext, create_app
from stallscope.serve.audit import FILE_NAME as AUDIT_FILE
from stallscope.serve.audit import AuditLog
from stallscope.serve.hub_api import front
from stallscope.serve.hub_metrics import expose, expose_slots
from stallscope.serve.refusals import Refusals
from stallscope.serve.server import RunningServer, address, bound
from stallscope.serve.sql.workers import QueryLimits
from stallscope.serve.tls import Certificates, Files
from stallscope.serve.tokens import FILE_NAME as TOKENS_FILE
from stallscope.serve.tokens import Identity, Tokens, checked_tenant
from stallscope.settings import Settings
from stallscope.shared_hub import SlotDiagnoses
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.memory_size import choose_arrow_pool, default_bytes
from stallscope.store.hub.store import HubStore
from stallscope.store.hub.store_protocol import Store

_GRACE_S = 5.0
_TOKENS_RECHECK_S = 0.5
"""A system call for each request would cost a hub with many small requests 9 % of its time."""

_MIN_MEMORY = 500_000_000
_MAX_PROCESSES = 8
_MAX_STRAGGLERS = 20
_BYTES_A_ROW = 1_600
"""A collective in a stream: 268 bytes, and 813 in the arrays of an evaluation, by measurement. The rest is for rows
that arrive before the evaluation, and for the process itself.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Folder and listen addresses. tls: None is clear text."""

    db: Path
    otlp_grpc: str = ":4317"
    otlp_http: str = ":4318"
    api: str = ":8081"
    tls: Files | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Ports:
    """The listen ports of a running hub."""

    otlp_grpc: int
    otlp_http: int
    api: int


def run(options: Options, *, out: TextIO = sys.stderr) -> None:
    """Serve until SIGINT or SIGTERM; then stop receiving, commit received data, and return.

    Raises BadInput, StorageFailed, NewerSchema before anything listens.
    """
    choose_arrow_pool()
    os.umask(0o077)  # new files of the engine, like the write-ahead log, are private from the first byte on
    stop = threading.Event()
    with set_by_signals(stop), started(options, out=out):
        stop.wait()
        _print_line(out, "ending: committing received data")
    _print_line(out, "ended")


@contextmanager
def started(options: Options, *, out: TextIO = sys.stderr) -> Iterator[Ports]:
    """A hub that serves inside the with block. Raises BadInput, StorageFailed, NewerSchema."""
    # Readers have a token; only senders need a certificate.
    certificates = Certificates(options.tls) if options.tls else None
    for_api = Certificates(replace(options.tls, client_ca=None)) if options.tls else None
    _as_many_files_as_allowed()
    begin_s = time.monotonic()
    alert_config = load_alerts(options.settings.alerts) if options.settings.alerts else None
    with ExitStack() as stack:
        memory = _memory(options.settings)
        limits = Limits.within(
            memory,
            max_age_s=options.settings.hub_max_age_s,
            owner_max_age_s=options.settings.owner_max_age_s or None,
        )
        streams = _streams(options.settings, memory)
        store: Store
        diagnosis: ContinuousDiagnosis | SlotDiagnoses
        shared = shared_hub.opened(options.settings, options.db, limits, streams, n_processes=_n_processes())
        if shared is None:
            store = stack.enter_context(closing(HubStore.open(options.db, limits)))
            diagnosis = stack.enter_context(
                closing(
                    ContinuousDiagnosis(
                        store,
                        streams,
                        bounds=BacklogLimits.within(memory // 4 // _n_processes()),
                        n_processes=_n_processes(),
                    )
                )
            )
        else:
            store, diagnosis = stack.enter_context(closing(shared)).store, shared.diagnosis
        tokens = Tokens(
            options.db / TOKENS_FILE, recheck_s=_TOKENS_RECHECK_S
        )  # of all hubs of a shared store
        alert_state = AlertState.renewed_if_damaged(state_path(options.db))
        is_raising = shared.is_first if shared else lambda: True  # only one of several hubs raises alerts
        raising = stack.enter_context(
            closing(alerts.of_hub(store, alert_state, alert_config, is_active=is_raising))
        )
        audit = stack.enter_context(closing(AuditLog(options.db / AUDIT_FILE)))
        refusals = stack.enter_context(closing(Refusals(audit)))
        receiver = Receiver(
            store,
            _authenticate(tokens),
            bounds=RequestLimits.within(memory),
            audit=_audit_of(audit, refusals),
            owner_of=shared.store.ingest_of if shared else None,
        )
        sessions = Sessions(options.db / SESSIONS_FILE, tokens)
        provider = _provider(options.settings)
        sign_in = SignIn(tokens, sessions, is_tls=options.tls is not None, provider=provider)
        context = AppContext(
            tokens=tokens,
            audit=audit,
            refusals=refusals,
            capabilities=lambda: CAPABILITIES,
            state=lambda: _state(store, certificates, begin_s) | (shared.store.away() if shared else {}),
            admin_state=lambda: {"numbers": receiver.numbers()},
            requests_per_minute=options.settings.hub_requests_per_minute,
            session=sign_in.identity,
            is_open=is_open,
        )
        expose(context.registry, "stallscope_hub", receiver.numbers)
        expose(context.registry, "stallscope_hub", lambda: asdict(diagnosis.numbers))
        expose(context.registry, "stallscope_hub", raising.numbers)
        if shared:
            expose(context.registry, "stallscope_hub", shared.store.numbers)
            expose_slots(context.registry, "stallscope_hub_slot", shared.slot_numbers)
        expose(context.registry, "stallscope_hub", lambda: {"uptime_seconds": time.monotonic() - begin_s})
        # Bind all addresses before serving on any.
        api = stack.enter_context(bound(options.api, "--api"))
        http = stack.enter_context(bound(options.otlp_http, "--otlp-http"))
        credentials = certificates.grpc() if certificates else None
        grpc = _grpc_server(receiver, options.otlp_grpc, credentials)
        page = stack.enter_context(
            opened(
                store,
                sign_in,
                confirmed_ns=diagnosis.confirmed_ns,
                health=lambda identity: {
                    **_health(
                        identity, receiver, diagnosis, certificates, caveat=shared.caveat() if shared else ""
                    ),
                    "otlp_grpc_port": grpc.port,
                },
            )
        )
        parts, lifespan = stack.enter_context(
            front(store, rates.load(options.settings.rates), limits=QueryLimits.within(memory))
        )
        routes = [
            *parts,
            *alerts_api.routes(alert_state, has_receivers=alert_config is not None),
            *page.routes,
            *(shared_api.routes(shared.status) if shared else ()),
        ]
        app = create_app(routes, context=context, lifespan=lifespan)
        grpc.start()
        stack.callback(lambda: grpc.stop(_GRACE_S))
        served = [
            stack.enter_context(_served(http_port.app(receiver), http, certificates, "otlp-http")),
            stack.enter_context(_served(app, api, for_api, "api")),
        ]
        stack.callback(page.stop)
        ports = Ports(grpc.port, *(entry.port for entry in served))
        _announce(out, options, ports, tokens, certificates)
        if shared:
            stack.callback(shared.store.drain)  # first of all: the ports forward what still arrives
        yield ports


def _memory(settings: Settings) -> int:
    """The memory limit of the hub's processes together. Raises BadInput for less than they need without rows."""
    wanted = settings.hub_memory_bytes
    if wanted is not None and wanted < _MIN_MEMORY:
        raise BadInput(f"hub_memory_bytes is {wanted:,}: a hub needs {_MIN_MEMORY:,} or more")
    return wanted or default_bytes()


def _streams(settings: Settings, memory_bytes: int) -> Callable[[], Stream]:
    """Makes the stream of a cluster, with the limits and the price of the settings, and its share of the memory."""
    max_rows = memory_bytes // 4 // _n_processes() // _BYTES_A_ROW
    retention = Retention(all_rows=min(max_rows, Retention.all_rows))
    return partial(
        Stream,
        limits=thresholds_of(settings),
        usd_per_gpu_hour=settings.usd_per_gpu_hour,
        retention=retention,
    )


def _n_processes() -> int:
    """The number of processes of the diagnosis: one per core."""
    return min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)


def _authenticate(tokens: Tokens) -> Callable[[Mapping[str, str]], Identity]:
    return lambda headers: tokens.identity(headers.get("authorization"))


def _audit_of(audit: AuditLog, refusals: Refusals) -> Audit:
    """Writes refusals of the OTLP ports into the audit log: the first of each peer in a minute, and a summary."""

    def refused(client: str, error: StallscopeError) -> None:
        if refusals.add(client, None, reason=f"status {error.http_status}"):
            audit.info("refused", port="otlp", client=client, status=error.http_status, reason=str(error))

    return refused


def _state(store: Store, certificates: Certificates | None, begin_s: float) -> dict[str, object]:
    """The part of /api/v1/health that needs a token."""
    return {
        "uptime_s": round(time.monotonic() - begin_s, 1),
        "n_damaged_segments": len(store.damage.unreadable()),
        "n_lost_log_tails": len(store.damage.gaps),
        "tls": "none" if certificates is None else certificates.warning() or "good",
    }


def _health(
    identity: Identity,
    receiver: Receiver,
    diagnosis: ContinuousDiagnosis | SlotDiagnoses,
    certificates: Certificates | None,
    *,
    caveat: str,
) -> dict[str, object]:
    """The state of the hub on its page; numbers over all tenants only for tokens with the scope admin."""
    state: dict[str, object] = {
        "tls": "none" if certificates is None else certificates.warning() or "good",
        "lag_s": round(diagnosis.numbers.diagnosis_lag_s, 1),
        "nodes_reporting": receiver.cohorts.n_nodes(identity.tenant),
        "stragglers": receiver.cohorts.stragglers(identity.tenant)[:_MAX_STRAGGLERS],
    }
    if caveat:
        state["caveat"] = caveat
    if "admin" in identity.scopes:
        numbers = receiver.numbers()
        names = ("queue_rows", "batches_refused", "rows_stored")
        state |= {name: numbers[name] for name in names if name in numbers}
        state["rows_not_examined"] = diagnosis.numbers.diagnosis_rows_left_out
    return state


def _provider(settings: Settings) -> IdentityProvider | None:
    """The identity provider of the settings. Raises BadInput for incomplete settings."""
    if not settings.hub_oidc_issuer:
        return None
    for name in ("hub_oidc_client_id", "hub_public_url"):
        if not getattr(settings, name):
            raise BadInput(f"hub_oidc_issuer needs {name}; set it in the settings file")
    scopes = tuple(scope.strip() for scope in settings.hub_oidc_scopes.split(","))
    if "read" not in scopes or not set(scopes) <= {"read", "sql"}:
        raise BadInput(f"hub_oidc_scopes is {settings.hub_oidc_scopes!r}; give read, or read,sql")
    secret_file = settings.hub_oidc_secret_file
    try:
        secret = secret_file.read_text().strip() if secret_file else ""
    except OSError as error:
        raise BadInput(f"hub_oidc_secret_file: cannot read {secret_file} ({error.strerror})") from error
    return IdentityProvider(
        ProviderOptions(
            issuer=settings.hub_oidc_issuer,
            client_id=settings.hub_oidc_client_id,
            client_secret=secret,
            redirect_uri=settings.hub_public_url.rstrip("/") + "/oidc/callback",
            tenant=checked_tenant(settings.hub_oidc_tenant),
            tenant_claim=settings.hub_oidc_tenant_claim,
            scopes=scopes,
        )
    )


def _grpc_server(receiver: Receiver, text: str, credentials: Any) -> grpc_port.Server:
    """The gRPC server, not started. Raises BadInput for an unavailable address."""
    host, port = address(text, "--otlp-grpc")
    if not host:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    address_text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return grpc_port.Server(receiver, address_text, credentials=credentials)
    except OSError as error:
        raise BadInput(f"--otlp-grpc: cannot listen at {text}: choose another address") from error


@contextmanager
def _served(
    app: Any, listener: socket.socket, certificates: Certificates | None, name: str
) -> Iterator[RunningServer]:
    context = certificates.context() if certificates else None
    server = RunningServer(app, listener, context=context, name=name)
    try:
        yield server
    finally:
        server.stop()


def _as_many_files_as_allowed() -> None:
    """A connection uses a file descriptor: the soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(
    out: TextIO, options: Options, ports: Ports, tokens: Tokens, certificates: Certificates | None
) -> None:
    scheme = "https" if options.tls else "http"
    content = "cache" if options.settings.hub_shared else "data"
    if not options.tls:
        _print_line(out, "INSECURE: no TLS; tokens and data travel in clear text")
    if certificates and (warning := certificates.warning()):
        _print_line(out, f"WARNING: {warning}")
    if not tokens.listed():
        _print_line(
            out,
            "no token yet, so that no client can send or query: "
            f"stallscope hub token create --db {options.db} --scope ingest",
        )
    _print_line(
        out,
        f"ready: OTLP over gRPC at port {ports.otlp_grpc}, over HTTP at {ports.otlp_http}; "
        f"{scheme} API at {ports.api}; {content} in {options.db}; Ctrl-C ends it",
    )


def _print_line(out: TextIO, text: str) -> None:
    with suppress(OSError):  # the reader is closed: the hub continues
        print(f"stallscope hub: {text}", file=out, flush=True)
