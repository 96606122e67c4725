"""The first minute of a user: short forms that users try, sample data, exit codes, and messages on wrong input."""

import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from typer.main import get_command
from typer.testing import CliRunner

from stallscope import cli
from stallscope.check import distribution, libraries
from stallscope.commands import demo_data, job_process
from stallscope.demo import build
from stallscope.demo.scenarios import SCENARIOS
from stallscope.diagnose.report.verdict import Answer
from stallscope.errors import BadInput, NotFound, Partial, remedy_for_extra
from stallscope.exporters import otlp_wire
from stallscope.exporters.hub_channel import _reason
from stallscope.serve.node_api import Options
from stallscope.serve.node_files import NodeFiles
from stallscope.store import node

from ..query.fleet import served

trace = importlib.import_module("stallscope.commands.trace_command")
HUGE = "9" * 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "--last", HUGE), "--last"),
        (("explain", "--since", f"{HUGE}d"), "longer than 100 years"),
        (("explain", "--since", "99999999h"), "longer than 100 years"),
        (("explain", "--provider", "zorg", "--gpu", "H100"), "no provider 'zorg'"),
        (("explain", "--provider", "zorg"), "no provider 'zorg'"),
        (("explain", "--rates", "missing.yaml"), "missing.yaml: the price file does not exist"),
        (("query", "DROP TABLE collectives"), "this query uses DROP"),
        (("query", "/* x */ vacuum"), "this query uses VACUUM"),
        (("query", "ALTER TABLE nodes RENAME TO x"), "this query uses ALTER"),
    ],
)
def test_the_message_names_the_wrong_input(run, db, words, message):
    code, _, err = run(*words, "--db", db)
    assert code != 0
    assert message in err
    assert "damaged" not in err


def test_rates_without_a_known_gpu_are_reported_as_unused(run, db, tmp_path):
    rates = tmp_path / "rates.yaml"
    rates.write_text("as_of: 2026-01-01\nproviders: {}\nrates: {any: {H100: 2}}\n")
    code, _, err = run("explain", "--db", db, "--rates", rates)
    assert code == Answer.FOUND.exit_code
    assert "--rates has no effect" in err and "--gpu" in err


@pytest.mark.parametrize("text", ["localhost:4317", "grpc://localhost:4317"])
def test_otlp_at_port_4317_uses_grpc(text):
    sender = otlp_wire.wire(text, {})
    assert type(sender).__name__ == "_Grpc"
    sender.close()


@pytest.mark.parametrize("text", ["localhost:4318", "collector:9999", "http://localhost:4318"])
def test_otlp_at_another_port_uses_http(text):
    assert type(otlp_wire.wire(text, {})).__name__ == "_Http"


@pytest.mark.parametrize("text", ["localhost:port", ":4318", "ftp://x", "localhost:99999"])
def test_an_otlp_address_that_is_none_is_refused(text):
    with pytest.raises(BadInput, match="--otlp"):
        otlp_wire.wire(text, {})


def test_the_shell_completes_the_names_of_scenarios():
    done = subprocess.run(
        [sys.executable, "-c", "from stallscope.cli import main; main()"],
        capture_output=True,
        text=True,
        env=os.environ
        | {"_STALLSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "stallscope demo ", "COMP_CWORD": "2"},
    )
    names = set(done.stdout.split()) or completed("demo", "")
    assert {scenario.name for scenario in SCENARIOS} <= names


def completed(command: str, incomplete: str) -> set[str]:
    """The completion of the first argument, without a shell."""
    parameters = get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    return {str(item.value) for item in parameters[0].shell_complete(None, incomplete)}


def test_sample_data_have_the_answer_that_is_next_to_them(run, tmp_path):
    code, out, _ = run("demo", "data", tmp_path / "data")
    assert code == 0
    traces = sorted((tmp_path / "data").glob("*.db"))
    assert len(traces) == demo_data.RANKS // demo_data.RANKS_PER_NODE
    answer = json.loads((tmp_path / "data" / demo_data.ANSWER_FILE).read_text())
    run("merge", *traces, "-o", tmp_path / "all.db")
    (verdict,) = json.loads(run("explain", tmp_path / "all.db", "--json")[1])["verdicts"]
    assert verdict["kind"] == answer["kind"]
    assert verdict["ranks"] == answer["ranks"]
    assert verdict["causes"][0]["cause"] == answer["cause"]
    assert verdict["period_steps"] == answer["period_steps"]
    assert f"stallscope merge {traces[0]}" in out
    assert run("demo", "data", tmp_path / "data")[0] == 4


def test_a_machine_without_a_compiler_gets_the_simulator(monkeypatch, tmp_path):
    monkeypatch.setattr("stallscope.capture.probes.preflight.check", lambda: None)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    done = CliRunner().invoke(cli.app, ["demo", "sleep"])
    assert done.exit_code == 0
    assert "simulated, because" in done.stderr and "no C compiler" in done.stderr
    assert "Rank 2" in done.stdout


def test_shipped_libraries_are_used_before_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    folder = build.shipped_folder()
    folder.mkdir()
    for name in build.LIBRARIES:
        (folder / name).touch()
    assert build.build() == folder
    (folder / "libnccl.so.2").unlink()
    assert not build._is_usable(folder)


@pytest.fixture
def one_of_two(db: Path, tmp_path: Path):
    """Arguments that select two nodes, one of which does not answer."""
    files = NodeFiles(tmp_path / "api")
    with served(Options(db=db, listen="127.0.0.1:0", node="here", files=files.folder)) as address:
        yield (
            *("--nodes", f"{address},127.0.0.1:1", "--timeout", "10s"),
            *("--token-file", files.token, "--ca-cert", files.ca),
        )


def test_a_partial_answer_has_its_own_exit_code_and_names_the_missing_node(run, one_of_two):
    for words in (("explain",), ("query", "SELECT count(*) AS n FROM collectives")):
        code, out, err = run(*words, "--json", *one_of_two)
        assert code == Partial.exit_code
        answer = json.loads(out)
        (missing,) = answer["missing"]
        assert missing["address"] == "127.0.0.1:1" and missing["reason"]
        assert "the answer lacks 1 of 2 nodes" in err
    assert answer["rows"][0]["n"] > 0
    assert Partial.exit_code not in {each.exit_code for each in Answer}


def test_a_wrong_token_of_an_agent_gets_advice_for_an_agent(run, one_of_two, tmp_path):
    wrong = tmp_path / "wrong"
    token = (tmp_path / "api/token").read_text().strip()
    wrong.write_text(f"{token[:-1]}{'aA'[token[-1] == 'a']}")
    words = [*one_of_two[:4], "--token-file", wrong, *one_of_two[6:]]
    _, _, err = run("query", "SELECT 1 AS n", *words)
    assert "api/token" in err and "hub token create" not in err


def test_a_missing_client_certificate_is_named(run, db, tmp_path):
    clients = trustme.CA()
    clients.cert_pem.write_to_path(tmp_path / "clients.pem")
    files = NodeFiles(tmp_path / "api")
    options = Options(
        db=db, listen="127.0.0.1:0", node="here", files=files.folder, client_ca=tmp_path / "clients.pem"
    )
    with served(options) as address:
        _, _, err = run("query", "SELECT 1 AS n", "--nodes", address, "--ca-cert", files.ca)
    assert "client certificate" in err and "--client-cert" in err


def test_a_host_without_an_address_is_named_as_unknown():
    details = (
        "errors resolving hub.invalid:4317: [field:hostname lookup error:address lookup failed for"
        " hub.invalid:4317: Domain name not found]"
    )
    assert _reason(grpc.StatusCode.UNAVAILABLE, details) == "its name is not known"


def test_a_hub_without_tls_is_not_a_question_of_certificates():
    details = "Tls handshake failed: SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER: certificate verification: OK"
    assert _reason(grpc.StatusCode.UNAVAILABLE, details) == "it does not use TLS: --hub-insecure"


@pytest.mark.parametrize(
    ("package", "extra"), [("psycopg", "shared"), ("deltalake", "publish"), ("duckdb", "all")]
)
def test_the_remedy_for_a_missing_package_installs_it(monkeypatch, capsys, package, extra):
    def needs() -> None:
        raise ModuleNotFoundError(name=f"{package}.part")

    monkeypatch.setattr(cli, "_exit_code", needs)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.endswith(f"the package {package}: {remedy_for_extra(extra)}\n")


def test_a_node_trace_is_not_imported_again(run, db, tmp_path):
    code, _, err = run("import", db, "--db", tmp_path / "again.db")
    assert code == BadInput.exit_code
    assert "is a node trace already" in err and f"stallscope explain {db}" in err
    assert not (tmp_path / "again.db").exists()


def test_a_hub_that_requires_a_client_certificate_is_recognised():
    ca, clients = trustme.CA(), trustme.CA()
    made = ca.issue_cert("localhost")
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port(
        "localhost:0",
        grpc.ssl_server_credentials([(made.private_key_pem.bytes(), chain)], clients.cert_pem.bytes(), True),
    )
    server.start()
    try:
        credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
        with (
            grpc.secure_channel(f"localhost:{port}", credentials) as channel,
            pytest.raises(grpc.RpcError) as raised,
        ):
            channel.unary_unary("/x/y")(b"", timeout=20)
    finally:
        server.stop(0)
    assert "--client-cert" in _reason(raised.value.code(), raised.value.details())


@pytest.mark.parametrize(("term", "has_screen"), [("xterm-256color", True), ("dumb", False), ("", False)])
def test_the_page_needs_a_terminal_that_moves_its_cursor(monkeypatch, term, has_screen):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(trace.sys, "stdout", io.TextIOWrapper(Terminal()))
    monkeypatch.setattr(trace.sys, "stderr", io.TextIOWrapper(Terminal()))
    assert trace._has_screen() is has_screen


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_the_job_waits_for_the_gate_and_its_exit_code_is_returned(tmp_path):
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", f"open({str(mark)!r}, 'w'); raise SystemExit(7)"]
    with job_process.waiting(command, os.environ) as job:
        assert not mark.exists()
        job.start()
        assert job.exit_code() == 7
    assert mark.exists()


def test_a_job_does_not_start_when_tracing_fails(tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(RuntimeError), job_process.waiting(["touch", str(mark)], os.environ) as job:
        raise RuntimeError
    os.waitpid(job.pid, 0)
    assert not mark.exists()


def test_a_command_that_does_not_exist_is_named():
    with pytest.raises(NotFound, match="no-such-program"), job_process.waiting(["no-such-program"], {}):
        pass


def test_the_process_of_pid_is_described():
    text = job_process.described(os.getpid())
    assert f"process {os.getpid()} (" in text and "loaded: no NCCL or CUDA library yet" in text
    with pytest.raises(NotFound):
        job_process.described(1 << 30)


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=ubuntu\nID_LIKE=debian\n", "apt-get install"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper install"),
        ("ID=alpine\n", "apk add"),
        ("ID=unheard-of\n", "apt-get install"),
    ],
)
def test_the_remedy_is_a_command_of_the_distribution(tmp_path, release, command):
    path = tmp_path / "os-release"
    path.write_text(release)
    assert distribution.commands(path).install == command


def test_processes_of_other_users_are_counted():
    with tempfile.TemporaryDirectory() as folder:
        proc = Path(folder)
        proc.chmod(0o755)
        fill_proc(proc)
        if os.geteuid():
            assert libraries.unreadable_processes(proc) == 1
            return
        pid = os.fork()  # root reads every file
        if pid == 0:
            os.setuid(65534)
            os._exit(libraries.unreadable_processes(proc))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def fill_proc(proc: Path) -> None:
    """Two processes, of which the maps of one are closed, and a kernel thread."""
    for pid, command_line, mode in ((1, b"init", 0o000), (2, b"", 0o000), (3, b"python", 0o644)):
        home = proc / str(pid)
        home.mkdir()
        (home / "cmdline").write_bytes(command_line)
        (home / "maps").touch(mode=mode)


def test_rows_older_than_the_age_limit_are_pruned(db, tmp_path):
    path = tmp_path / "trace.db"
    path.write_bytes(db.read_bytes())
    before = node.read(path).collectives["ts_ns"]
    middle_ns = int(sorted(before.tolist())[len(before) // 2])
    store = node.NodeTrace(path)
    store.prune(0)  # no limit of either kind
    assert store.prune(0, before_ns=middle_ns) > 0
    store.close()
    after = node.read(path).collectives["ts_ns"]
    assert sorted(after.tolist()) == sorted(t for t in before.tolist() if t > middle_ns)
