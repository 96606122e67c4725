"""Who may ask the hub: bearer tokens, each with a tenant, scopes and an end.

The tokens lie in a file of their own, so that they can be made and revoked while a hub runs: it is replaced as
a whole and a running hub reads it again when it has changed. The file holds hashes only. A token is
`sst_<id>_<secret>`: the id is public and may stand in logs, the secret is 32 random bytes, which is why one
round of SHA-256 is enough: there is nothing to guess.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
"""What a token may be for: send events; ask the tools; run SQL; see the hub's own state."""

_LOG = logging.getLogger(__name__)

FILE_NAME = "tokens.json"
_FORMAT = 1
_TOKEN = re.compile(r"sst_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_ANY_TOKEN = re.compile(r"[!-~]{16,}")  # collectors have tokens of their own making
_SECRET = re.compile(r"(sst_[0-9a-f]{12}_)[A-Za-z0-9_-]+")
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_NOBODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Identity:
    """Who asks. token_id may be shown and logged."""

    tenant: str
    scopes: frozenset[str]
    token_id: str

    def require(self, scope: str) -> None:
        """Raises NotAllowed unless the token has the scope."""
        if scope not in self.scopes:
            raise NotAllowed(
                f"token {self.token_id} has no scope {scope!r} (it has {', '.join(sorted(self.scopes))}); "
                f"make one with: stallscope hub token create --scope {scope}"
            )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One token as the file keeps it. Times are seconds since 1970; expires_at, revoked_at: None is never."""

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
    """The tokens of one hub, as they are in the file now. For any number of threads."""

    def __init__(self, path: Path, now_s: Callable[[], float] = time.time):
        """path: the file; one that is missing holds no tokens. Raises StorageFailed when others may write it."""
        self.path = path
        self._now_s = now_s
        self._lock = threading.Lock()
        self._state: tuple[int, int, int, int] | None = None
        self._reported: tuple[int, int, int, int] | None = None
        self._entries: dict[str, Entry] = {}
        self._refresh()

    def identity(self, authorization: str | None) -> Identity:
        """Whose request it is. authorization: the value of that header (gRPC: metadata), `Bearer <token>`.

        Raises NotAuthenticated; its message never holds the token.
        """
        if not authorization:
            raise NotAuthenticated("no token was given; send the header `Authorization: Bearer <token>`")
        scheme, _, token = authorization.partition(" ")
        found = _TOKEN.fullmatch(token.strip()) if scheme.lower() == "bearer" else None
        if not found:
            raise NotAuthenticated(
                "malformed Authorization header; send the header `Authorization: Bearer <token>`"
            )
        self._refresh()
        entry = self._entries.get(found[1])
        # Compared in any case, so that the time does not tell which ids there are.
        is_right = hmac.compare_digest(_sha256(found[2]), entry.sha256 if entry else _NOBODY)
        if not entry or not is_right:
            raise NotAuthenticated("the token is unknown here; stallscope hub token create makes one")
        if (state := entry.state(self._now_s())) != "valid":
            raise NotAuthenticated(f"token {entry.id} is {state}; stallscope hub token create makes another")
        return Identity(entry.tenant, frozenset(entry.scopes), entry.id)

    def listed(self) -> list[Entry]:
        """All entries, oldest first."""
        self._refresh()
        return sorted(self._entries.values(), key=lambda entry: (entry.created_at, entry.id))

    def create(self, scopes: Iterable[str], tenant: str, *, expires_in_s: float | None = None) -> str:
        """Make a token and return it; it is told this once. Raises BadInput, StorageFailed."""
        wanted = _checked_scopes(scopes)
        if not _TENANT.fullmatch(tenant):
            raise BadInput(f"tenant {tenant!r}: give 1 to 63 small letters, digits, '-' or '_'")
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

    def rotate(self, token_id: str, *, grace_s: float, expires_in_s: float | None = None) -> str:
        """Make a token with the tenant and the scopes of another token, which ends after grace_s. Raises NotFound."""
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
                raise NotFound(f"there is no token {token_id}; stallscope hub token list shows them")
            entries[token_id] = replace(entries[token_id], revoked_at=int(self._now_s()))

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Entry]]:
        """The entries, to be changed: no other process changes them meanwhile; then the file is replaced."""
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
        """Read the file if it has changed. Raises TokensUnreadable; each state is logged once."""
        with self._lock, _storage(self.path):
            try:
                found = self.path.stat()
            except FileNotFoundError:
                self._state, self._entries = None, {}
                return
            state = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
            if state == self._state:
                return
            try:
                _check_mode(self.path, found)
                self._entries = _read(self.path)
            except StorageFailed as error:
                if state != self._reported:
                    self._reported = state
                    _LOG.error("every token is refused: %s", error)
                raise
            self._state, self._reported = state, None


def bearer(token: str) -> str:
    """The value of the Authorization header that carries a token."""
    return f"Bearer {token}"


def redacted(text: str) -> str:
    """The text with the secret of every token in it left out, fit for a log."""
    return _SECRET.sub(r"\1***", text)


def token_in(path: Path) -> str:
    """The token in a file: its last line that is not empty. Raises NotFound, BadInput."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such token file; name one with --token-file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: the token file cannot be read ({error})") from error
    if not lines or not _ANY_TOKEN.fullmatch(lines[-1]):
        raise BadInput(f"{path}: this file holds no token; stallscope hub token create prints one")
    return lines[-1]


def _checked_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    wanted = [scope.strip() for scope in scopes if scope.strip()]
    for scope in wanted:
        if scope not in SCOPES:
            raise BadInput(f"there is no scope {scope!r}: give {', '.join(SCOPES)}, or several with commas")
    if not wanted:
        raise BadInput(f"a token needs a scope: give {', '.join(SCOPES)}, or several with commas")
    return tuple(scope for scope in SCOPES if scope in wanted)


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(path: Path) -> dict[str, Entry]:
    try:
        content = json.loads(path.read_text())
        if content["format"] > _FORMAT:
            raise TokensUnreadable(f"{path} was written by a newer stallscope: use that version")
        rows = [Entry(**{**row, "scopes": tuple(row["scopes"])}) for row in content["tokens"]]
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TokensUnreadable(
            f"{path} is damaged ({error}): restore it, or remove it and make new tokens"
        ) from error
    return {row.id: row for row in rows}


def _written(entries: Iterable[Entry]) -> bytes:
    return json.dumps({"format": _FORMAT, "tokens": [asdict(entry) for entry in entries]}, indent=1).encode()


def _check_mode(path: Path, found: os.stat_result) -> None:
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokensUnreadable(
            f"{path} can be used by others (mode {found.st_mode & 0o777:o}): chmod 600 {path}"
        )


@contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TokensUnreadable(
            f"the tokens in {path} cannot be read or written ({error.strerror})"
        ) from error
