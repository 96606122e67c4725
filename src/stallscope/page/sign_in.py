"""Sign-in and sign-out: a token, an identity provider, a share link, or the one-time link of a dashboard."""

import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from stallscope.errors import BadInput, NotAllowed, NotAuthenticated
from stallscope.page.assets import HEADERS
from stallscope.page.http_messages import reader
from stallscope.page.identity_provider import IdentityProvider
from stallscope.page.sessions import MAX_SHARE_S, SESSION_S, Sessions, check_origin, cookie_of
from stallscope.serve.tokens import Identity, Tokens, bearer

if TYPE_CHECKING:
    from starlette.types import Scope

Endpoint = Callable[[Request], Awaitable[Response]]

_STATE_COOKIE = "stallscope_sign_in"
_STATE_S = 600
_MIN_SHARE_S = 60.0


@dataclass
class SignIn:
    """The sign-in of one server. is_tls: cookies are Secure, and their names have the prefix __Host-.

    once: the secret of a one-time link, which signs in as `local`.
    """

    tokens: Tokens
    sessions: Sessions
    is_tls: bool
    provider: IdentityProvider | None = None
    once: str = ""
    local: Identity | None = None
    _is_used: bool = field(default=False)

    @property
    def cookie(self) -> str:
        return "__Host-stallscope" if self.is_tls else "stallscope"

    def ways(self) -> tuple[str, ...]:
        """The ways to sign in that the page offers."""
        if self.local is not None:
            return ()
        return ("token", "oidc") if self.provider else ("token",)

    def identity(self, scope: "Scope") -> Identity | None:
        """The identity of a request with a session; None without one. Raises NotAllowed for a cross-site request."""
        if scope["type"] != "http":
            return None
        identity = self.sessions.identity(cookie_of(scope, self.cookie))
        if identity is not None:
            check_origin(scope)
        return identity

    def routes(self) -> list[BaseRoute]:
        """The routes of sign-in and sharing."""
        return [
            Route("/login", self._login, methods=["POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/oidc/start", self._start, methods=["GET"]),
            Route("/oidc/callback", self._callback, methods=["GET"]),
            Route("/share/{secret}", self._open_share, methods=["GET"]),
            Route("/open/{secret}", self._open_once, methods=["GET"]),
            Route("/api/v1/page/share", self._share, methods=["POST"]),
            Route("/api/v1/page/sign_out_everywhere", self._end_all, methods=["POST"]),
        ]

    async def _login(self, request: Request) -> Response:
        # Without this check another site could sign its visitor in with a token of its own.
        check_origin(request.scope)
        token = (await _body(request)).get("token")
        if not isinstance(token, str):
            raise BadInput('the body has no token; send {"token": "sst_..."}')
        if not token.strip().startswith("sst_"):
            raise NotAuthenticated("the text is not a token; paste a whole token, which begins with sst_")
        identity = self.tokens.identity(bearer(token.strip()))
        identity.require("read")
        request.state.noted["signed_in"] = identity.token_id
        secret = await anyio.to_thread.run_sync(lambda: self.sessions.begin(identity))
        answer = JSONResponse(
            {"tenant": identity.tenant, "scopes": sorted(identity.scopes)}, headers=_headers()
        )
        return self._with_cookie(answer, secret)

    async def _logout(self, request: Request) -> Response:
        secret = cookie_of(request.scope, self.cookie)
        await anyio.to_thread.run_sync(lambda: self.sessions.end(secret))
        answer = JSONResponse({}, headers=_headers())
        answer.delete_cookie(self.cookie, path="/", secure=self.is_tls, httponly=True, samesite="strict")
        return answer

    async def _start(self, request: Request) -> Response:
        if self.provider is None:
            raise BadInput("this hub has no identity provider; set hub_oidc_issuer")
        url, state = await self.provider.start()
        answer = RedirectResponse(url, 302, headers=_headers())
        # Lax: the provider's redirect to the callback is a request from another site.
        answer.set_cookie(
            _STATE_COOKIE,
            state,
            max_age=_STATE_S,
            path="/oidc",
            httponly=True,
            samesite="lax",
            secure=self.is_tls,
        )
        return answer

    async def _callback(self, request: Request) -> Response:
        if self.provider is None:
            raise BadInput("this hub has no identity provider; set hub_oidc_issuer")
        try:
            identity = await self.provider.finish(
                str(request.url),
                request.query_params.get("state", ""),
                cookie_of(request.scope, _STATE_COOKIE),
            )
        except (NotAuthenticated, NotAllowed) as error:
            request.state.noted["sign_in_failed"] = str(error)
            return RedirectResponse("/ui?sign_in=failed", 303, headers=_headers())
        request.state.noted["signed_in"] = identity.token_id
        secret = await anyio.to_thread.run_sync(lambda: self.sessions.begin(identity))
        answer = RedirectResponse("/ui", 303, headers=_headers())
        answer.delete_cookie(_STATE_COOKIE, path="/oidc")
        return self._with_cookie(answer, secret)

    async def _share(self, request: Request) -> Response:
        body = await _body(request)
        key, expires_s = body.get("job"), body.get("expires_s", 86_400)
        if not isinstance(key, str) or not 0 < len(key) <= 600:
            raise BadInput('the body has no job; send {"job": "...", "expires_s": 86400}')
        if isinstance(expires_s, bool) or not isinstance(expires_s, int | float):
            raise BadInput("expires_s is not a number of seconds")
        if not _MIN_SHARE_S <= expires_s <= MAX_SHARE_S:
            raise BadInput(f"expires_s must be {_MIN_SHARE_S:,.0f} to {MAX_SHARE_S:,.0f} seconds")
        identity = reader(request, key)
        request.state.noted["shared"] = key[:200]
        secret = await anyio.to_thread.run_sync(
            lambda: self.sessions.share(identity, key, expires_in_s=float(expires_s))
        )
        return JSONResponse({"path": f"/share/{secret}", "expires_s": expires_s}, headers=_headers())

    async def _open_share(self, request: Request) -> Response:
        secret = request.path_params["secret"][:200]
        session = self.sessions.session(secret)
        if session is None or not session.is_share:
            return RedirectResponse("/ui?sign_in=link_expired", 303, headers=_headers())
        from urllib.parse import urlencode

        answer = RedirectResponse(f"/ui?{urlencode({'job': session.job})}", 303, headers=_headers())
        own = self.sessions.session(cookie_of(request.scope, self.cookie))
        if own is not None and own.tenant == session.tenant and not own.is_share:
            return answer  # a reader who has signed in stays signed in
        left_s = max(1, int(session.expires_at - self.sessions.now_s()))
        return self._with_cookie(answer, secret, max_age_s=left_s)

    async def _open_once(self, request: Request) -> Response:
        """The one-time link of a dashboard."""
        secret = request.path_params["secret"]
        if self.local is None or self._is_used or not secrets.compare_digest(secret, self.once):
            raise NotAuthenticated("the link is no longer valid; start stallscope dashboard again")
        self._is_used = True
        identity = self.local
        session = await anyio.to_thread.run_sync(lambda: self.sessions.begin(identity))
        target = "/ui" + (f"?{request.url.query}" if request.url.query else "")
        return self._with_cookie(RedirectResponse(target, 303, headers=_headers()), session)

    async def _end_all(self, request: Request) -> Response:
        """End all sessions and share links of the tenant."""
        identity: Identity = request.state.identity
        identity.require("admin")
        n = await anyio.to_thread.run_sync(lambda: self.sessions.end_all(identity.tenant))
        return JSONResponse({"n_ended": n}, headers=_headers())

    def _with_cookie(self, answer: Response, secret: str, *, max_age_s: int = int(SESSION_S)) -> Response:
        answer.set_cookie(
            self.cookie,
            secret,
            max_age=max_age_s,
            path="/",
            httponly=True,
            samesite="strict",
            secure=self.is_tls,
        )
        return answer


def _headers() -> dict[str, str]:
    return {**HEADERS, "Cache-Control": "no-store"}


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise BadInput("the request body is not a JSON object")
    return body
