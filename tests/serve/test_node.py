"""An agent's API: authentication, certificates, and its clock readings."""

import datetime
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from stallscope.errors import BadInput
from stallscope.query import fanout, fleet_trace
from stallscope.query.remote_nodes import Access, Answers, addresses, ask_all, host_and_port
from stallscope.query.sql import Limits
from stallscope.serve import node_api as api
from stallscope.serve.node_files import CERT_DAYS, RENEW_DAYS, NodeFiles, prepare_tls, prepare_token
from stallscope.store import node as store

from ..query.fleet import VICTIM, fleet, job_trace, part, served

AHEAD_NS = 80_000_000
COUNT = "SELECT count(*) FROM collectives"


@pytest.fixture(scope="module")
def trace():
    return job_trace()


@pytest.fixture(scope="module")
def db(tmp_path_factory, trace) -> Path:
    path = tmp_path_factory.mktemp("node") / "trace.db"
    store.write(path, part(trace, 0))
    return path


@contextmanager
def node(db: Path, files: Path, **changes: object) -> Iterator[str]:
    options = {"db": db, "listen": "127.0.0.1:0", "node": "here", "files": files}
    with served(api.Options(**options | changes)) as address:
        yield address


def asked(address: str, access: Access) -> str:
    """Why the node did not answer; empty when it did."""
    result: Answers[object] = ask_all(
        [address], access, lambda connection: connection.post("/api/v1/node/query", {"sql": COUNT})
    )
    return result.failures[0].reason if result.failures else ""


def test_a_token_and_the_authority_are_needed(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    with node(db, files.folder) as address:
        token = files.token.read_text().strip()
        assert asked(address, Access(token=token, ca=files.ca)) == ""
        assert "the token is missing" in asked(address, Access(ca=files.ca))
        assert "the token is unknown" in asked(
            address, Access(token=f"{token[:-1]}{'aA'[token[-1] == 'a']}", ca=files.ca)
        )
        assert "not trusted" in asked(address, Access(token=token))
        assert "does it require TLS" in asked(address, Access(token=token, is_tls=False))
        port = address.rpartition(":")[2]
        assert asked(f"localhost:{port}", Access(token=token, ca=files.ca)) == ""
        log = [json.loads(line) for line in (files.folder / "audit.jsonl").read_text().splitlines()]
    assert {line["event"] for line in log} == {"request", "refused"}
    assert any(line.get("sql") == COUNT for line in log)
    assert token not in (files.folder / "audit.jsonl").read_text()
    assert {p.name: p.stat().st_mode & 0o777 for p in files.folder.glob("*.key")} == {
        "ca.key": 0o600,
        "node.key": 0o600,
    }
    assert files.token.stat().st_mode & 0o777 == 0o600


def test_connections_older_than_tls_1_3_are_refused(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    with node(db, files.folder) as address:
        host, port = host_and_port(address)
        for newest, is_let_in in ((ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)):
            context = ssl.create_default_context(cafile=files.ca)
            context.maximum_version = newest
            connection = http.client.HTTPSConnection(host, port, context=context, timeout=5)
            try:
                connection.request("GET", "/api/v1/health")
                assert is_let_in
                assert connection.getresponse().status == 200
            except ssl.SSLError as error:
                assert not is_let_in, error
            finally:
                connection.close()


def test_another_host_name_is_not_believed(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    with node(db, files.folder) as address:
        host, port = host_and_port(address)
        context = ssl.create_default_context(cafile=files.ca)
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            context.wrap_socket(socket.create_connection((host, port)), server_hostname="other.example")


def test_a_client_certificate_replaces_a_token(db: Path, tmp_path: Path):
    c_a, others = trustme.CA(), trustme.CA()
    c_a.cert_pem.write_to_path(tmp_path / "clients.pem")
    pems = {}
    for name, ca in (("ours", c_a), ("others", others)):
        made = ca.issue_cert(f"{name}@example")
        pems[name] = (tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        made.cert_chain_pems[0].write_to_path(pems[name][0])
        made.private_key_pem.write_to_path(pems[name][1])
    files = NodeFiles(tmp_path / "api")
    with node(db, files.folder, client_ca=tmp_path / "clients.pem") as address:
        for name, (cert, key) in pems.items():
            reason = asked(address, Access(ca=files.ca, cert=cert, key=key))
            assert (reason == "") == (name == "ours"), reason
        assert asked(address, Access(ca=files.ca)) != ""
    assert not files.token.exists()


def test_plain_http_only_by_name(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    with node(db, files.folder, has_tls=False) as address:
        token = files.token.read_text().strip()
        assert asked(address, Access(token=token, is_tls=False)) == ""
        assert "is it served with --no-tls?" in asked(address, Access(token=token))
    assert not files.ca.exists()


def test_a_certificate_is_renewed_before_it_expires_without_client_errors(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    now = datetime.datetime.now(datetime.UTC)
    early = now - datetime.timedelta(days=CERT_DAYS - RENEW_DAYS + 1)
    assert prepare_tls(files, [], now=early)
    authority, old = files.ca.read_bytes(), files.tls().cert.read_bytes()
    assert not prepare_tls(files, [], now=early + datetime.timedelta(days=1))
    with node(db, files.folder) as address:
        assert files.tls().cert.read_bytes() != old, "it was due"
        assert files.ca.read_bytes() == authority
        assert asked(address, Access(token=files.token.read_text().strip(), ca=files.ca)) == ""
        assert prepare_tls(files, ["new.example"]), "a new name needs a new certificate"
        assert asked(address, Access(token=files.token.read_text().strip(), ca=files.ca)) == ""
    assert not prepare_tls(files, ["new.example"])


def test_an_authority_without_its_key_is_an_error(tmp_path: Path):
    files = NodeFiles(tmp_path)
    prepare_tls(files, [])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(BadInput, match=r"ca\.key is missing"):
        prepare_tls(files, [])


def test_a_token_is_made_once(tmp_path: Path):
    files = NodeFiles(tmp_path)
    prepare_token(files)
    token = files.token.read_text()
    prepare_token(files)
    assert files.token.read_text() == token


def test_bad_questions_are_refused_in_words(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    with node(db, files.folder) as address:
        access = Access(token=files.token.read_text().strip(), ca=files.ca)
        for body, says in (
            ({"sql": "DELETE FROM calls"}, "may only read"),
            ({"sql": COUNT, "max_rows": 0}, "max_rows"),
            ({"sql": COUNT, "more": 1}, "more"),
            ({}, "sql"),
            ({"sql": "SELECT sq FROM collectives"}, "did you mean seq"),
        ):
            result = ask_all([address], access, lambda c, body=body: c.post("/api/v1/node/query", body))
            assert says in result.failures[0].reason


def test_a_clock_that_is_ahead_is_measured(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    clocks = api.Clocks(
        monotonic_ns=lambda: time.monotonic_ns() + AHEAD_NS, wall_ns=lambda: time.time_ns() + AHEAD_NS
    )
    with node(db, files.folder, clocks=clocks) as address:
        access = Access(token=files.token.read_text().strip(), ca=files.ca)
        (reply,) = ask_all([address], access, lambda connection: None).replies
    assert abs(reply.clock.ahead_ns - AHEAD_NS) <= reply.clock.error_ns
    assert reply.clock.error_ns < AHEAD_NS / 4


def test_traces_of_all_nodes_are_one_and_the_culprit_is_found(tmp_path: Path, trace):
    from stallscope.diagnose.engine import diagnose

    with fleet(tmp_path, trace) as nodes:
        result = fleet_trace.asked_of([*nodes.addresses, "127.0.0.1:1"], nodes.access())
    assert [failure.reason for failure in result.failures] == ["Connection refused"]
    whole = store.read(nodes.whole)
    for name in ("collectives", "calls", "snapshots", "processes"):
        assert len(getattr(result.trace, name)) == len(getattr(whole, name))
    (verdict,) = diagnose(result.trace).verdicts
    assert (verdict.ranks, verdict.nodes) == ([VICTIM], ["node0001"])


def test_the_time_is_limited(db: Path, tmp_path: Path):
    files = NodeFiles(tmp_path / "api")
    with node(db, files.folder) as address:
        access = Access(token=files.token.read_text().strip(), ca=files.ca)
        endless = "SELECT count(*) FROM collectives a, collectives b, collectives c, collectives d"
        rows = fanout.query(COUNT, [address], access, limits=Limits(timeout_s=5))
        assert len(rows.answer.rows) == 1
        refused = ask_all(
            [address], access, lambda c: c.post("/api/v1/node/query", {"sql": endless, "timeout_s": 0.2})
        )
        assert "took longer than 0.2 s" in refused.failures[0].reason


@pytest.mark.parametrize("text", ["", ",", "a:8443,a:8443", "a:port", "::1", ":8443", "a:70000"])
def test_nodes_that_are_none(text: str):
    with pytest.raises(BadInput, match="--nodes"):
        addresses(text)


def test_nodes():
    assert addresses(" a:1, b ,[::1]:2") == ["a:1", "b", "[::1]:2"]
    assert [host_and_port(entry) for entry in ("a:1", "b", "[::1]:2", "[::1]")] == [
        ("a", 1),
        ("b", 8443),
        ("::1", 2),
        ("::1", 8443),
    ]
