"""The API of one agent: its node trace for `query|explain|export --nodes` and for assistants.

It runs in a separate process that reads the trace and never writes to it. The agent in the job stays small, and no
client can slow it down. The layers are the hub's: bearer, audit, rate limit, body limit.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from stallscope.ending import set_by_signals
from stallscope.errors import BadInput, StallscopeError
from stallscope.query.sql import Limits, ask
from stallscope.query.wire_format import packed
from stallscope.serve.app import AppContext, create_app
from stallscope.serve.audit import AuditLog
from stallscope.serve.node_files import NodeFiles, prepare_tls, prepare_token
from stallscope.serve.server import RunningServer, address, bound
from stallscope.serve.tls import Certificates
from stallscope.serve.tokens import Identity, Tokens
from stallscope.store import node as store

MAX_ROWS = 1_000_000
MAX_TIMEOUT_S = 300.0
_AT_ONCE = 4
"""Queries that run at the same time; further queries wait."""

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")

_RENEWAL_CHECK_S = 3600.0
_COMPRESSED_FROM_BYTES = 2000


@dataclass(frozen=True)
class Clocks:
    """This machine's clocks, ns."""

    monotonic_ns: Callable[[], int] = time.monotonic_ns
    wall_ns: Callable[[], int] = time.time_ns


@dataclass(frozen=True, kw_only=True)
class Options:
    """Served trace and address. files: folder of certificate and token; client_ca: clients must show a certificate
    of this authority and need no token. has_tls: False only when the user disabled TLS.
    """

    db: Path
    listen: str
    node: str
    files: Path
    client_ca: Path | None = None
    has_tls: bool = True
    clocks: Clocks = field(default_factory=Clocks)


class QueryBody(BaseModel):
    """The body of a query."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sql: Annotated[str, Field(max_length=100_000)]
    max_rows: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 1000
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] = 10.0
    since_ns: Annotated[int | None, Field(ge=1)] = None


class ByCertificate:
    """Replaces tokens where TLS has already verified the client's certificate."""

    def identity(self, authorization: str | None) -> Identity:
        """The identity of every client: TLS has verified a certificate of the authority."""
        return Identity("default", frozenset({"read", "sql"}), "certificate")


def routes(options: Options) -> list[BaseRoute]:
    """The routes of a node."""
    free = asyncio.Semaphore(_AT_ONCE)
    boot_id = _BOOT_FILE.read_text().strip() if _BOOT_FILE.exists() else ""

    async def worked(work: Callable[[], Any]) -> Any:
        async with free:
            return await asyncio.to_thread(work)

    async def clock(request: Request) -> Response:
        """The two clocks, one read between two reads of the other; the error is half the time of the reads."""
        before_ns = options.clocks.monotonic_ns()
        wall_ns = options.clocks.wall_ns()
        after_ns = options.clocks.monotonic_ns()
        reading = {
            "node": options.node,
            "wall_ns": wall_ns,
            "monotonic_ns": (before_ns + after_ns) // 2,
            "error_ns": (after_ns - before_ns) // 2,
            "boot_id": boot_id,
        }
        return JSONResponse(reading)

    async def query(request: Request) -> Response:
        request.state.identity.require("sql")
        body = await _body(request)
        request.state.noted["sql"] = body.sql[:500]
        return JSONResponse(await worked(lambda: _answer(options.db, body)))

    async def trace(request: Request) -> Response:
        request.state.identity.require("read")
        since_ns = _whole(request.query_params.get("since_ns"))
        content = await worked(lambda: packed(store.read(options.db, since_ns)))
        return Response(content, media_type="application/octet-stream")

    return [
        Route("/api/v1/node/clock", clock),
        Route("/api/v1/node/query", query, methods=["POST"]),
        Route("/api/v1/node/trace", trace),
    ]


async def _body(request: Request) -> QueryBody:
    try:
        return QueryBody.model_validate_json(await request.body())
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadInput(f"{where}: {first['msg']}") from error


def _whole(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**63):
        raise BadInput(f"since_ns: {text[:40]!r} is not a number of nanoseconds")
    return int(text)


def _answer(db: Path, body: QueryBody) -> dict[str, Any]:
    """Columns and rows, and the machine names in the trace by node number."""
    limits = Limits(max_rows=body.max_rows, timeout_s=body.timeout_s)
    result = ask(db, body.sql, limits=limits, since_ns=body.since_ns)
    names = ask(db, "SELECT node, name FROM nodes").rows
    return {
        "columns": result.columns,
        "rows": [[v.hex() if isinstance(v, bytes) else v for v in row] for row in result.rows],
        "is_cut": result.is_cut,
        "nodes": dict(cast("list[tuple[int, str]]", names)),
    }


def application(
    options: Options,
    audit: AuditLog,
    *,
    parts: list[BaseRoute] | None = None,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> ASGIApp:
    """The application. parts: additional routes, such as the MCP routes; lifespan: runs while they are served."""
    tokens = ByCertificate() if options.client_ca else NodeFiles(options.files).tokens()
    context = AppContext(
        tokens=cast(Tokens, tokens),
        audit=audit,
        capabilities=lambda: {"node": options.node},
        state=lambda: _state(options),
    )
    app = create_app([*routes(options), *(parts or [])], context=context, lifespan=lifespan)
    return GZipMiddleware(app, minimum_size=_COMPRESSED_FROM_BYTES)


def _state(options: Options) -> Mapping[str, object]:
    try:
        size = options.db.stat().st_size
    except OSError as error:
        return {"node": options.node, "trace": f"cannot be read: {error.strerror}"}
    return {"node": options.node, "trace_bytes": size}


def serve(
    options: Options,
    *,
    announce: Callable[[str], None],
    stop: threading.Event | None = None,
    parts: list[BaseRoute] | None = None,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, or `stop` is set.

    parts, lifespan: as in application(). Raises, before anything is written or listens, NotFound, BadTrace or
    NewerSchema for the trace; BadInput, StorageFailed.
    """
    with store.reading(options.db):
        pass
    host, _ = address(options.listen, "--listen")
    files = NodeFiles(options.files)
    if options.has_tls:
        prepare_tls(files, [host] if host not in ("", "0.0.0.0", "::") else [])
    if not options.client_ca:
        prepare_token(files)
    certificates = Certificates(files.tls(options.client_ca)) if options.has_tls else None
    audit = AuditLog(options.files / "audit.jsonl")
    listener = bound(options.listen, "--listen")
    context = certificates.context() if certificates else None
    if context:
        import ssl

        context.minimum_version = ssl.TLSVersion.TLSv1_3
    app = application(options, audit, parts=parts, lifespan=lifespan)
    listening = RunningServer(app, listener, context=context, name="node-api")
    try:
        announce(_start_message(options, listening.port, files))
        with set_by_signals(stop or threading.Event()) as stop_event:
            _until_stopped(options, files, host, stop=stop_event)
    finally:
        listening.stop()
        audit.close()


def _until_stopped(options: Options, files: NodeFiles, host: str, *, stop: threading.Event) -> None:
    """Check hourly whether the certificate is due for renewal; the server picks up the new certificate by itself."""
    while not stop.wait(_RENEWAL_CHECK_S):
        if options.has_tls:
            try:
                prepare_tls(files, [host] if host not in ("", "0.0.0.0", "::") else [])
            except StallscopeError:
                continue  # the old certificate is valid for weeks; the next check is in an hour


def _start_message(options: Options, port: int, files: NodeFiles) -> str:
    scheme = "https" if options.has_tls else "http"
    host = options.listen.rpartition(":")[0] or "this machine"
    with_what = "a client certificate" if options.client_ca else f"the token in {files.token}"
    trust = f", --ca-cert {files.ca}" if options.has_tls else ""
    return f"serving {options.db} at {scheme}://{host}:{port} for {with_what}{trust}"
