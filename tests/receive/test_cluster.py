"""A cluster of senders: nothing lost, nothing twice, every value as it was sent, also through a real collector."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from stallscope.store.hub.limits import Limits

from .requests import logs, numbers, spans
from .senders import AS_A, LOGS, METRICS, TRACES, Hub, running

pytestmark = pytest.mark.live

N_NODES = 8
N_EVENTS = 250
N_CHAINS = 80
SLOW = {2: 0.31, 5: 0.12}
"""Nodes whose health score is planted below 0.4."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    # Sealed while it runs, so that questions meet files and hot rows.
    with running(
        tmp_path_factory.mktemp("hub"), limits=Limits(seal_rows=800, settle_s=0, maintenance_s=0.1)
    ) as made:
        yield made


def chain_of(node: int, event: int) -> str | None:
    """80 chains, ten a node."""
    return f"chain-{node}-{event // 25}" if event % 25 == 0 else None


def node_events(node: int, event: int) -> dict[str, object]:
    chain = chain_of(node, event)
    more = {"causal_chain_id": chain} if chain else {}
    return {
        "event_name": "health",
        "time_unix_nano": time.time_ns(),
        "attributes": {"score": SLOW.get(node, 0.9) + event * 1e-5, "n": event, **more},
    }


def send_a_node(hub: Hub, node: int) -> None:
    """A node's events in requests of 25, over gRPC or, every second node, over HTTP."""
    resource = {"ingero.node.id": f"node-{node}", "ingero.cluster.id": "c1"}
    with grpc.insecure_channel(hub.grpc_url) as channel, httpx.Client(base_url=hub.http_url) as client:
        for first in range(0, N_EVENTS, 25):
            message = logs(
                [node_events(node, event) for event in range(first, first + 25)], resource=resource
            )
            body = message.SerializeToString()
            if node % 2:
                headers = {**AS_A, "content-type": "application/x-protobuf"}
                assert client.post("/v1/logs", content=body, headers=headers, timeout=30).status_code == 200
            else:
                channel.unary_unary(LOGS)(body, metadata=list(AS_A.items()), timeout=30)


def at_once(*jobs: tuple[object, ...]) -> None:
    """Run each (function, arguments...) in a thread of its own; the first failure is the test's."""
    failed: list[BaseException] = []

    def run(function, *arguments) -> None:  # type: ignore[no-untyped-def]
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 (raised again in the test's thread)
            failed.append(error)

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_rows_of_eight_concurrent_senders_are_stored_exactly_once(hub: Hub):
    at_once(*((send_a_node, hub, node) for node in range(N_NODES)))
    wanted = [(f"node-{node}", N_EVENTS, N_EVENTS) for node in range(N_NODES)]
    events = "events WHERE name = 'health'"
    assert (
        hub.sql(
            "SELECT node_id, count(*), count(DISTINCT json_extract(attrs, '$.n'))"
            f" FROM {events} GROUP BY node_id ORDER BY node_id"
        )
        == wanted
    )
    chains = {
        row[0] for row in hub.sql(f"SELECT causal_chain_id FROM {events} AND causal_chain_id IS NOT NULL")
    }
    assert len(chains) == N_CHAINS
    assert chains == {chain_of(node, event) for node in range(N_NODES) for event in range(0, N_EVENTS, 25)}
    low = hub.sql(
        f"SELECT node_id, max(value_double) FROM {events} GROUP BY 1 HAVING max(value_double) < 0.4 ORDER BY 1"
    )
    assert [row[0] for row in low] == [f"node-{node}" for node in sorted(SLOW)]
    assert [row[1] for row in low] == [pytest.approx(score + 249e-5) for _, score in sorted(SLOW.items())]
    assert hub.receiver.numbers()["sealed_segments"] >= 1


def test_eight_writers_of_five_thousand_events_lose_none(hub: Hub):
    def write(writer: int) -> None:
        with grpc.insecure_channel(hub.grpc_url) as channel:
            for request in range(25):
                records = [
                    {
                        "event_name": "many",
                        "time_unix_nano": time.time_ns(),
                        "attributes": {"id": f"{writer}-{request}-{i}"},
                    }
                    for i in range(25)
                ]
                body = logs(records, resource={"host.name": f"w{writer}"}).SerializeToString()
                channel.unary_unary(LOGS)(body, metadata=list(AS_A.items()), timeout=30)

    at_once(*((write, writer) for writer in range(8)))
    assert hub.sql(
        "SELECT count(*), count(DISTINCT json_extract_string(attrs, '$.id')) FROM events WHERE name = 'many'"
    ) == [(5000, 5000)]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def collector(hub: Hub, folder: Path, protocol: str) -> Iterator[str]:
    """A real collector that takes OTLP over gRPC and passes it on to the hub. Gives its address."""
    import rotel

    program = Path(rotel.__file__).with_name("rotel-agent")
    if not program.exists():
        pytest.skip("no collector: rotel holds no program for this machine")
    port = free_port()
    endpoint = f"http://{hub.grpc_url}" if protocol == "grpc" else hub.http_url
    command = [
        str(program),
        "start",
        "--otlp-grpc-endpoint",
        f"127.0.0.1:{port}",
        "--otlp-http-endpoint",
        f"127.0.0.1:{free_port()}",
        "--exporter",
        "otlp",
        "--otlp-exporter-endpoint",
        endpoint,
        "--otlp-exporter-protocol",
        protocol,
        "--otlp-exporter-custom-headers",
        f"Authorization={AS_A['authorization']}",
        "--batch-timeout",
        "100ms",
    ]
    with (
        (folder / "collector.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=20)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_records_forwarded_by_a_real_collector_keep_every_value(hub: Hub, tmp_path: Path, protocol: str):
    node = f"behind-{protocol}"
    now_ns = time.time_ns()
    resource = {"host.name": node, "k8s.cluster.name": "c1", "list": [1, "two"]}
    attributes = {
        "rank": 3,
        "text": 'ü "quoted"',
        "float": 0.1,
        "yes": True,
        "big": 1 << 60,
        "map": {"a": [1.5]},
    }
    record = {"event_name": "passed", "time_unix_nano": now_ns, "body": "words", "attributes": attributes}
    record |= {"severity_number": 13, "trace_id": bytes(range(16)), "span_id": bytes(range(8))}
    point = {"time_unix_nano": now_ns, "as_double": 0.25, "attributes": {"rank": 3}}
    span = {
        "name": "step",
        "trace_id": bytes(range(16)),
        "span_id": bytes(range(8)),
        "start_time_unix_nano": now_ns,
        "end_time_unix_nano": now_ns + 900,
        "attributes": attributes,
    }
    with collector(hub, tmp_path, protocol) as address, grpc.insecure_channel(address) as channel:
        for method, message in (
            (LOGS, logs([record], resource=resource)),
            (METRICS, numbers([point], name="gpu.power", resource=resource)),
            (TRACES, spans([span], resource=resource)),
        ):
            channel.unary_unary(method)(message.SerializeToString(), timeout=20)
        columns = "name, ts_ns, rank, value_text, value_double, duration_ns, attrs"
        question = f"SELECT {columns} FROM events WHERE node_id = '{node}'"
        until_s = time.monotonic() + 30
        while len(hub.sql(question)) < 3 and time.monotonic() < until_s:
            time.sleep(0.05)
    result = {str(row[0]): row[1:] for row in hub.sql(question)}
    assert result.keys() == {"passed", "gpu.power", "step"}, (tmp_path / "collector.log").read_text()
    assert result["passed"][:3] == (now_ns, 3, "words")
    assert result["gpu.power"][:2] == (now_ns, 3) and result["gpu.power"][3] == 0.25
    assert result["step"][:2] == (now_ns, 3) and result["step"][4] == 900
    for name in ("passed", "step"):
        kept = json.loads(str(result[name][5]))
        assert {key: kept[key] for key in attributes if key != "rank"} == {
            key: value for key, value in attributes.items() if key != "rank"
        }
        assert kept["otel.resource"]["list"] == [1, "two"]
        assert (
            kept["otel.trace_id"] == bytes(range(16)).hex() and kept["otel.span_id"] == bytes(range(8)).hex()
        )
