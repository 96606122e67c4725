"""Sign-in through an OpenID Connect provider: authorization code with PKCE, a nonce, and a state bound to the browser.

The provider's users get a session in one tenant: a fixed tenant, or the tenant that a claim of the user names.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from stallscope.errors import BadInput, NotAllowed, NotAuthenticated, Unreachable
from stallscope.serve.server import is_loopback
from stallscope.serve.tokens import Identity, checked_tenant

_PATIENCE_S = 600.0
_TIMEOUT_S = 10.0
_MAX_PENDING = 1_000
_DISCOVERY_S = 3600.0
_LEEWAY_S = 60
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]


@dataclass(frozen=True, kw_only=True)
class ProviderOptions:
    """issuer: its address. redirect_uri: the hub's /oidc/callback as browsers see it.

    tenant_claim: the claim that names a user's tenant; "" puts all users into `tenant`.
    """

    issuer: str
    client_id: str
    client_secret: str
    redirect_uri: str
    tenant: str = "default"
    tenant_claim: str = ""
    scopes: tuple[str, ...] = ("read", "sql")


@dataclass(frozen=True)
class _Pending:
    nonce: str
    verifier: str
    until_s: float


@dataclass
class IdentityProvider:
    """One provider. Its endpoints and keys are read when a user signs in, and kept for an hour."""

    options: ProviderOptions
    clock_s: Callable[[], float] = time.monotonic
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _about: Mapping[str, Any] = field(default_factory=dict)
    _read_s: float = float("-inf")

    def __post_init__(self) -> None:
        parts = urlsplit(self.options.issuer)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise BadInput(f"hub_oidc_issuer is {self.options.issuer!r}: give an https:// address")

    async def start(self) -> tuple[str, str]:
        """The address for the browser, and the state to bind to it. Raises Unreachable."""
        about = await self._discovered()
        nonce, verifier = secrets.token_urlsafe(24), secrets.token_urlsafe(48)
        async with self._client() as client:
            url, state = client.create_authorization_url(
                about["authorization_endpoint"], code_verifier=verifier, nonce=nonce
            )
        now_s = self.clock_s()
        self._pending = {key: each for key, each in self._pending.items() if each.until_s > now_s}
        if len(self._pending) >= _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[state] = _Pending(nonce, verifier, now_s + _PATIENCE_S)
        return url, state

    async def finish(self, url: str, state: str, bound_state: str) -> Identity:
        """The user's identity after the provider's redirect to `url`.

        state: of the redirect; bound_state: that the browser kept. Raises NotAuthenticated, NotAllowed, Unreachable.
        """
        pending = (
            self._pending.pop(state, None) if state and secrets.compare_digest(state, bound_state) else None
        )
        if pending is None or pending.until_s <= self.clock_s():
            raise NotAuthenticated("the sign-in has expired, or another browser began it; sign in again")
        about = await self._discovered()
        claims = await self._claims(about, url, pending)
        user = str(claims["sub"])
        return Identity(self._tenant(claims), frozenset(self.options.scopes), f"oidc:{user[:60]}")

    async def _claims(self, about: Mapping[str, Any], url: str, pending: _Pending) -> Mapping[str, Any]:
        """The verified claims of the user. Raises NotAuthenticated, Unreachable."""
        import httpx
        from authlib.integrations.base_client.errors import OAuthError
        from joserfc import jwt
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        try:
            async with self._client() as client:
                answer = await client.fetch_token(
                    about["token_endpoint"], authorization_response=url, code_verifier=pending.verifier
                )
                keys = (await client.request("GET", about["jwks_uri"], withhold_token=True)).json()
            token = jwt.decode(answer["id_token"], KeySet.import_key_set(keys), algorithms=_ALGORITHMS)
            jwt.JWTClaimsRegistry(
                leeway=_LEEWAY_S,
                iss={"essential": True, "value": about["issuer"]},
                aud={"essential": True, "value": self.options.client_id},
                nonce={"essential": True, "value": pending.nonce},
                exp={"essential": True},
                sub={"essential": True},
            ).validate(token.claims)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"the identity provider does not answer ({error}); sign in again later"
            ) from error
        except (OAuthError, JoseError, ValueError, KeyError, TypeError) as error:
            raise NotAuthenticated(
                f"the identity provider's answer is not valid ({type(error).__name__}); sign in again"
            ) from error
        return token.claims

    def _tenant(self, claims: Mapping[str, Any]) -> str:
        if not self.options.tenant_claim:
            return self.options.tenant
        tenant = claims.get(self.options.tenant_claim)
        if not isinstance(tenant, str):
            raise NotAllowed(
                f"the user has no claim {self.options.tenant_claim!r}; let the identity provider set it to a tenant"
            )
        return checked_tenant(tenant)

    async def _discovered(self) -> Mapping[str, Any]:
        """The provider's own description. Raises Unreachable."""
        import httpx

        if self.clock_s() - self._read_s < _DISCOVERY_S:
            return self._about
        address = self.options.issuer.rstrip("/") + "/.well-known/openid-configuration"
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
                about = (await client.get(address)).raise_for_status().json()
            if about["issuer"].rstrip("/") != self.options.issuer.rstrip("/"):
                raise Unreachable(f"{address} describes another issuer; correct hub_oidc_issuer")
            _ = about["authorization_endpoint"], about["token_endpoint"], about["jwks_uri"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise Unreachable(
                f"the identity provider does not answer at {address} ({error}); check hub_oidc_issuer"
            ) from error
        self._about, self._read_s = about, self.clock_s()
        return self._about

    def _client(self) -> Any:
        from authlib.integrations.httpx_client import AsyncOAuth2Client

        return AsyncOAuth2Client(
            client_id=self.options.client_id,
            client_secret=self.options.client_secret or None,
            token_endpoint_auth_method="client_secret_basic" if self.options.client_secret else "none",
            redirect_uri=self.options.redirect_uri,
            scope="openid",
            code_challenge_method="S256",
            timeout=_TIMEOUT_S,
        )
