"""The hub's HTTP application: the layers that a request passes, and the routes that exist without any tool.

Layers are ASGI functions, outermost first: LAYERS is the list. create_app() adds the routes of tools, SQL and MCP.
After the bearer layer `request.state.identity` is the Identity (None on the open paths without a token). The audit
line includes the fields that a handler puts into `request.state.noted`.
"""

import re
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stallscope import __version__
from stallscope.errors import (
    BadInput,
    NotAllowed,
    NotAuthenticated,
    StallscopeError,
    StorageFailed,
    TooLarge,
    TooMany,
)
from stallscope.serve.audit import AuditLog
from stallscope.serve.capabilities import capabilities
from stallscope.serve.http_errors import INTERNAL, error_body, public_message, refused
from stallscope.serve.refusals import WINDOW_S, Refusals
from stallscope.serve.tokens import Identity, Tokens

API_VERSION = "1.0"
OPEN_PATHS = frozenset({"/api/versions", "/api/v1/health"})
"""Paths that answer without a token. A token sent to them must still be valid."""

_MINUTE_S = 60
_MAX_POLLED = 10_000
_REFUSED = frozenset({401, 429})
"""Statuses that a peer can cause any number of times; the limit per token bounds all other statuses."""


@dataclass(frozen=True, kw_only=True)
class AppContext:
    """Shared context of the layers and the built-in routes. capabilities, state, admin_state: evaluated per request.

    state: for every valid token; admin_state: numbers over all tenants, for tokens with the scope admin.
    session: the identity of a browser's session, None without a valid session; raises NotAllowed. is_open: further
    paths that answer without a token.
    """

    tokens: Tokens
    audit: AuditLog
    capabilities: Callable[[], Mapping[str, object]] = dict
    state: Callable[[], Mapping[str, object]] = dict
    admin_state: Callable[[], Mapping[str, object]] = dict
    refusals: Refusals | None = None
    session: Callable[[Scope], Identity | None] = lambda scope: None
    is_open: Callable[[str], bool] = lambda path: False
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    requests_per_minute: int = 1200
    max_body_bytes: int = 1 << 20


Layer = Callable[[ASGIApp, AppContext], ASGIApp]


def create_app(
    parts: Sequence[BaseRoute] = (),
    *,
    context: AppContext,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> ASGIApp:
    """The application with these routes in addition to the built-in routes. lifespan: runs while the app is served."""
    built_in_routes = [
        Route("/api/versions", _versions(context, capabilities(parts))),
        Route("/api/v1/health", _health(context)),
        Route("/metrics", _metrics(context)),
    ]
    inner = Starlette(
        routes=[*built_in_routes, *parts],
        lifespan=lifespan,
        exception_handlers={
            StallscopeError: _error_response,
            HTTPException: _routing_error,
            Exception: _failed,
        },
    )
    app: ASGIApp = inner
    for layer in reversed(LAYERS):
        app = layer(app, context)
    return app


def peer_limit(app: ASGIApp, context: AppContext) -> ASGIApp:
    """Gives short answers to a peer that is refused repeatedly; the audit log summarizes them (refusals.py).

    A request whose headers state its length twice ends the connection: a proxy in front could parse it differently.
    """

    async def app_with_limit(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        if _header(scope, b"content-length") is not None and _header(scope, b"transfer-encoding") is not None:
            error = BadInput("Content-Length and Transfer-Encoding exclude each other; send only one")
            await refused(error, closes=True)(scope, receive, send)
            return
        peer = (_client(scope), _token_id(context, scope))
        if context.refusals and context.refusals.is_over(*peer):
            context.refusals.add(*peer, reason=f"status {TooMany.http_status}")
            error_now = TooMany("too many of your requests were refused; retry in a minute")
            await refused(error_now, retry_after_s=round(WINDOW_S))(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
                and message["status"] in _REFUSED
                and context.refusals
            ):
                context.refusals.add(*peer, reason=f"status {message['status']}")
            await send(message)

        await app(scope, receive, sending)

    return app_with_limit


def bearer(app: ASGIApp, context: AppContext) -> ASGIApp:
    """Authenticates requests. Refused requests go no further, so this layer writes them to the audit log itself."""

    async def app_with_bearer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["identity"] = None
        header = _header(scope, b"authorization")
        is_open = scope["path"] in OPEN_PATHS or context.is_open(scope["path"])
        try:
            if header is None:
                state["identity"] = context.session(scope)
            if header is not None or (state["identity"] is None and not is_open):
                state["identity"] = context.tokens.identity(header)
        except (NotAllowed, NotAuthenticated, StorageFailed) as error:
            context.audit.info(
                "refused", **_audit_fields(scope), status=error.http_status, reason=public_message(error)
            )
            await refused(error)(scope, receive, send)
            return
        await app(scope, receive, send)

    return app_with_bearer


def audit(app: ASGIApp, context: AppContext) -> ASGIApp:
    """Writes one audit line for each request that the bearer layer admitted, with any outcome.

    The query string is omitted because clients sometimes put secrets there. A handler that clients poll may note
    `repeats_for_s`: then a successful repetition by the same token within this time is only counted.
    """
    last_s: dict[tuple[str, str], float] = {}
    counted = Counter(
        "stallscope_http_requests",
        "Requests answered, by method and status.",
        ["method", "status"],
        registry=context.registry,
    )

    async def app_with_audit(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        begin_s, status, n_bytes = time.monotonic(), 500, 0
        noted: MutableMapping[str, object] = scope["state"].setdefault("noted", {})

        async def sending(message: Message) -> None:
            nonlocal status, n_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                n_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, sending)
        except Exception:  # noqa: BLE001 (_failed has answered the request; this layer only logs it)
            noted["failed"] = traceback.format_exc()
        finally:
            ms = round((time.monotonic() - begin_s) * 1000, 3)
            fields = {**noted, **_audit_fields(scope), "status": status, "ms": ms, "answer_bytes": n_bytes}
            if not _is_repetition(last_s, fields):
                context.audit.info("request", **fields)
            counted.labels(scope["method"], status).inc()

    return app_with_audit


def _is_repetition(last_s: dict[tuple[str, str], float], fields: MutableMapping[str, Any]) -> bool:
    """Whether a polled request needs no line of its own. last_s: time of the last line, by token and path."""
    repeats_for_s = fields.pop("repeats_for_s", None)
    if repeats_for_s is None or fields["status"] != 200:
        return False
    key, now_s = (str(fields["token_id"]), fields["path"]), time.monotonic()
    if now_s - last_s.get(key, float("-inf")) < repeats_for_s:
        return True
    if len(last_s) >= _MAX_POLLED:
        last_s.clear()
    last_s[key] = now_s
    return False


def rate_limit(app: ASGIApp, context: AppContext) -> ASGIApp:
    """Limits requests per minute for each token, and for each address when the request has no token."""
    per_minute = RateLimitItemPerMinute(context.requests_per_minute)
    limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def app_with_rate_limit(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            identity: Identity | None = scope["state"]["identity"]
            key = identity.token_id if identity else f"address {_client(scope)}"
            if not limiter.hit(per_minute, key):
                reset_s = limiter.get_window_stats(per_minute, key).reset_time - time.time()
                error = TooMany(f"more than {context.requests_per_minute} requests a minute; retry later")
                answer = refused(error, retry_after_s=min(max(1, round(reset_s)), _MINUTE_S))
                await answer(scope, receive, send)
                return
        await app(scope, receive, send)

    return app_with_rate_limit


def body_limit(app: ASGIApp, context: AppContext) -> ASGIApp:
    """Refuses a body that is too long, by its announced or its actual length, without reading it to the end."""
    limit = context.max_body_bytes
    error = TooLarge(f"the request body is larger than {limit:,} bytes; send less per request")

    async def app_with_body_limit(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        announced = _header(scope, b"content-length") or "0"
        if not announced.isascii() or not announced.isdigit() or int(announced) > limit:
            await refused(error)(scope, receive, send)
            return
        n_bytes = 0

        async def receiving() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > limit:
                raise error
            return message

        await app(scope, receiving, send)

    return app_with_body_limit


LAYERS: tuple[Layer, ...] = (peer_limit, bearer, audit, rate_limit, body_limit)
"""The layers that a request passes before its handler, in this order."""


def _versions(context: AppContext, surfaces: Mapping[str, bool]) -> Callable[[Request], Awaitable[Response]]:
    async def versions(request: Request) -> Response:
        version_numbers = {"stallscope": major_minor(__version__), "api": API_VERSION}
        return JSONResponse(
            {"versions": version_numbers, "capabilities": {**surfaces, **context.capabilities()}}
        )

    return versions


def _health(context: AppContext) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        if request.state.identity is None:
            return JSONResponse({"alive": True})
        answer = {"alive": True, "version": __version__, **context.state()}
        if "admin" in request.state.identity.scopes:
            answer |= context.admin_state()
        return JSONResponse(answer)

    return health


def _metrics(context: AppContext) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        request.state.identity.require("admin")
        return Response(generate_latest(context.registry), media_type=CONTENT_TYPE_LATEST)

    return metrics


def major_minor(version: str) -> str:
    """The first two numbers of a version. The full version would reveal which known faults a hub has."""
    return ".".join(re.findall(r"\d+", version)[:2])


def _error_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, StallscopeError):
        raise error
    if error.http_status >= 500:
        request.state.noted["failed"] = str(error)
    return refused(error)


def _routing_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    kinds = {404: "not_found", 405: "wrong_method", 413: "too_large"}
    messages = {
        404: f"no resource at {request.url.path}; GET /api/v1/tools/list and /api/v1/openapi.json list the paths",
        405: f"{request.url.path} does not accept {request.method}",
    }
    body = error_body(
        kinds.get(error.status_code, "bad_input"), messages.get(error.status_code, error.detail)
    )
    return JSONResponse(body, error.status_code, dict(error.headers or {}))


def _failed(request: Request, error: Exception) -> Response:
    """Answers an unexpected exception; its cause stays in the audit log."""
    return JSONResponse(error_body(INTERNAL, "the hub failed to answer; its audit log has the reason"), 500)


def _audit_fields(scope: Scope) -> dict[str, Any]:
    """The fields of a request that every audit line has."""
    identity: Identity | None = scope["state"]["identity"]
    return {
        "client": _client(scope),
        "method": scope["method"],
        "path": scope["path"][:200],
        "tenant": identity.tenant if identity else None,
        "token_id": identity.token_id if identity else None,
    }


def _client(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _token_id(context: AppContext, scope: Scope) -> str | None:
    """The id of a valid token or session; None otherwise."""
    header = _header(scope, b"authorization")
    try:
        identity = context.tokens.identity(header) if header else context.session(scope)
    except (NotAllowed, NotAuthenticated, StorageFailed):
        return None
    return identity.token_id if identity else None


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
