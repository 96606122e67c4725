"""Reports of agents to a hub over gRPC: thresholds come back, and the hub shows the straggler to its tenant only."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from stallscope import hub
from stallscope.exporters.hub_channel import HubChannel, Target
from stallscope.exporters.metric_values import Meter
from stallscope.exporters.node_health import Machine, NodeHealth
from stallscope.health import state_file
from stallscope.serve.tokens import FILE_NAME, Tokens

from .emulated import N_COLLECTIVES, WORK_S, Fault, Job, S

LOCAL = "127.0.0.1:0"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[hub.Ports, Tokens]]:
    folder = tmp_path_factory.mktemp("hub")
    with hub.started(hub.Options(db=folder, otlp_grpc=LOCAL, otlp_http=LOCAL, api=LOCAL)) as ports:
        yield ports, Tokens(folder / FILE_NAME)


def channel(port: int, token: str, node: str = "n0") -> HubChannel:
    return HubChannel(
        Target(address=f"127.0.0.1:{port}", node=node, cluster="c1", token=lambda: token, insecure=True)
    )


def stragglers(served: tuple[hub.Ports, Tokens], tenant: str) -> list[dict[str, object]]:
    ports, tokens = served
    header = {"Authorization": f"Bearer {tokens.create(('read',), tenant)}"}
    answer = httpx.get(f"http://127.0.0.1:{ports.api}/api/v1/page/jobs", headers=header, timeout=30)
    return list(answer.json()["health"]["stragglers"])


@dataclass
class OverGrpc:
    """Stands for the hub of emulated machines: sends their reports."""

    line: HubChannel

    def report(self, body: bytes, tenant: str) -> dict[str, Any]:
        answer = self.line.report_health(body)
        assert answer is not None
        return dict(json.loads(answer))


def test_hub_answers_reports_and_shows_the_straggler_to_its_tenant(served, tmp_path: Path):
    ports, tokens = served
    job = Job(tmp_path, n_nodes=4, faults={0: Fault(lambda _: 1.25)})
    with closing(channel(ports.otlp_grpc, tokens.create(("ingest",), "a"))) as line:
        job.hub = OverGrpc(line)  # type: ignore[assignment]
        for _ in job.run(75):
            pass
    assert [machine.state.state for machine in job.machines] == ["straggler", "healthy", "healthy", "healthy"]
    (row,) = stragglers(served, "a")
    assert (row["node"], str(row["reason"])[:10]) == ("n0", "throughput")
    assert stragglers(served, "b") == []


@pytest.mark.parametrize("scope", ["read", "ingest"])
def test_report_needs_the_scope_ingest_and_a_valid_shape(served, scope: str):
    ports, tokens = served
    with closing(channel(ports.otlp_grpc, tokens.create((scope,), "a"))) as line:
        assert line.report_health(b"{}") is None


def test_hub_without_the_method_gives_no_answer():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port(LOCAL)
    server.start()
    with closing(channel(port, "token")) as line:
        assert line.report_health(b"{}") is None
        assert line.complaint() == ""  # an older hub, which takes batches
    server.stop(0)


def test_an_unusable_hub_is_named_without_any_batch(served):
    """Without a job the agent sends only reports, so a wrong address or token must show there."""
    ports, tokens = served
    with closing(channel(unused_port(), "token")) as line:
        assert line.report_health(b"{}") is None
        assert line.complaint() == "connection refused"
    with closing(channel(ports.otlp_grpc, tokens.create(("read",), "a"))) as line:
        assert line.report_health(b"{}") is None
        assert line.complaint().endswith("--token-file")


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_agent_publishes_its_state(tmp_path: Path):
    job, notes = Job(tmp_path, n_nodes=1), list[str]()
    meter, db = Meter(start_wall_ns=1, boot_wall_ns=1), tmp_path / "job.db"
    limits = {"throughput": {"median": 100.0, "threshold": 90.0}}
    answer = json.dumps({"n_nodes": 16, "quorum": 4, "signals": limits}).encode()
    reports: list[dict[str, Any]] = []

    def ask(report: bytes) -> bytes:
        reports.append(json.loads(report))
        return answer

    machine = Machine("n0", "c1", db)
    health = NodeHealth(
        machine, ask, note=notes.append, meter=meter, clock_ns=lambda: round(job.at_s * S) + 1
    )
    job.machines[0].windows.take = health.take  # type: ignore[method-assign]
    for _ in job.run(60):
        health.second()
    health.close()
    expected = N_COLLECTIVES / WORK_S  # 27 collectives a second, far below the threshold
    assert reports[0]["signals"]["throughput"] == pytest.approx(expected, rel=0.05)
    assert list(dict.fromkeys(report["state"] for report in reports)) == ["unknown", "suspect", "straggler"]
    assert notes == [
        f"this machine is a straggler: throughput {expected:.3g} 1/s; the median of 16 machines is 100 1/s"
    ]
    saved = state_file.read(db)
    assert saved is not None
    assert (saved.state, round(saved.score or 0, 2)) == ("straggler", round(expected / 100, 2))
    series = {metric.name: {each.values: each.number for each in rows} for metric, rows in meter.read()}
    assert series["stallscope.node.state"][("straggler",)] == 1.0
