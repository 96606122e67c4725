"""Whether the hub answers with a certificate that the agent accepts."""

import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from stallscope.check.finding import Finding, failed, passed, warned

_TIMEOUT_S = 3.0


def findings(hub: str, ca_file: Path | None = None, token_file: Path | None = None) -> Iterator[Finding]:
    """The connection, and the token file. hub: HOST:PORT, empty without a hub."""
    if not hub:
        yield passed("hub", "none set: the trace stays on this machine")
        return
    yield _connection(hub, ca_file)
    if token_file is not None:
        yield _token(token_file)


def _connection(hub: str, ca_file: Path | None) -> Finding:
    host, _, port = hub.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return failed("hub", f"{hub!r} is not HOST:PORT", "give it as hub.example:4317")
    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        with (
            socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as secured,
        ):
            return passed("hub", f"{hub} answers, {secured.version()}")
    except FileNotFoundError:
        return failed("hub", f"certificate file {ca_file} does not exist", "check --ca-cert (hub_ca_file)")
    except ssl.SSLCertVerificationError as error:
        return failed("hub", f"{hub}: {error.verify_message}", "give the hub's authority with --ca-cert")
    except ssl.SSLError as error:
        if "CERTIFICATE_REQUIRED" in (error.reason or ""):
            return failed(
                "hub", f"{hub} requires a client certificate", "give --client-cert and --client-key"
            )
        return failed("hub", f"{hub}: no TLS ({error.reason})", "check the port: OTLP over gRPC uses 4317")
    except OSError as error:
        return failed(
            "hub", f"{hub}: {error.strerror or error}", "start it, open the port, or check the name"
        )


def _token(path: Path) -> Finding:
    try:
        mode = path.stat().st_mode
        path.read_bytes()
    except OSError as error:
        return failed("token", f"{path}: {error.strerror}", "check --token-file, and who may read it")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return warned("token", f"{path} can be read by others", f"chmod 600 {path}")
    return passed("token", f"{path}")
