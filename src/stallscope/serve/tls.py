"""Certificates: checked before the server listens, reloaded when they change, TLS 1.2 or later.

A renewed certificate (by certbot, by cert-manager) takes effect at the next connection: each handshake checks the
files, at most once in REFRESH_S. If the new files are invalid, the old certificate stays in use and `trouble` has
the reason.
"""

import datetime
import ssl
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stallscope.errors import BadInput, StorageFailed
from stallscope.serve import certificates
from stallscope.store.file_modes import give_to_owner_of_folder, replace

if TYPE_CHECKING:  # imported only for self-signed certificates
    import grpc

REFRESH_S = 1.0
WARN_DAYS = 14
CERT_NAME = "hub.crt"
KEY_NAME = "hub.key"
_QUICK_SUBJECT = "stallscope hub (made by quickstart)"
_QUICK_DAYS = 365


@dataclass(frozen=True)
class Files:
    """Paths of the certificate (chain) and its key; client_ca: authority of client certificates, if required."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class Pems:
    """The contents of the files."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


def checked(files: Files) -> Pems:
    """The contents of the files. Raises BadInput with the file and the problem when they are unusable."""
    _check_key_mode(files.key)
    pems = Pems(
        _content(files.cert, "--tls-cert"),
        _content(files.key, "--tls-key"),
        _content(files.client_ca, "--tls-client-ca") if files.client_ca else None,
    )
    _context(files)
    return pems


def _content(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{option}: {path} cannot be read ({error.strerror})") from error


def _check_key_mode(path: Path) -> None:
    """Refuse a key that others can read. The file's group may read it, as packages set it up."""
    try:
        status = path.stat()
    except OSError as error:
        raise BadInput(f"--tls-key: {path} cannot be read ({error.strerror})") from error
    if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise BadInput(
            f"--tls-key: other users can access {path} (mode {status.st_mode & 0o777:o}); run chmod 600 {path}"
        )


def _context(files: Files) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password(files.key))
    except (ssl.SSLError, OSError) as error:
        raise BadInput(
            f"{files.cert} and {files.key} are not a matching certificate and key ({_reason(error)}); give PEM files"
        ) from error
    if files.client_ca:
        try:
            context.load_verify_locations(files.client_ca)
        except (ssl.SSLError, OSError) as error:
            raise BadInput(
                f"--tls-client-ca: {files.client_ca} contains no certificate ({_reason(error)}); give a PEM file"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password(key: Path) -> Callable[[], str]:
    """Raises instead of letting OpenSSL prompt on the terminal."""

    def refuse() -> str:
        raise BadInput(f"--tls-key: {key} is encrypted with a password; give an unencrypted key")

    return refuse


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)


class Certificates:
    """The current certificate, for ASGI servers and gRPC. Thread-safe."""

    def __init__(self, files: Files, clock_s: Callable[[], float] = time.monotonic):
        """Raises BadInput when the files are unusable."""
        self.files = files
        self.trouble = ""
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._fingerprint = _fingerprint(files)
        self._next_s = clock_s() + REFRESH_S
        self._pems = checked(files)
        self._inner = _context(files)

    def context(self) -> ssl.SSLContext:
        """For a server: each handshake uses the current certificate and client authorities."""
        front = _context(self.files)

        def newest(
            connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
        ) -> None:
            self.refresh()
            connection.context = self._inner

        front.sni_callback = newest
        return front

    def grpc(self) -> "grpc.ServerCredentials":
        """For a gRPC server; each handshake uses the current certificate."""
        import grpc

        sent: list[Pems] = []

        def newest() -> "grpc.ServerCertificateConfiguration | None":
            self.refresh()
            if sent and sent[-1] is self._pems:
                return None
            sent[:] = [self._pems]
            return _grpc_configuration(self._pems)

        first = newest()
        return grpc.dynamic_ssl_server_credentials(
            first, newest, require_client_authentication=self.files.client_ca is not None
        )

    def warning(self) -> str:
        """A problem for the operator: new files are invalid, or the certificate expires soon; "" if none."""
        from cryptography import x509

        if self.trouble:
            return self.trouble
        now = datetime.datetime.now(datetime.UTC)
        remaining = (
            min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(self._pems.cert)) - now
        )
        if remaining.total_seconds() < 0:
            return f"the certificate {self.files.cert.name} has expired and clients refuse it; renew it"
        if remaining.days < WARN_DAYS:
            return f"the certificate {self.files.cert.name} expires in {remaining.days} days; renew it"
        return ""

    def refresh(self) -> None:
        """Reload the files if they have changed and are valid."""
        with self._lock:
            if self._clock_s() < self._next_s:
                return
            self._next_s = self._clock_s() + REFRESH_S
            fingerprint = _fingerprint(self.files)
            if fingerprint == self._fingerprint:
                return
            try:
                pems, inner = checked(self.files), _context(self.files)
            except BadInput as error:  # possibly half written; the next check reads them again
                self.trouble = str(error)
                return
            self._fingerprint, self._pems, self._inner, self.trouble = fingerprint, pems, inner, ""


def _grpc_configuration(pems: Pems) -> "grpc.ServerCertificateConfiguration":
    import grpc

    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.cert)], root_certificates=pems.client_ca
    )


def _fingerprint(files: Files) -> tuple[tuple[int, int, int], ...]:
    """A fingerprint of the files that changes with every edit: inode, size and time."""
    stamps = []
    for path in filter(None, (files.cert, files.key, files.client_ca)):
        try:
            now = path.stat()
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((now.st_ino, now.st_mtime_ns, now.st_size))
    return tuple(stamps)


def self_signed(folder: Path, names: Sequence[str]) -> Files:
    """A self-signed certificate for these host names and addresses; an existing certificate is kept.

    Clients trust hub.crt as the authority. Raises StorageFailed.
    """
    files = Files(folder / CERT_NAME, folder / KEY_NAME)
    if files.cert.exists() and files.key.exists():
        return files
    now = datetime.datetime.now(datetime.UTC)
    key, cert = certificates.self_signed(_QUICK_SUBJECT, names, now, days=_QUICK_DAYS)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        give_to_owner_of_folder(folder)
        replace(files.key, key)
        replace(files.cert, cert, 0o644)
    except OSError as error:
        raise StorageFailed(f"the certificate cannot be written into {folder} ({error.strerror})") from error
    return files
