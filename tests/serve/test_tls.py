"""Certificates with real connections: versions, renewal, who must show one, and files that will not do."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
import trustme

from stallscope.errors import BadInput
from stallscope.serve import server
from stallscope.serve.app import create_app
from stallscope.serve.server import RunningServer, bound
from stallscope.serve.tls import Certificates, Files, checked, self_signed

from .house import house_in

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def issued(
    ca: trustme.CA, folder: Path, name: str = "localhost", client_ca: trustme.CA | None = None
) -> Files:
    """Certificate and key in files, as an administrator would create them."""
    made = ca.issue_cert(name, "127.0.0.1")
    cert, key = folder / "hub.crt", folder / "hub.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    part = folder / "hub.key.part"
    part.touch(mode=0o600)
    part.write_bytes(made.private_key_pem.bytes())
    part.replace(key)
    authority = folder / "senders.pem"
    if client_ca:
        client_ca.cert_pem.write_to_path(authority)
    return Files(cert, key, authority if client_ca else None)


def trusting(ca: trustme.CA, **changes: object) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    for name, value in changes.items():
        setattr(context, name, value)
    return context


@contextmanager
def serving(folder: Path, certificates: Certificates) -> Iterator[int]:
    """The application on a port with TLS."""
    with house_in(folder) as house:
        listener = RunningServer(
            create_app(context=house),
            bound("127.0.0.1:0", "--api"),
            context=certificates.context(),
            name="api",
        )
        try:
            yield listener.port
        finally:
            listener.stop()


def seen_by_client(port: int, context: ssl.SSLContext) -> tuple[str, int]:
    """TLS version, and serial number of the certificate that a client receives."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        getpeercert = connection.getpeercert()
        assert getpeercert
        return str(connection.version()), int(str(getpeercert["serialNumber"]), 16)


def test_a_client_that_trusts_the_authority_is_answered(ca: trustme.CA, tmp_path: Path):
    with serving(tmp_path, Certificates(issued(ca, tmp_path))) as port:
        response = httpx.get(f"https://localhost:{port}/api/versions", verify=trusting(ca))
        assert response.status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"https://localhost:{port}/api/versions")


def test_connections_older_than_tls_1_2_are_refused(ca: trustme.CA, tmp_path: Path):
    with serving(tmp_path, Certificates(issued(ca, tmp_path))) as port:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            assert seen_by_client(port, trusting(ca, maximum_version=version))
        old = trusting(ca)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            seen_by_client(port, old)


def test_a_renewed_certificate_is_used_from_the_next_connection_on(ca: trustme.CA, tmp_path: Path):
    now = [0.0]
    certificates = Certificates(issued(ca, tmp_path), clock_s=lambda: now[0])
    with serving(tmp_path, certificates) as port:
        first = seen_by_client(port, trusting(ca))
        issued(ca, tmp_path)
        now[0] += 5
        second = seen_by_client(port, trusting(ca))
        assert first[1] != second[1]
        (tmp_path / "hub.key").write_text("half wri")
        now[0] += 5
        assert seen_by_client(port, trusting(ca)) == second
        assert "not a matching certificate and key" in certificates.trouble
        issued(ca, tmp_path)
        now[0] += 5
        assert seen_by_client(port, trusting(ca))[1] not in (first[1], second[1])
        assert not certificates.trouble


def test_clients_need_a_certificate_when_a_client_authority_is_set(ca: trustme.CA, tmp_path: Path):
    senders, strangers = trustme.CA(), trustme.CA()
    now = [0.0]
    files = issued(ca, tmp_path, client_ca=senders)
    with serving(tmp_path, Certificates(files, clock_s=lambda: now[0])) as port:

        def status(of: trustme.CA | None) -> int:
            context = trusting(ca)
            if of:
                of.issue_cert("agent").configure_cert(context)
            with httpx.Client(verify=context) as client:
                return client.get(f"https://localhost:{port}/api/versions").status_code

        assert status(senders) == 200
        for of in (None, strangers):
            with pytest.raises(httpx.TransportError):
                status(of)
        strangers.cert_pem.write_to_path(files.client_ca)
        now[0] += 5
        assert status(strangers) == 200
        with pytest.raises(httpx.TransportError):
            status(senders)


@contextmanager
def grpc_serving(certificates: Certificates) -> Iterator[int]:
    """A gRPC server that echoes its requests."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Echo": echo}),))
    port = server.add_secure_port("127.0.0.1:0", certificates.grpc())
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


def grpc_echo(port: int, ca: trustme.CA, client: trustme.LeafCert | None = None) -> bytes:
    key = client.private_key_pem.bytes() if client else None
    chain = client.cert_chain_pems[0].bytes() if client else None
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes(), key, chain)
    options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        answer: bytes = channel.unary_unary("/t.T/Echo")(b"hello", timeout=10)
        return answer


def test_grpc_uses_a_renewed_certificate(tmp_path: Path):
    old, new, now = trustme.CA(), trustme.CA(), [0.0]
    with grpc_serving(Certificates(issued(old, tmp_path), clock_s=lambda: now[0])) as port:
        assert grpc_echo(port, old) == b"hello"
        issued(new, tmp_path)
        now[0] += 5
        assert grpc_echo(port, new) == b"hello"
        with pytest.raises(grpc.RpcError):
            grpc_echo(port, old)


def test_grpc_requires_the_client_certificate(ca: trustme.CA, tmp_path: Path):
    senders = trustme.CA()
    with grpc_serving(Certificates(issued(ca, tmp_path, client_ca=senders))) as port:
        assert grpc_echo(port, ca, senders.issue_cert("agent")) == b"hello"
        with pytest.raises(grpc.RpcError):
            grpc_echo(port, ca)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o666])
def test_a_key_that_others_can_use_is_refused(ca: trustme.CA, tmp_path: Path, mode: int):
    files = issued(ca, tmp_path)
    files.key.chmod(mode)
    with pytest.raises(BadInput, match=rf"mode {mode:o}\); run chmod 600"):
        checked(files)
    files.key.chmod(0o640)
    checked(files)


def test_files_that_do_not_fit_are_refused_by_name(ca: trustme.CA, tmp_path: Path):
    files = issued(ca, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    stranger = issued(ca, other)
    for wrong, words in (
        (Files(tmp_path / "none", files.key), "--tls-cert"),
        (Files(files.cert, tmp_path / "none"), "--tls-key"),
        (Files(files.cert, stranger.key), "not a matching certificate and key"),
        (Files(files.cert, files.key, files.key), "--tls-client-ca"),
    ):
        with pytest.raises(BadInput, match=words):
            Certificates(wrong)


def test_a_key_with_a_password_is_refused_instead_of_asked_for(ca: trustme.CA, tmp_path: Path):
    from cryptography.hazmat.primitives import serialization as ser

    files = issued(ca, tmp_path)
    key = ser.load_pem_private_key(files.key.read_bytes(), None)
    locked = ser.BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, locked))
    with pytest.raises(BadInput, match="encrypted with a password"):
        checked(files)


def test_the_quick_certificate_serves_and_is_kept(tmp_path: Path):
    files = self_signed(tmp_path / "tls", ["localhost", "127.0.0.1", "node-1.example"])
    assert files.key.stat().st_mode & 0o777 == 0o600
    before = files.cert.read_bytes()
    context = ssl.create_default_context(cafile=str(files.cert))
    with serving(tmp_path, Certificates(files)) as port:
        for host in ("localhost", "127.0.0.1"):
            assert httpx.get(f"https://{host}:{port}/api/versions", verify=context).status_code == 200
    assert self_signed(tmp_path / "tls", ["other"]).cert.read_bytes() == before


@pytest.mark.pure
def test_a_self_signed_key_replaces_a_world_readable_key(tmp_path: Path):
    left = tmp_path / "hub.key"
    left.touch(mode=0o644)
    left.chmod(0o644)
    assert self_signed(tmp_path, ["localhost"]).key.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub.crt", "hub.key"]


def test_only_slow_clients_are_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "READ_S", 0.5)
    with house_in(tmp_path) as house:
        listener = RunningServer(
            create_app(context=house), bound("127.0.0.1:0", "--api"), context=None, name="api"
        )
        with closing(socket.create_connection(("127.0.0.1", listener.port), timeout=20)) as slow:
            slow.sendall(b"GET /api/versions HT")
            assert httpx.get(f"http://127.0.0.1:{listener.port}/api/versions").status_code == 200
            with pytest.raises(ConnectionResetError):
                while slow.recv(100):
                    pass
                raise ConnectionResetError
        assert httpx.get(f"http://127.0.0.1:{listener.port}/api/versions").status_code == 200
        listener.stop()


def test_idle_connections_are_limited_and_leave_room_for_requests(
    ca: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 12)
    monkeypatch.setattr(server, "HANDSHAKE_S", 1.5)
    with serving(tmp_path, Certificates(issued(ca, tmp_path))) as port:
        context = trusting(ca)
        idle = []
        for _ in range(10):
            plain = socket.create_connection(("127.0.0.1", port), timeout=20)
            idle.append(context.wrap_socket(plain, server_hostname="localhost"))
        until(lambda: any(map(has_ended, idle)))
        assert httpx.get(f"https://localhost:{port}/api/versions", verify=context).status_code == 200
        silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(40)]
        assert [entry.recv(1) for entry in silent[-20:]] == [b""] * 20
        until(lambda: httpx.get(f"https://localhost:{port}/api/versions", verify=context).status_code == 200)
        for entry in (*idle, *silent):
            entry.close()


def test_a_request_after_many_idle_connections_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 12)
    monkeypatch.setattr(server, "_NOTIFY_EVERY_S", 3600)  # only a crowded server cuts off clients
    with house_in(tmp_path) as house:
        listener = RunningServer(
            create_app(context=house), bound("127.0.0.1:0", "--api"), context=None, name="api"
        )
        silent = [socket.create_connection(("127.0.0.1", listener.port), timeout=20) for _ in range(60)]
        until(lambda: httpx.get(f"http://127.0.0.1:{listener.port}/api/versions").status_code == 200)
        for entry in silent:
            entry.close()
        listener.stop()


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    connection.settimeout(0.05)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


def until(is_so: Callable[[], bool]) -> None:
    """Wait for the condition; a refused connection counts as False."""
    end_s = time.monotonic() + 30
    while True:
        with suppress(httpx.TransportError):
            if is_so():
                return
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.pure
@pytest.mark.parametrize("text", ["8081", "a", ":x", "127.0.0.1:", "::1:8081", "1.2.3.4:70000", ""])
def test_an_invalid_address_is_refused_with_the_expected_form(text: str):
    with pytest.raises(BadInput, match="ADDR:PORT"):
        server.address(text, "--api")


@pytest.mark.pure
def test_addresses_are_read_as_they_are_written():
    assert server.address(":8081", "--api") == ("", 8081)
    assert server.address("[::1]:0", "--api") == ("::1", 0)
    assert server.address("localhost:8081", "--api") == ("localhost", 8081)
    assert [server.is_loopback(h) for h in ("localhost", "127.0.0.2", "::1", "", "10.0.0.1", "a.b")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.pure
def test_an_address_in_use_is_one_clear_line():
    with (
        closing(bound("127.0.0.1:0", "--api")) as first,
        pytest.raises(BadInput, match=r"--api: cannot listen at 127\.0\.0\.1:.*choose another"),
    ):
        bound(f"127.0.0.1:{first.getsockname()[1]}", "--api")
