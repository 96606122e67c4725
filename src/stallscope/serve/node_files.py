"""Files of an agent's API: an authority, a certificate signed by it, a token. Created on first use.

Clients trust the authority (ca.crt), which is valid for years. The certificate is renewed every few weeks without
any change for clients. If ca.crt and ca.key of one machine are copied to others before their first use, one ca.crt
is enough for all of them. The same is true for tokens.json.
"""

import datetime
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stallscope.errors import BadInput, StorageFailed
from stallscope.serve import certificates
from stallscope.serve.quickstart import own_names
from stallscope.serve.tls import Files
from stallscope.serve.tokens import FILE_NAME, Tokens
from stallscope.store.file_modes import replace

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_CERT, CA_KEY, CERT, KEY, TOKEN = "ca.crt", "ca.key", "node.crt", "node.key", "token"
_REMEDY = "give the content of api/token next to the trace of that machine with --token-file"
SCOPES = ("read", "sql")

CA_DAYS = 3650
CERT_DAYS = 90
RENEW_DAYS = 30
"""A certificate is renewed this many days before it expires."""


@dataclass(frozen=True)
class NodeFiles:
    """Paths of the files. ca: for clients; token: a file with the token for clients."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / CA_CERT

    @property
    def token(self) -> Path:
        return self.folder / TOKEN

    def tls(self, client_ca: Path | None = None) -> Files:
        """Certificate and key of the server."""
        return Files(self.folder / CERT, self.folder / KEY, client_ca)

    def tokens(self) -> Tokens:
        """The accepted tokens."""
        return Tokens(self.folder / FILE_NAME, remedy=_REMEDY)


def prepare_tls(files: NodeFiles, names: Sequence[str], *, now: datetime.datetime | None = None) -> bool:
    """Create missing files and renew expiring files. True if the certificate is new. Raises StorageFailed.

    names: further names by which clients reach this machine, in addition to its host names.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    wanted = list(dict.fromkeys([*filter(None, names), *own_names()]))
    with _alone(files.folder):
        ca_key, ca = _authority(files, now)
        if _is_good(files, ca, wanted, now):
            return False
        key, cert = certificates.signed_by(ca_key, ca, wanted, now, days=CERT_DAYS)
        _write(files.folder / KEY, key)
        _write(files.folder / CERT, cert, 0o644)
        return True


def prepare_token(files: NodeFiles) -> None:
    """Create a token if there is none yet. Raises StorageFailed."""
    with _alone(files.folder):
        tokens = files.tokens()
        if not tokens.listed():
            _write(files.token, (tokens.create(SCOPES, "default") + "\n").encode())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock, so that two servers that start at the same time create one authority."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageFailed(
            f"{folder} cannot be written ({error.strerror}); choose another folder with --files"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Raises StorageFailed."""
    try:
        replace(path, content, mode)
    except OSError as error:
        raise StorageFailed(
            f"{path} cannot be written ({error.strerror}); choose another folder with --files"
        ) from error


def _authority(
    files: NodeFiles, now: datetime.datetime
) -> "tuple[EllipticCurvePrivateKey, x509.Certificate]":
    """Key and certificate of the authority, created if missing. Raises BadInput for unusable files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    cert, key = files.ca, files.folder / CA_KEY
    if cert.exists() != key.exists():
        missing = key if cert.exists() else cert
        raise BadInput(
            f"{missing} is missing; copy both files of the authority, or remove the remaining file"
        )
    if not cert.exists():
        made, certificate = certificates.authority(now, days=CA_DAYS)
        _write(key, made)
        _write(cert, certificate, 0o644)
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        ca_certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    except (ValueError, TypeError, OSError) as error:
        raise BadInput(
            f"{cert} and {key} are not a usable authority ({error}); remove both to create a new authority"
        ) from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise BadInput(
            f"{key} is not an elliptic-curve key; remove {cert} and {key} to create a new authority"
        )
    return loaded, ca_certificate


def _is_good(files: NodeFiles, ca: "x509.Certificate", names: Sequence[str], now: datetime.datetime) -> bool:
    """Whether the certificate is signed by this authority, covers these names, and does not expire soon."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        cert = x509.load_pem_x509_certificate((files.folder / CERT).read_bytes())
        cert.verify_directly_issued_by(ca)
        alternative_names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    has = {str(name.value) for name in alternative_names}
    ends_in = cert.not_valid_after_utc - now
    return (
        set(names) <= has and ends_in > datetime.timedelta(days=RENEW_DAYS) and (files.folder / KEY).exists()
    )
