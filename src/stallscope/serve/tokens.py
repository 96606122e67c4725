"""Bearer tokens for the hub, each with a tenant, scopes and an expiry.

The tokens are in a separate file, so that they can be created and revoked while a hub runs. The file is replaced as
a whole, and a running hub reloads it after a change. The file contains only hashes. A token is
`sst_<id>_<secret>`: the id is public and may appear in logs. The secret is 32 random bytes, so one round of SHA-256
is enough: a brute-force attack is infeasible.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stallscope.credentials import ANY_TOKEN, shown_path
from stallscope.errors import (
    BadInput,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    StorageFailed,
    TokensUnreadable,
)
from stallscope.store import file_modes

SCOPES = ("ingest", "read", "sql", "admin")
"""What a token permits: sending events; calling the tools; running SQL; reading the hub's own state."""

_LOG = logging.getLogger(__name__)

FILE_NAME = "tokens.json"
_FORMAT = 1
_TOKEN = re.compile(r"sst_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_NO_TOKEN = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Identity:
    """The client's identity. token_id may be shown and logged. job: the only job of a share link; "" for all jobs."""

    tenant: str
    scopes: frozenset[str]
    token_id: str
    job: str = ""

    def require(self, scope: str) -> None:
        """Raises NotAllowed unless the token has the scope."""
        if scope not in self.scopes:
            raise NotAllowed(
                f"token {self.token_id} lacks the scope {scope!r} (it has {', '.join(sorted(self.scopes))}); "
                f"create a token with: stallscope hub token create --scope {scope}"
            )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One token in the file. Times are seconds since 1970; expires_at, revoked_at: None means never."""

    id: str
    tenant: str
    scopes: tuple[str, ...]
    sha256: str
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None

    def state(self, now_s: float) -> str:
        """valid, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now_s >= self.expires_at else "valid"


class Tokens:
    """The tokens of one hub or agent, as currently in the file. Thread-safe."""

    def __init__(
        self,
        path: Path,
        now_s: Callable[[], float] = time.time,
        *,
        remedy: str = "stallscope hub token create creates a new token",
        recheck_s: float = 0.0,
    ):
        """path: the file; a missing file has no tokens. remedy: for clients with an invalid token. recheck_s: a change
        of a known token, such as its revocation, may take effect this much later.

        Raises StorageFailed when others can write it.
        """
        self.path, self._remedy = path, remedy
        self._now_s, self._recheck_s = now_s, recheck_s
        self._checked_s = -recheck_s
        self._lock = threading.Lock()
        self._state: tuple[int, int, int, int] | None = None
        self._reported: tuple[int, int, int, int] | None = None
        self._entries: dict[str, Entry] = {}
        self._refresh()

    def identity(self, authorization: str | None) -> Identity:
        """The identity of a request. authorization: the value of that header (gRPC: metadata), `Bearer <token>`.

        Raises NotAuthenticated; its message never contains the token.
        """
        if not authorization:
            raise NotAuthenticated("the token is missing; send the header `Authorization: Bearer <token>`")
        scheme, _, token = authorization.partition(" ")
        match = _TOKEN.fullmatch(token.strip()) if scheme.lower() == "bearer" else None
        if not match:
            raise NotAuthenticated(
                "malformed Authorization header, or an incomplete token; send `Authorization: Bearer <token>`"
            )
        if match[1] not in self._entries or time.monotonic() - self._checked_s >= self._recheck_s:
            self._refresh()
        entry = self._entries.get(match[1])
        # Compared even for an unknown id, so that the timing does not reveal which ids exist.
        is_right = hmac.compare_digest(_sha256(match[2]), entry.sha256 if entry else _NO_TOKEN)
        if not entry or not is_right:
            raise NotAuthenticated(f"the token is unknown; {self._remedy}")
        if (state := entry.state(self._now_s())) != "valid":
            raise NotAuthenticated(f"token {entry.id} is {state}; {self._remedy}")
        return Identity(entry.tenant, frozenset(entry.scopes), entry.id)

    def is_valid(self, token_id: str) -> bool:
        """Whether a token exists, and is neither expired nor revoked."""
        self._refresh()
        entry = self._entries.get(token_id)
        return entry is not None and entry.state(self._now_s()) == "valid"

    def listed(self) -> list[Entry]:
        """All entries, oldest first."""
        self._refresh()
        return sorted(self._entries.values(), key=lambda entry: (entry.created_at, entry.id))

    def create(self, scopes: Iterable[str], tenant: str, *, expires_in_s: float | None = None) -> str:
        """Create a token and return it; it is shown only now. Raises BadInput, StorageFailed."""
        wanted = _checked_scopes(scopes)
        checked_tenant(tenant)
        token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        now_s = self._now_s()
        entry = Entry(
            id=token_id,
            tenant=tenant,
            scopes=wanted,
            sha256=_sha256(secret),
            created_at=int(now_s),
            expires_at=None if expires_in_s is None else int(now_s + expires_in_s),
        )
        with self._changing() as entries:
            entries[token_id] = entry
        return f"sst_{token_id}_{secret}"

    def accept(self, token: str, scopes: Iterable[str], tenant: str) -> str:
        """Add a token that was generated elsewhere, and return its id. A known token gets more scopes; it stays
        revoked if it was.

        Raises BadInput, StorageFailed.
        """
        wanted, match = _checked_scopes(scopes), _TOKEN.fullmatch(token)
        if not match:
            raise BadInput("a token has the form sst_<12 hex digits>_<43 letters, digits, '-' or '_'>")
        if not _TENANT.fullmatch(tenant):
            raise BadInput(f"tenant {tenant!r}: use 1 to 63 lower-case letters, digits, '-' or '_'")
        entry = Entry(
            id=match[1], tenant=tenant, scopes=wanted, sha256=_sha256(match[2]), created_at=int(self._now_s())
        )
        with self._changing() as entries:
            known = entries.get(match[1], entry)
            scopes_of_both = tuple(scope for scope in SCOPES if scope in {*known.scopes, *wanted})
            entries[match[1]] = replace(known, scopes=scopes_of_both)
        return match[1]

    def rotate(self, token_id: str, *, grace_s: float, expires_in_s: float | None = None) -> str:
        """Create a token with the tenant and scopes of another token, which expires after grace_s. Raises NotFound."""
        old = next((entry for entry in self.listed() if entry.id == token_id), None)
        if old is None or old.state(self._now_s()) != "valid":
            raise NotFound(f"no valid token {token_id}; stallscope hub token list shows the tokens")
        token = self.create(old.scopes, old.tenant, expires_in_s=expires_in_s)
        ends_at = int(self._now_s() + grace_s)
        with self._changing() as entries:
            known = entries[token_id].expires_at
            entries[token_id] = replace(
                entries[token_id], expires_at=ends_at if known is None else min(known, ends_at)
            )
        return token

    def revoke(self, token_id: str) -> None:
        """End a token now. Raises NotFound."""
        with self._changing() as entries:
            if token_id not in entries:
                raise NotFound(f"unknown token {token_id}; stallscope hub token list shows the tokens")
            entries[token_id] = replace(entries[token_id], revoked_at=int(self._now_s()))

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Entry]]:
        """The entries, for a change under an exclusive lock; the file is replaced at the end of the block."""
        with _storage(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock_path = self.path.with_suffix(".lock")
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file_modes.give_to_owner_of_folder(lock_path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = _read(self.path)
            yield entries
            with _storage(self.path):
                file_modes.replace(self.path, _written(entries.values()))
        finally:
            os.close(lock)
        self._refresh()

    def _refresh(self) -> None:
        """Reload the file if it has changed. Raises TokensUnreadable; each failure is logged once."""
        with self._lock, _storage(self.path):
            try:
                status = self.path.stat()
            except FileNotFoundError:
                self._state, self._entries = None, {}
                return
            checked_s = time.monotonic()
            state = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if state == self._state:
                self._checked_s = checked_s
                return
            try:
                _check_mode(self.path, status)
                self._entries = _read(self.path)
            except StorageFailed as error:
                if state != self._reported:
                    self._reported = state
                    _LOG.error("every token is refused: %s", error)
                raise
            self._state, self._reported, self._checked_s = state, None, checked_s


def bearer(token: str) -> str:
    """The value of the Authorization header that carries a token."""
    return f"Bearer {token}"


def checked_tenant(tenant: str) -> str:
    """The tenant's name. Raises BadInput unless it is a name that a tenant can have."""
    if not _TENANT.fullmatch(tenant):
        raise BadInput(f"tenant {tenant[:80]!r}: use 1 to 63 lower-case letters, digits, '-' or '_'")
    return tenant


def token_in(path: Path) -> str:
    """The token in a file: its last non-empty line. Raises NotFound, BadInput."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise NotFound(
            f"{shown_path(path)}: the token file does not exist; choose a file with --token-file"
        ) from None
    except OSError as error:
        raise BadInput(f"{shown_path(path)}: cannot read the token file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: the token file is not text; choose a file with --token-file") from None
    if not lines or not ANY_TOKEN.fullmatch(lines[-1]):
        raise BadInput(f"{path}: the file contains no token; stallscope hub token create prints one")
    return lines[-1]


def _checked_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    wanted = [scope.strip() for scope in scopes if scope.strip()]
    for scope in wanted:
        if scope not in SCOPES:
            raise BadInput(f"unknown scope {scope!r}; give {', '.join(SCOPES)}, or several with commas")
    if not wanted:
        raise BadInput(f"a token needs a scope; give {', '.join(SCOPES)}, or several with commas")
    return tuple(scope for scope in SCOPES if scope in wanted)


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(path: Path) -> dict[str, Entry]:
    try:
        content = json.loads(path.read_text())
        if content["format"] > _FORMAT:
            raise TokensUnreadable(f"{path} was written by a newer stallscope; use that version")
        rows = {row["id"]: _entry(row) for row in content["tokens"]}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TokensUnreadable(
            f"{path} is damaged ({error}); restore it, or remove it and create new tokens"
        ) from error
    return rows


def _entry(row: Mapping[str, Any]) -> Entry:
    """The entry of a row of the file. Raises TypeError for a value of another type."""
    entry = Entry(**{**row, "scopes": tuple(row["scopes"])})
    texts = (entry.id, entry.tenant, entry.sha256, *entry.scopes)
    times = (time for time in (entry.created_at, entry.expires_at, entry.revoked_at) if time is not None)
    if not all(isinstance(text, str) and text.isascii() for text in texts):
        raise TypeError("a token has a text of another form")
    if not all(isinstance(time, int | float) for time in times):
        raise TypeError("a token has a time of another form")
    return entry


def _written(entries: Iterable[Entry]) -> bytes:
    return json.dumps({"format": _FORMAT, "tokens": [asdict(entry) for entry in entries]}, indent=1).encode()


def _check_mode(path: Path, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokensUnreadable(
            f"other users can access {path} (mode {status.st_mode & 0o777:o}); run chmod 600 {path}"
        )


@contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TokensUnreadable(
            f"the tokens in {path} cannot be read or written ({error.strerror})"
        ) from error
