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
from stallscope.errors import BadInput, NotAuthenticated, StallscopeError, StorageFailed, TooLarge, TooMany
from stallscope.serve.audit import AuditLog
from stallscope.serve.capabilities import capabilities
from stallscope.serve.http_errors import INTERNAL, error_body, public_message, refused
from stallscope.serve.refusals import WINDOW_S, Refusals
from stallscope.serve.tokens import Identity, Tokens

API_VERSION = "1.0"
OPEN_PATHS = frozenset({"/api/versions", "/api/v1/health"})
"""Paths that answer without a token. A token sent to them must still be valid."""

_MINUTE_S = 60
_REFUSED = frozenset({401, 429})
"""Statuses that a peer can cause any number of times; the limit per token bounds all other statuses."""


@dataclass(frozen=True, kw_only=True)
class House:
    """Shared context of the layers and the built-in routes. capabilities, state, admin_state: evaluated per request.

    state: for every valid token; admin_state: numbers over all tenants, for tokens with the scope admin.
    """

    tokens: Tokens
    audit: AuditLog
    capabilities: Callable[[], Mapping[str, object]] = dict
    state: Callable[[], Mapping[str, object]] = dict
    admin_state: Callable[[], Mapping[str, object]] = dict
    refusals: Refusals | None = None
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    requests_per_minute: int = 1200
    max_body_bytes: int = 1 << 20


Layer = Callable[[ASGIApp, House], ASGIApp]


def create_app(
    parts: Sequence[BaseRoute] = (),
    *,
    house: House,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> ASGIApp:
    """The application with these routes in addition to the built-in routes. lifespan: runs while the app is served."""
    own = [
        Route("/api/versions", _versions(house, capabilities(parts))),
        Route("/api/v1/health", _health(house)),
        Route("/metrics", _metrics(house)),
    ]
    inner = Starlette(
        routes=[*own, *parts],
        lifespan=lifespan,
        exception_handlers={StallscopeError: _told, HTTPException: _told_by_starlette, Exception: _failed},
    )
    app: ASGIApp = inner
    for layer in reversed(LAYERS):
        app = layer(app, house)
    return app


def peer_limit(app: ASGIApp, house: House) -> ASGIApp:
    """Gives short answers to a peer that is refused repeatedly; the audit log summarizes them (refusals.py).

    A request whose headers state its length twice ends the connection: a proxy in front could parse it differently.
    """

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        if _header(scope, b"content-length") is not None and _header(scope, b"transfer-encoding") is not None:
            error = BadInput("Content-Length and Transfer-Encoding exclude each other; send only one")
            await refused(error, closes=True)(scope, receive, send)
            return
        peer = (_client(scope), _token_id(house, _header(scope, b"authorization")))
        if house.refusals and house.refusals.is_over(*peer):
            house.refusals.add(*peer, reason=f"status {TooMany.http_status}")
            error_now = TooMany("too many of your requests were refused; retry in a minute")
            await refused(error_now, retry_after_s=round(WINDOW_S))(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in _REFUSED and house.refusals:
                house.refusals.add(*peer, reason=f"status {message['status']}")
            await send(message)

        await app(scope, receive, sending)

    return asked


def bearer(app: ASGIApp, house: House) -> ASGIApp:
    """Authenticates requests. Refused requests go no further, so this layer writes them to the audit log itself."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["identity"] = None
        header = _header(scope, b"authorization")
        if header is not None or scope["path"] not in OPEN_PATHS:
            try:
                state["identity"] = house.tokens.identity(header)
            except (NotAuthenticated, StorageFailed) as error:
                house.audit.info(
                    "refused", **_about(scope), status=error.http_status, reason=public_message(error)
                )
                await refused(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return asked


def audit(app: ASGIApp, house: House) -> ASGIApp:
    """Writes one audit line for each request that the bearer layer admitted, whatever its outcome.

    The query string is omitted because clients sometimes put secrets there.
    """
    counted = Counter(
        "stallscope_http_requests",
        "Requests answered, by method and status.",
        ["method", "status"],
        registry=house.registry,
    )

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
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
            fields = {**noted, **_about(scope), "status": status, "ms": ms, "answer_bytes": n_bytes}
            house.audit.info("request", **fields)
            counted.labels(scope["method"], status).inc()

    return asked


def rate_limit(app: ASGIApp, house: House) -> ASGIApp:
    """Limits requests per minute for each token, and for each address when the request has no token."""
    per_minute = RateLimitItemPerMinute(house.requests_per_minute)
    limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            who: Identity | None = scope["state"]["identity"]
            key = who.token_id if who else f"address {_client(scope)}"
            if not limiter.hit(per_minute, key):
                reset_s = limiter.get_window_stats(per_minute, key).reset_time - time.time()
                error = TooMany(f"more than {house.requests_per_minute} requests a minute; retry later")
                answer = refused(error, retry_after_s=min(max(1, round(reset_s)), _MINUTE_S))
                await answer(scope, receive, send)
                return
        await app(scope, receive, send)

    return asked


def body_limit(app: ASGIApp, house: House) -> ASGIApp:
    """Refuses a body that is too long, by its announced or its actual length, without reading it to the end."""
    limit = house.max_body_bytes
    error = TooLarge(f"the request body is larger than {limit:,} bytes; send less per request")

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
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

    return asked


LAYERS: tuple[Layer, ...] = (peer_limit, bearer, audit, rate_limit, body_limit)
"""The layers that a request passes before its handler, in this order."""


def _versions(house: House, surfaces: Mapping[str, bool]) -> Callable[[Request], Awaitable[Response]]:
    async def versions(request: Request) -> Response:
        told = {"stallscope": major_minor(__version__), "api": API_VERSION}
        return JSONResponse({"versions": told, "capabilities": {**surfaces, **house.capabilities()}})

    return versions


def _health(house: House) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        if request.state.identity is None:
            return JSONResponse({"alive": True})
        answer = {"alive": True, "version": __version__, **house.state()}
        if "admin" in request.state.identity.scopes:
            answer |= house.admin_state()
        return JSONResponse(answer)

    return health


def _metrics(house: House) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        request.state.identity.require("admin")
        return Response(generate_latest(house.registry), media_type=CONTENT_TYPE_LATEST)

    return metrics


def major_minor(version: str) -> str:
    """The first two numbers of a version. The full version would reveal which known faults a hub has."""
    return ".".join(re.findall(r"\d+", version)[:2])


def _told(request: Request, error: Exception) -> Response:
    if not isinstance(error, StallscopeError):
        raise error
    if error.http_status >= 500:
        request.state.noted["failed"] = str(error)
    return refused(error)


def _told_by_starlette(request: Request, error: Exception) -> Response:
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


def _about(scope: Scope) -> dict[str, Any]:
    """The fields of a request that every audit line has."""
    who: Identity | None = scope["state"]["identity"]
    return {
        "client": _client(scope),
        "method": scope["method"],
        "path": scope["path"][:200],
        "tenant": who.tenant if who else None,
        "token_id": who.token_id if who else None,
    }


def _client(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _token_id(house: House, header: str | None) -> str | None:
    """The id of a valid token; None otherwise."""
    try:
        return house.tokens.identity(header).token_id if header else None
    except (NotAuthenticated, StorageFailed):
        return None


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
