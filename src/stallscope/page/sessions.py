"""Sessions of browsers: a random cookie stands for a token, for a user of an identity provider, or for a share link.

The file of sessions contains hashes only, and it survives a restart of the hub. A session of a token ends with the
token: the token is checked at each request. A share link is a session of its own, with one job and no other scope.
"""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stallscope.errors import NotAllowed, StorageFailed, TooMany
from stallscope.serve.tokens import Identity, Tokens
from stallscope.store import file_modes

if TYPE_CHECKING:
    from starlette.types import Scope

FILE_NAME = "sessions.json"
SESSION_S = 12 * 3600.0
MAX_SHARE_S = 30 * 86_400.0
SHARE_SCOPE = "share"
"""The scope of a share link: the page's own answers about one job. No tool and no SQL accept it."""

_MAX_SESSIONS = 10_000
_MAX_SHARES = 200
_N_BYTES = 32


@dataclass(frozen=True)
class Session:
    """token_id: the token with which the session ends; "" for a user of an identity provider.

    job: the only job of a share link. name: of the user, for the audit log.
    """

    tenant: str
    scopes: tuple[str, ...]
    token_id: str
    expires_at: float
    job: str = ""
    name: str = ""

    @property
    def is_share(self) -> bool:
        return SHARE_SCOPE in self.scopes


class Sessions:
    """The sessions of one hub. Thread-safe."""

    def __init__(self, path: Path | None, tokens: Tokens, *, now_s: Callable[[], float] = time.time):
        """path: the file; None keeps the sessions in memory only. An unreadable file starts without sessions."""
        self._path, self._tokens, self._now_s = path, tokens, now_s
        self._lock = threading.Lock()
        self._sessions = _read(path)

    def begin(self, identity: Identity, *, expires_in_s: float = SESSION_S) -> str:
        """A new session of an identity. Returns its secret, for the cookie. Raises StorageFailed."""
        return self._add(self._session(identity, tuple(sorted(identity.scopes)), expires_in_s))

    def share(self, identity: Identity, job: str, *, expires_in_s: float) -> str:
        """A share link of one job. Returns its secret. Raises NotAllowed, TooMany, StorageFailed."""
        if SHARE_SCOPE in identity.scopes:
            raise NotAllowed("a share link cannot create share links; sign in with a token")
        with self._lock:
            n = sum(1 for each in self._sessions.values() if each.is_share and each.tenant == identity.tenant)
        if n >= _MAX_SHARES:
            raise TooMany(f"the tenant has {n} share links; wait until a link expires")
        return self._add(self._session(identity, (SHARE_SCOPE,), min(expires_in_s, MAX_SHARE_S), job=job))

    def end(self, secret: str) -> None:
        """End a session now; a share link stays valid for its other readers."""
        with self._lock:
            session = self._sessions.get(_hash(secret))
            if session is not None and not session.is_share:
                del self._sessions[_hash(secret)]
                self._write()

    def end_all(self, tenant: str) -> int:
        """End all sessions and share links of a tenant. Returns their number."""
        with self._lock:
            gone = [key for key, session in self._sessions.items() if session.tenant == tenant]
            for key in gone:
                del self._sessions[key]
            self._write()
        return len(gone)

    def session(self, secret: str) -> Session | None:
        """The session of a secret; None where it is unknown, expired, or its token is not valid any more."""
        session = self._sessions.get(_hash(secret)) if secret else None
        if session is None or session.expires_at <= self._now_s():
            return None
        if session.token_id and not self._tokens.is_valid(session.token_id):
            return None
        return session

    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._now_s()

    def identity(self, secret: str) -> Identity | None:
        """The identity of a session."""
        session = self.session(secret)
        if session is None:
            return None
        token_id = session.token_id or session.name
        return Identity(session.tenant, frozenset(session.scopes), token_id, job=session.job)

    def _session(
        self, identity: Identity, scopes: tuple[str, ...], expires_in_s: float, *, job: str = ""
    ) -> Session:
        """A session that ends with the identity's token, if a token is the identity."""
        token_id = identity.token_id if self._tokens.is_valid(identity.token_id) else ""
        end_s = self._now_s() + expires_in_s
        return Session(identity.tenant, scopes, token_id, end_s, job=job, name=identity.token_id)

    def _add(self, session: Session) -> str:
        secret = secrets.token_urlsafe(_N_BYTES)
        with self._lock:
            now_s = self._now_s()
            self._sessions = {key: known for key, known in self._sessions.items() if known.expires_at > now_s}
            if len(self._sessions) >= _MAX_SESSIONS:
                oldest = min(self._sessions, key=lambda key: self._sessions[key].expires_at)
                del self._sessions[oldest]
            self._sessions[_hash(secret)] = session
            self._write()
        return secret

    def _write(self) -> None:
        if self._path is None:
            return
        rows = {key: asdict(session) for key, session in self._sessions.items()}
        try:
            file_modes.replace(self._path, json.dumps(rows).encode())
        except OSError as error:
            raise StorageFailed(
                f"the sessions in {self._path} cannot be written ({error.strerror})"
            ) from error


def cookie_of(scope: "Scope", name: str) -> str:
    """The value of a cookie of a request; "" if it is missing."""
    for key, value in scope["headers"]:
        if key == b"cookie":
            for part in value.decode("latin-1").split(";"):
                cookie, _, content = part.strip().partition("=")
                if cookie == name:
                    return str(content)
    return ""


def check_origin(scope: "Scope") -> None:
    """Raises NotAllowed for a request with a cookie that another site caused, unless it only reads.

    A browser sets Sec-Fetch-Site; where it is missing, Origin must be the address of the hub. The body must be JSON,
    which no form of another site can send.
    """
    if scope["method"] in ("GET", "HEAD"):
        return
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    site, origin = headers.get("sec-fetch-site"), headers.get("origin", "")
    own = origin.partition("://")[2] == headers.get("host", "") and origin != ""
    if site != "same-origin" if site is not None else not own:
        raise NotAllowed("the request comes from another site; open the page of this hub and repeat it there")
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise NotAllowed("the request body is not JSON; send Content-Type: application/json")


def _hash(secret: str) -> str:
    # The secret has 32 random bytes, so one round of SHA-256 is enough.
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(path: Path | None) -> dict[str, Session]:
    try:
        rows: Mapping[str, Mapping[str, object]] = json.loads(path.read_text()) if path else {}
        return {
            key: Session(**{**row, "scopes": tuple(row["scopes"])})  # type: ignore[arg-type]
            for key, row in rows.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # every reader signs in again
