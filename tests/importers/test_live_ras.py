"""Live RAS: a job is polled over a real socket; ranks that stay behind are named, a moving job prints nothing."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import typer.testing

from stallscope.cli import app
from stallscope.commands import trace_ras
from stallscope.errors import BadInput, Unreachable
from stallscope.importers import ras_client
from stallscope.importers.ras_client import ask, host_and_port
from stallscope.settings import Settings

from .generators.job import Job
from .generators.ras import answer, text


class Service(socketserver.ThreadingTCPServer):
    """A RAS service by src/ras/client_support.cc: a line for each command, and the state until the connection closes.

    states: the answers to STATUS in order; the last one is repeated. knows_json: NCCL 2.28 and newer.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, states: list[str], *, knows_json: bool):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.states, self.knows_json, self.n_asked = states, knows_json, 0


class _Connection(socketserver.StreamRequestHandler):
    server: Service

    def handle(self) -> None:
        for raw in self.rfile:
            line = raw.decode().strip().lower()
            if line.startswith("client protocol "):
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif line.startswith("set format ") and self.server.knows_json:
                self.wfile.write(b"OK\n")
            elif line in ("status", "verbose status"):
                states = self.server.states
                self.wfile.write(states[min(self.server.n_asked, len(states) - 1)].encode())
                self.server.n_asked += 1
                return
            else:
                self.wfile.write(f"ERROR: Unknown command {line}\n".encode())


@contextmanager
def serving(states: list[str], *, knows_json: bool = True) -> Iterator[tuple[str, Service]]:
    with Service(states, knows_json=knows_json) as service:
        threading.Thread(target=service.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"127.0.0.1:{service.server_address[1]}", service
        finally:
            service.shutdown()


@pytest.fixture(autouse=True)
def _polls_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are 15 s apart on their own clock, without waiting."""
    now_s = iter(range(1_764_000_000, 1_765_000_000, 15))
    monkeypatch.setattr(ras_client.time, "time_ns", lambda: next(now_s) * 10**9)


HANGS = Job(n_ranks=8, culprits=(5,), op="all_reduce", last_step=40)
MOVES = replace(HANGS, culprits=())


def states(*, knows_json: bool, stuck: bool, n: int = 4) -> list[str]:
    job = HANGS if stuck else MOVES
    moved = [0 if stuck else 7 * i for i in range(n)]
    return [
        json.dumps(answer(job, i, moved=m)) if knows_json else text(job, moved=m) for i, m in enumerate(moved)
    ]


def watched(address: str, capsys: pytest.CaptureFixture[str], n_polls: int = 4, **options: bool) -> str:
    left = iter(range(n_polls - 1))

    def sleep(_s: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    trace_ras.watch(
        address, settings=Settings(), duration_s=None, as_json=options.get("as_json", False), sleep=sleep
    )
    return capsys.readouterr().out


@pytest.mark.parametrize("knows_json", [True, False])
def test_a_rank_that_stays_behind_is_named_once(capsys: pytest.CaptureFixture[str], knows_json: bool):
    with serving(states(knows_json=knows_json, stuck=True), knows_json=knows_json) as (address, service):
        out = watched(address, capsys)
    assert service.n_asked == 4
    assert out.lower().count("events:") == 1 and "rank 5" in out.lower()


def test_no_output_is_printed_while_the_counters_increase(capsys: pytest.CaptureFixture[str]):
    with serving(states(knows_json=True, stuck=False)) as (address, _):
        assert watched(address, capsys) == ""


def test_a_stall_that_ends_is_reported(capsys: pytest.CaptureFixture[str]):
    stuck, moving = states(knows_json=True, stuck=True, n=2), states(knows_json=True, stuck=False, n=3)
    with serving([*stuck, *moving]) as (address, _):
        out = watched(address, capsys, n_polls=5)
    assert "rank 5" in out.lower()
    assert out.rstrip().endswith("the counters increase again")


def test_json_lines(capsys: pytest.CaptureFixture[str]):
    with serving(states(knows_json=True, stuck=True)) as (address, _):
        (line,) = watched(address, capsys, as_json=True).splitlines()
    assert [verdict["ranks"] for verdict in json.loads(line)["verdicts"]] == [[5]]


def test_a_refused_connection_and_another_service_are_one_line():
    with serving([""]) as (address, _):
        pass
    with pytest.raises(Unreachable, match="NCCL_RAS_ADDR"):
        ask(address, timeout_s=2)
    with serving(["nonsense"]) as (address, _), pytest.raises(Unreachable, match="no complete answer"):
        ask(address, timeout_s=2)


@pytest.mark.parametrize("address", ["localhost", ":28028", "host:port", "host:0", "host:70000"])
def test_a_bad_address_is_refused(address: str):
    with pytest.raises(BadInput, match="HOST:PORT"):
        host_and_port(address)


def test_the_command_ends_after_its_duration(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(trace_ras.watch.__kwdefaults__, "sleep", lambda _s: None)
    with serving(states(knows_json=True, stuck=True)) as (address, service):
        words = ["trace", "--ras", "--ras-address", address, "--duration", "1s"]
        result = typer.testing.CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert service.n_asked == 2
    assert "rank 5" in result.output.lower()
