"""The hub as a whole: refusals, authentication, rows from an agent, and its end."""

import json
import re
import shlex
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import trustme
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from typer.testing import CliRunner

from stallscope import cli, hub
from stallscope.errors import BadInput
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import Op
from stallscope.events.trace import Clock
from stallscope.exporters import hub_sender
from stallscope.exporters.hub_logs import METHOD
from stallscope.exporters.hub_output import HubOutput, Target
from stallscope.serve.tls import Files
from stallscope.serve.tokens import FILE_NAME, Tokens, bearer, token_in
from stallscope.store.hub.store import HubStore

from ..patience import until
from .conftest import COMMAND, PATIENCE_S, HubProcess, Served

pytestmark = pytest.mark.live

CLOCK = Clock(0, monotonic_ns=0, wall_ns=1_700_000_000_000_000_000)


def collectives(n: int, first: int = 0) -> Array:
    made = layout.empty(layout.COLLECTIVES, n)
    made["ts_ns"] = np.arange(first, first + n) * 1000
    made["pid"], made["seq"], made["op"] = 41, np.arange(first, first + n), Op.ALL_REDUCE
    made["comm_hash"], made["nranks"], made["comm_rank"] = (1 << 63) + 5, 2, 1
    made["ledger_ns"] = np.arange(n * 16).reshape(n, 16)
    return made


def line_to(port: int, spool: Path, token_file: Path, **changes: object) -> HubOutput:
    target = {
        "address": f"localhost:{port}",
        "node": "node-7",
        "cluster": "blue",
        "token": lambda: token_in(token_file),
    }
    return HubOutput.open(Target(**target | changes), spool, max_spool_bytes=10**8)


def rows_of(folder: Path, table: str, tenant: str = "default") -> list[dict[str, object]]:
    """The rows of a hub that is not running."""
    store = HubStore.open(folder)
    try:
        return store.snapshot(tenant).hot[table].to_pylist()
    finally:
        store.close()


def test_without_certificates_the_hub_names_the_flags_and_opens_no_port(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*COMMAND, "hub", "--db", str(tmp_path / "h"), "--api", f"127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    for flag in ("--tls-cert", "--tls-key", "--insecure-no-tls"):
        assert flag in done.stderr
    assert not (tmp_path / "h").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.pure
@pytest.mark.parametrize(
    "more", [["--tls-cert", "a"], ["--tls-key", "b"], ["--insecure-no-tls", "--tls-cert", "a"]]
)
def test_incomplete_or_conflicting_tls_flags_are_refused(tmp_path: Path, more: list[str]):
    done = CliRunner().invoke(cli.app, ["hub", "--db", str(tmp_path / "h"), *more])
    assert isinstance(done.exception, BadInput)
    assert "--tls-cert" in str(done.exception) or "--insecure-no-tls" in str(done.exception)
    assert not (tmp_path / "h").exists()


def test_bad_files_and_addresses_are_refused_before_anything_listens(tmp_path: Path, tls: Files):
    tls.key.chmod(0o644)
    with (tmp_path / "said").open("w") as out:
        for options, words in (
            (hub.Options(db=tmp_path / "h", tls=tls), "chmod 600"),
            (hub.Options(db=tmp_path / "h", api="8081"), "ADDR:PORT"),
            (hub.Options(db=tmp_path / "h", otlp_grpc="192.0.2.77:4317", api="127.0.0.1:0"), "--otlp-grpc"),
        ):
            with pytest.raises(BadInput, match=words), hub.started(options, out=out):
                pass
    assert "ready" not in (tmp_path / "said").read_text()


def test_rows_from_an_agent_are_stored_value_by_value_after_shutdown(
    hub_process: Callable[..., HubProcess], tmp_path: Path, tls: Files, ca_file: Path
):
    folder = tmp_path / "h"
    (tmp_path / "token").write_text(Tokens(folder / FILE_NAME).create(["ingest"], "default"))
    process = hub_process(folder, "--tls-cert", tls.cert, "--tls-key", tls.key)
    line = line_to(process.ports().otlp_grpc, tmp_path / "spool", tmp_path / "token", ca_file=ca_file)
    calls = layout.empty(layout.CALLS, 1)
    calls["symbol"], calls["op"], calls["pid"] = 1, Op.ALLOC, 41
    sent = collectives(50)
    line.offer(
        {"collectives": sent, "calls": calls}, clock=CLOCK, symbols=("", "cudaMalloc"), lost={"ring": 2}
    )
    until(lambda: "hub has 53" in line.status(), state=line.status)  # with a loss and a reading of the clock
    line.close()
    assert process.ended(signal.SIGTERM) == 0
    got = rows_of(folder, "collectives")
    assert [row["seq"] for row in got] == sent["seq"].tolist()
    assert [row["ts_ns"] for row in got] == [CLOCK.wall_ns + t for t in sent["ts_ns"].tolist()]
    assert {(r["node_id"], r["cluster_id"], r["op"], r["comm_hash"]) for r in got} == {
        ("node-7", "blue", "all_reduce", f"{(1 << 63) + 5:016x}")
    }
    assert [row["on_cpu_ns"] for row in got] == sent["ledger_ns"][:, 15].tolist()
    assert all(row["wait_enter_ns"] is None for row in got)
    assert rows_of(folder, "calls")[0]["symbol"] == "cudaMalloc"
    assert rows_of(folder, "losses")[0]["n_lost"] == 2


def test_a_second_hub_on_the_same_folder_fails_in_one_line(
    hub_process: Callable[..., HubProcess], tmp_path: Path
):
    first = hub_process(tmp_path / "h", "--insecure-no-tls")
    first.ports()
    second = hub_process(tmp_path / "h", "--insecure-no-tls")
    assert second.ended() == 4
    assert len(second.said.read_text().splitlines()) == 1
    assert first.ended(signal.SIGINT) == 0
    assert "ended" in first.said.read_text()
    assert "INSECURE" in first.said.read_text()


def test_tokens_are_made_and_revoked_while_it_runs(served: Served, ca: trustme.CA):
    def command(*words: str) -> str:
        done = CliRunner().invoke(cli.app, ["hub", "token", *words, "--db", str(served.folder)])
        assert done.exit_code == 0
        return done.stdout

    token = command("create", "--scope", "read,admin", "--tenant", "t", "--expires", "90d").splitlines()[-1]
    url = f"https://localhost:{served.ports.api}/metrics"
    context = ssl.create_default_context()
    ca.configure_trust(context)
    with httpx.Client(verify=context, headers={"Authorization": bearer(token)}) as client:
        assert client.get(url).status_code == 200
        listed = json.loads(command("list", "--json"))
        assert [(entry["tenant"], entry["scopes"], entry["state"]) for entry in listed] == [
            ("t", ["read", "admin"], "valid")
        ]
        assert token.split("_", 2)[2] not in command("list")
        command("revoke", listed[0]["id"])
        until(lambda: client.get(url).status_code == 401)  # the hub reads its tokens at most twice a second


def test_metrics_have_the_names_that_the_rules_and_the_documentation_use(
    served: Served, ca: trustme.CA, repository: Path
):
    done = CliRunner().invoke(
        cli.app, ["hub", "token", "create", "--scope", "admin", "--db", str(served.folder)]
    )
    context = ssl.create_default_context()
    ca.configure_trust(context)
    with httpx.Client(
        verify=context, headers={"Authorization": bearer(done.stdout.splitlines()[-1])}
    ) as client:
        output = client.get(f"https://localhost:{served.ports.api}/metrics").text
    kinds = dict(line.split()[2:4] for line in output.splitlines() if line.startswith("# TYPE"))
    used = {
        name
        for path in ("deploy/prometheus/stallscope-rules.yaml", "docs/node-health.md")
        for name in re.findall(r"stallscope_hub_\w+", (repository / path).read_text())
    }
    assert len(used) == 5
    assert {name: kinds.get(name) for name in used} == {
        name: "counter" if name.endswith("_total") else "gauge" for name in used
    }


def _grpc_code(port: int, ca: trustme.CA, token: str | None) -> grpc.StatusCode:
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    metadata = [("authorization", bearer(token))] if token else []
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        try:
            channel.unary_unary(METHOD)(b"", metadata=metadata, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_each_port_requires_a_scoped_token_and_no_file_holds_a_secret(
    served: Served, ca: trustme.CA, tmp_path: Path
):
    good, reads = (token_in(served.token_file(scope)) for scope in ("ingest", "admin"))
    expired = token_in(served.token_file("ingest", "admin", expires_in_s=-1))
    revoked = token_in(served.token_file("ingest", "admin"))
    served.tokens.revoke(revoked.split("_")[1])
    wrong = good[:-4] + "AAAA"
    context = ssl.create_default_context()
    ca.configure_trust(context)
    expected = {
        good: (200, 403),
        reads: (403, 200),
        expired: (401, 401),
        revoked: (401, 401),
        wrong: (401, 401),
    }
    codes = {
        200: grpc.StatusCode.OK,
        403: grpc.StatusCode.PERMISSION_DENIED,
        401: grpc.StatusCode.UNAUTHENTICATED,
    }
    with httpx.Client(verify=context) as client:
        for token, (to_send, to_read) in expected.items():
            headers = {"Authorization": bearer(token), "Content-Type": "application/x-protobuf"}
            body = ExportLogsServiceRequest().SerializeToString()
            sent = client.post(
                f"https://localhost:{served.ports.otlp_http}/v1/logs", headers=headers, content=body
            )
            assert sent.status_code == to_send
            assert _grpc_code(served.ports.otlp_grpc, ca, token) is codes[to_send]
            read = client.get(f"https://localhost:{served.ports.api}/metrics?token={token}", headers=headers)
            assert read.status_code == to_read
    assert _grpc_code(served.ports.otlp_grpc, ca, None) is grpc.StatusCode.UNAUTHENTICATED
    written = [path for path in (*served.folder.rglob("*"), tmp_path / "said") if path.is_file()]
    log = (served.folder / "audit.jsonl").read_text()
    assert {json.loads(line)["status"] for line in log.splitlines()} == {200, 401, 403}
    for path in written:
        if path.suffix == ".token":
            continue
        for token in expected:
            assert token.split("_", 2)[2].encode() not in path.read_bytes(), path


def test_senders_need_a_certificate_and_askers_do_not(
    hub_process: Callable[..., HubProcess], tmp_path: Path, tls: Files, ca: trustme.CA, ca_file: Path
):
    senders = trustme.CA()
    senders.cert_pem.write_to_path(tmp_path / "senders.pem")
    own = senders.issue_cert("agent-7")
    cert, key = tmp_path / "agent.crt", tmp_path / "agent.key"
    own.cert_chain_pems[0].write_to_path(cert)
    own.private_key_pem.write_to_path(key)
    token = Tokens(tmp_path / "h" / FILE_NAME).create(["ingest", "read"], "default")
    (tmp_path / "token").write_text(token)
    files = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-client-ca", tmp_path / "senders.pem")
    process = hub_process(tmp_path / "h", *files)
    ports = process.ports()
    context = ssl.create_default_context()
    ca.configure_trust(context)
    with httpx.Client(verify=context, headers={"Authorization": bearer(token)}) as client:
        assert client.get(f"https://localhost:{ports.api}/api/v1/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            client.post(f"https://localhost:{ports.otlp_http}/v1/logs")
    without = line_to(ports.otlp_grpc, tmp_path / "s1", tmp_path / "token", ca_file=ca_file)
    without.offer({"collectives": collectives(5)}, clock=CLOCK)
    until(lambda: "hub away" in without.status())
    line = line_to(
        ports.otlp_grpc,
        tmp_path / "s2",
        tmp_path / "token",
        ca_file=ca_file,
        client_cert=cert,
        client_key=key,
    )
    line.offer({"collectives": collectives(5)}, clock=CLOCK)
    until(lambda: "hub has 6" in line.status())
    assert "hub away" in without.status()
    line.close()
    without.close()


def test_a_hub_that_is_killed_and_comes_back_has_every_row_once(
    hub_process: Callable[..., HubProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_sender, "MAX_RETRY_S", 0.5)
    folder = tmp_path / "h"
    (tmp_path / "token").write_text(Tokens(folder / FILE_NAME).create(["ingest"], "default"))
    process = hub_process(folder, "--insecure-no-tls")
    port = process.ports().otlp_grpc
    line = line_to(port, tmp_path / "spool", tmp_path / "token", insecure=True)
    n = 0
    for _ in range(2):
        for _ in range(40):
            line.offer({"collectives": collectives(20, n)}, clock=CLOCK)
            n += 20
            time.sleep(0.005)
        assert process.ended(signal.SIGKILL) == -signal.SIGKILL
        line.offer({"collectives": collectives(20, n)}, clock=CLOCK)
        n += 20
        process = hub_process(folder, "--insecure-no-tls", grpc=f"127.0.0.1:{port}")
        process.ports()
    until(lambda: "away" not in line.status() and not list((tmp_path / "spool").iterdir()))
    line.close()
    assert process.ended(signal.SIGTERM) == 0
    assert sorted(row["seq"] for row in rows_of(folder, "collectives")) == list(range(n))


def test_quickstart_twice_leaves_everything_as_it_was(tmp_path: Path):
    def run() -> str:
        done = CliRunner().invoke(
            cli.app, ["hub", "quickstart", "--db", str(tmp_path / "a hub"), "--name", "hub.example"]
        )
        assert done.exit_code == 0
        return done.stdout

    output = run()
    files = {path: path.read_bytes() for path in (tmp_path / "a hub").rglob("*") if path.is_file()}
    assert run() == output
    assert {path: path.read_bytes() for path in (tmp_path / "a hub").rglob("*") if path.is_file()} == files
    assert "--hub hub.example:4317" in output
    tokens = Tokens(tmp_path / "a hub" / FILE_NAME)
    assert tokens.identity(bearer(token_in(tmp_path / "a hub" / "ingest.token"))).scopes == {"ingest"}
    assert "sst_" not in output
    start = next(line for line in output.splitlines() if "--tls-key" in line)
    assert str(tmp_path / "a hub") in shlex.split(start)
