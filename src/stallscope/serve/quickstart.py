"""Sets up a first hub on one machine: certificate and tokens in its folder. Valid existing files are kept."""

import platform
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stallscope.errors import BadInput, NotAuthenticated, NotFound, StorageFailed
from stallscope.serve.tls import Files, self_signed
from stallscope.serve.tokens import FILE_NAME, Tokens, bearer, token_in
from stallscope.store.file_modes import replace

_ELSEWHERE = (
    "192.0.2.1"  # reserved by RFC 5737; connecting UDP to it sends nothing and reveals the local address
)


@dataclass(frozen=True)
class PreparedFiles:
    """Paths of the files. names: covered by the certificate, the name for other machines first."""

    tls: Files
    ingest: Path
    read: Path
    names: tuple[str, ...]


def prepared(folder: Path, names: tuple[str, ...] = ()) -> PreparedFiles:
    """Create missing files: certificate, a token to send and a token to query. Raises StorageFailed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageFailed(
            f"{folder} cannot be created ({error.strerror}); choose another path with --db"
        ) from error
    tls = self_signed(folder / "tls", [*dict.fromkeys([*names, *own_names()])])
    tokens = Tokens(folder / FILE_NAME)
    ingest, read = folder / "ingest.token", folder / "read.token"
    _keep_token(tokens, ingest, ["ingest"])
    _keep_token(tokens, read, ["read", "sql", "admin"])
    return PreparedFiles(tls, ingest, read, _names_in(tls.cert))


def own_names() -> list[str]:
    """The names and addresses of this machine, from its own configuration."""
    host = platform.node()
    candidates = [host, socket.getfqdn()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE, 9))
        candidates.append(probe.getsockname()[0])
    return list(dict.fromkeys([*filter(None, candidates), "localhost", "127.0.0.1", "::1"]))


def _keep_token(tokens: Tokens, path: Path, scopes: list[str]) -> None:
    """Write a file with a token of these scopes; an existing valid token is kept."""
    with suppress(NotAuthenticated, BadInput, NotFound):
        identity = tokens.identity(bearer(token_in(path)))
        if identity.scopes >= set(scopes):
            return
    token = tokens.create(scopes, "default")
    try:
        replace(path, f"{token}\n".encode())
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written ({error.strerror})") from error


def _names_in(cert: Path) -> tuple[str, ...]:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return tuple(str(name.value) for name in names)
