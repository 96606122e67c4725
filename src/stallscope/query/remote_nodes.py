"""Sends requests to the agents of several machines at once, and measures their clocks.

Each machine gets a separate thread. After the timeout, machines without an answer are reported as missing, and
the other answers are returned. A clock is measured by the quickest of several probes. The machine read its clock
between the request and the answer, so that the error is half the round trip.
"""

import http.client
import json
import queue
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from stallscope.credentials import masked
from stallscope.errors import BadInput

DEFAULT_PORT = 8443
N_PROBES = 8
_MAX_ANSWER_BYTES = 1 << 30

_OTHER_NAME = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""

_REFUSED_CERTIFICATE = (
    "TLSV1_ALERT_UNKNOWN_CA",
    "SSLV3_ALERT_BAD_CERTIFICATE",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    "TLSV1_ALERT_DECRYPT_ERROR",
)
"""Alerts by which a server refuses the certificate of a client, as OpenSSL names them."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Access:
    """Access to the nodes. ca: the authority of their certificates; cert, key: the client's, for mutual TLS.

    is_tls: False only at the user's request.
    """

    token: str = ""
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    is_tls: bool = True
    timeout_s: float = 10.0


@dataclass(frozen=True)
class ClockRead:
    """A node's clocks against the local clock: its monotonic and wall clock at local wall_ns, within error_ns."""

    node_monotonic_ns: int
    node_wall_ns: int
    wall_ns: int
    error_ns: int

    @property
    def ahead_ns(self) -> int:
        """The lead of the node's wall clock over the local wall clock."""
        return self.node_wall_ns - self.wall_ns


@dataclass(frozen=True)
class Reply(Generic[T]):
    """The answer of one node. address: as given; name: as the node reports it; boot_id: the boot from which
    its monotonic clock counts.
    """

    address: str
    name: str
    boot_id: str
    clock: ClockRead
    answer: T


@dataclass(frozen=True)
class Failure:
    """A node that did not answer, and the reason."""

    address: str
    reason: str


@dataclass(frozen=True)
class Answers(Generic[T]):
    """Replies in the order in which the nodes were given, and the missing nodes."""

    replies: list[Reply[T]]
    failures: list[Failure]


def addresses(text: str) -> list[str]:
    """The nodes of "a:8443,b,[::1]:8443"; the port is optional. Raises BadInput."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    if not addresses:
        raise BadInput("--nodes: no node was named; give for example --nodes a:8443,b:8443")
    if twice := {address for address in addresses if addresses.count(address) > 1}:
        raise BadInput(f"--nodes: {sorted(twice)[0]} is given twice; its rows would count twice")
    for address in addresses:
        host_and_port(address)
    return addresses


def host_and_port(address: str) -> tuple[str, int]:
    """Both parts of one node's address. Raises BadInput."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        port = rest.removeprefix(":")
    elif address.count(":") > 1:
        raise BadInput(f"--nodes: {address!r}: write an IPv6 address in brackets, [{address}]:{DEFAULT_PORT}")
    else:
        host, _, port = address.partition(":")
    if not host or "@" in address or not (port or "0").isdecimal() or int(port or 0) > 65535:
        raise BadInput(f"--nodes: {address!r} is not a node; give HOST or HOST:PORT")
    return host, int(port or DEFAULT_PORT)


class Connection:
    """A connection to one agent. Its methods raise OSError, http.client.HTTPException and NodeRefused."""

    def __init__(self, address: str, access: Access, context: ssl.SSLContext | None):
        host, port = host_and_port(address)
        self._end_s = time.monotonic() + access.timeout_s
        self._headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
        self._http: http.client.HTTPConnection = (
            http.client.HTTPSConnection(host, port, timeout=access.timeout_s, context=context)
            if context
            else http.client.HTTPConnection(host, port, timeout=access.timeout_s)
        )

    def get(self, path: str) -> bytes:
        """The answer's body."""
        return self._request("GET", path, None)

    def post(self, path: str, body: object) -> Any:
        """The answer's JSON to a JSON body."""
        return json.loads(self._request("POST", path, json.dumps(body).encode()))

    def close(self) -> None:
        """End the connection."""
        self._http.close()

    @property
    def remaining_s(self) -> float:
        """Remaining time for this node."""
        return max(self._end_s - time.monotonic(), 0.05)

    def clock(self) -> tuple[str, str, ClockRead]:
        """The node's name, its boot, and its clocks by the quickest of N_PROBES probes."""
        best: tuple[int, ClockRead] | None = None
        clocks: dict[str, Any] = {}
        for _ in range(N_PROBES):
            begin_ns, begin_wall_ns = time.monotonic_ns(), time.time_ns()
            clocks = json.loads(self.get("/api/v1/node/clock"))
            trip_ns = time.monotonic_ns() - begin_ns
            reading = ClockRead(
                int(clocks["monotonic_ns"]),
                int(clocks["wall_ns"]),
                begin_wall_ns + trip_ns // 2,
                trip_ns // 2 + int(clocks.get("error_ns", 0)),
            )
            if best is None or trip_ns < best[0]:
                best = (trip_ns, reading)
        assert best
        return str(clocks["node"]), str(clocks.get("boot_id", "")), best[1]

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        if self._http.sock:
            self._http.sock.settimeout(self.remaining_s)
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        self._http.request(method, path, body, headers)
        response = self._http.getresponse()
        content = response.read(_MAX_ANSWER_BYTES + 1)
        if len(content) > _MAX_ANSWER_BYTES:
            raise NodeRefused("its answer is larger than 1 GiB: narrow the query")
        if response.status != 200:
            raise NodeRefused(_error_text(response.status, content))
        return content


class NodeRefused(Exception):
    """An error answer of a node; its message is for people."""


def _error_text(status: int, content: bytes) -> str:
    try:
        text = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
    problem, _, is_of_header = text.partition("; send the header")  # the advice is for programs
    return f"{problem}; {_TOKEN_ADVICE}" if is_of_header else text


_TOKEN_ADVICE = "give the content of api/token next to the trace of that machine with --token-file"


def _is_pem(path: Path, option: str) -> None:
    """Raises BadInput that names the file, where OpenSSL names none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{option}: {path}: {error.strerror}; name a PEM file") from None
    if b"-----BEGIN " not in content:
        raise BadInput(f"{option}: {path} is not a PEM file; name a file that begins with -----BEGIN")


def tls_context(access: Access) -> ssl.SSLContext | None:
    """The TLS context; None for plain HTTP. Raises BadInput."""
    if not access.is_tls:
        return None
    for path, option in (
        (access.ca, "--ca-cert"),
        (access.cert, "--client-cert"),
        (access.key, "--client-key"),
    ):
        if path:
            _is_pem(path, option)
    try:
        context = ssl.create_default_context(cafile=str(access.ca) if access.ca else None)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if access.cert:
            context.load_cert_chain(access.cert, access.key)
    except (OSError, ssl.SSLError) as error:
        raise BadInput(
            f"the certificates for --nodes cannot be used ({error}): check --ca-cert, --client-cert, --client-key"
        ) from error
    return context


def ask_all(nodes: Sequence[str], access: Access, request: Callable[[Connection], T]) -> Answers[T]:
    """Send a request to every node at once; returns when every node has answered or the time is over."""
    context = tls_context(access)
    outcomes: queue.SimpleQueue[Reply[T] | Failure] = queue.SimpleQueue()

    def ask(address: str) -> None:
        connection = Connection(address, access, context)
        try:
            name, boot_id, clock = connection.clock()
            outcomes.put(Reply(address, name, boot_id, clock, request(connection)))
        except (OSError, http.client.HTTPException, ValueError, KeyError, NodeRefused) as error:
            outcomes.put(Failure(address, _reason(error, access)))
        finally:
            connection.close()

    for address in nodes:
        threading.Thread(target=ask, args=(address,), name=f"ask {address}", daemon=True).start()
    by_address: dict[str, Reply[T] | Failure] = {}
    end_s = time.monotonic() + access.timeout_s
    while len(by_address) < len(nodes):
        try:
            outcome = outcomes.get(timeout=max(end_s - time.monotonic(), 0.001))
        except queue.Empty:
            break
        by_address[outcome.address] = outcome
    late = f"no answer within {access.timeout_s:g} s (--timeout)"
    in_order = [by_address.get(address, Failure(address, late)) for address in nodes]
    return Answers(
        [outcome for outcome in in_order if isinstance(outcome, Reply)],
        [outcome for outcome in in_order if isinstance(outcome, Failure)],
    )


def _reason(error: Exception, access: Access) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {access.timeout_s:g} s (--timeout)"
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OTHER_NAME:
        return f"{error.verify_message} use the name in its certificate, or serve it with --listen ADDR:PORT"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}): give its authority with --ca-cert"
    if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (error.reason or ""):
        return "it requires a client certificate: give --client-cert and --client-key"
    if isinstance(error, ssl.SSLError) and (error.reason or "") in _REFUSED_CERTIFICATE:
        return "it refused the client certificate: give a certificate of its authority with --client-cert"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with it ({error.reason or error}): is it served with --no-tls?"
    if isinstance(error, http.client.RemoteDisconnected) and access.is_tls and not access.cert:
        return (
            "it closed the connection after the TLS handshake: if it requires a client certificate, "
            "give --client-cert and --client-key"
        )
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closed the connection: does it require TLS, or is it not a stallscope agent?"
    if isinstance(error, OSError):
        return error.strerror or masked(str(error))
    return masked(str(error)) or type(error).__name__
