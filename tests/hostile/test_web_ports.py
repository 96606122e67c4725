"""Attacks on the ports that speak HTTP: OTLP, the API and MCP."""

import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import httpx
import pyarrow as pa
import pytest
from tests.patience import until
from tests.receive.requests import logs, numbers, spans

from .conftest import MEMORY, Attacked

pytestmark = pytest.mark.live

PROTOBUF, JSON = "application/x-protobuf", "application/json"


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Connections that stay open until the honest agent has sent its rows."""
    with ExitStack() as stack:
        yield stack


def sent(address: tuple[str, int], content: bytes, sockets: ExitStack) -> socket.socket:
    """A connection with some bytes; the hub may end it early."""
    connection = sockets.enter_context(socket.create_connection(address, timeout=10))
    with suppress(OSError):
        connection.sendall(content)
    return connection


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: hub", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("port", "path"), [("otlp_http", "/v1/logs"), ("api", "/api/v1/sql"), ("api", "/mcp")]
)
@pytest.mark.parametrize("has_token", [False, True], ids=["stranger", "tenant"])
def test_unfinished_bodies_hold_little_memory_and_block_no_other_client(
    sockets: ExitStack, attacked: Attacked, port: str, path: str, has_token: bool
):
    lines = [f"Content-Type: {JSON if port == 'api' else PROTOBUF}", "Content-Length: 30000000"]
    if has_token:
        lines.append(f"Authorization: Bearer {attacked.token if port == 'otlp_http' else attacked.reader}")
    for _ in range(60):
        sent(attacked.port(port), head(path, *lines) + bytes(1 << 20), sockets)
    assert attacked.peak_bytes() < MEMORY


@pytest.mark.parametrize("port", ["otlp_http", "api"])
def test_unfinished_headers_block_no_other_client(sockets: ExitStack, attacked: Attacked, port: str):
    for _ in range(200):
        sent(attacked.port(port), b"POST /v1/logs HTTP/1.1\r\nHost: hub\r\nX: ", sockets)
    assert is_answering(attacked)


def is_answering(attacked: Attacked) -> bool:
    """Whether the API answers a valid token: the refusals of an address limit only requests without one."""
    headers = {"authorization": f"Bearer {attacked.reader}"}
    return httpx.get(attacked.url("api", "/api/v1/health"), headers=headers, timeout=30).status_code == 200


def resource_bomb() -> bytes:
    return logs([{"body": "x"}] * 2_000, resource={"note": "y" * 200_000}).SerializeToString()


def in_parts(body: bytes) -> bytes:
    """Several gzip members, each a part of the body."""
    size = len(body) // 4 + 1
    return b"".join(gzip.compress(body[at : at + size]) for at in range(0, len(body), size))


def by_zstd(body: bytes) -> bytes:
    return pa.Codec("zstd").compress(body, asbytes=True)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("gzip", gzip.compress), ("gzip", in_parts), ("deflate", zlib.compress), ("zstd", by_zstd)],
    ids=["gzip", "gzip members", "deflate", "zstd"],
)
@pytest.mark.parametrize("plain", [bytes(200 << 20), resource_bomb()], ids=["zeros", "one large attribute"])
def test_a_compressed_body_that_decodes_to_much_is_refused(
    attacked: Attacked, encoding: str, packed: Callable[[bytes], bytes], plain: bytes
):
    headers = {
        "content-type": PROTOBUF,
        "content-encoding": encoding,
        "authorization": f"Bearer {attacked.token}",
    }
    body = packed(plain)
    with httpx.Client(timeout=60) as client:
        for _ in range(3):
            answer = client.post(attacked.url("otlp_http", "/v1/logs"), content=body, headers=headers)
            assert answer.status_code == 413
    assert attacked.peak_bytes() < MEMORY


def json_resource_bomb() -> tuple[str, bytes]:
    records = [{"timeUnixNano": "1", "body": {"stringValue": "x"}}] * 2_000
    note = {"key": "note", "value": {"stringValue": "y" * 200_000}}
    part = {"resource": {"attributes": [note]}, "scopeLogs": [{"logRecords": records}]}
    return "logs", json.dumps({"resourceLogs": [part]}).encode()


def json_objects_bomb() -> tuple[str, bytes]:
    return "logs", b'{"resourceLogs":[' + b"{}," * 1_000_000 + b"{}]}"


def json_numbers_bomb() -> tuple[str, bytes]:
    """Buckets of a histogram: two bytes of JSON for each number."""
    point = {"timeUnixNano": "1", "bucketCounts": [0] * 1_500_000, "explicitBounds": []}
    metric = {"name": "m", "histogram": {"aggregationTemporality": 2, "dataPoints": [point]}}
    return "metrics", json.dumps({"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}).encode()


def json_links_bomb() -> tuple[str, bytes]:
    span = {"name": "s", "traceId": "0" * 32, "spanId": "0" * 16, "links": [{}] * 600_000}
    return "traces", json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


@pytest.mark.parametrize("bomb", [json_resource_bomb, json_objects_bomb, json_numbers_bomb, json_links_bomb])
def test_json_that_decodes_to_much_stays_within_the_memory(
    attacked: Attacked, bomb: Callable[[], tuple[str, bytes]]
):
    signal, body = bomb()
    headers = {"content-type": JSON, "authorization": f"Bearer {attacked.token}"}
    with httpx.Client(timeout=60) as client:
        for _ in range(3):
            answer = client.post(attacked.url("otlp_http", f"/v1/{signal}"), content=body, headers=headers)
            assert answer.status_code in (200, 400, 413, 503)
    assert attacked.peak_bytes() < MEMORY


@pytest.mark.parametrize("signal", ["metrics", "traces"])
def test_one_attribute_of_many_points_or_spans_is_refused(attacked: Attacked, signal: str):
    resource = {"note": "y" * 200_000}
    many: dict[str, Callable[[], bytes]] = {
        "metrics": lambda: numbers([{"as_double": 1.0}] * 2_000, resource=resource).SerializeToString(),
        "traces": lambda: spans([{"name": "s"}] * 2_000, resource=resource).SerializeToString(),
    }
    headers = {"content-type": PROTOBUF, "authorization": f"Bearer {attacked.token}"}
    url = attacked.url("otlp_http", f"/v1/{signal}")
    answer = httpx.post(url, content=many[signal](), headers=headers, timeout=60)
    assert answer.status_code == 413
    assert attacked.peak_bytes() < MEMORY


@pytest.mark.parametrize(
    ("port", "path"),
    [("otlp_http", "/v1/logs"), ("api", "/api/v1/sql"), ("api", "/mcp"), ("api", "/metrics")],
)
def test_a_flood_of_refusals_at_a_port_stays_small_in_the_audit_log(
    attacked_alone: Attacked, port: str, path: str
):
    headers = {"content-type": PROTOBUF if port == "otlp_http" else JSON, "authorization": "Bearer nonsense"}
    with httpx.Client(timeout=30) as client:
        for _ in range(300):
            answer = client.post(attacked_alone.url(port, path), content=b"", headers=headers)
            assert answer.status_code in (401, 405, 429)
    assert len((attacked_alone.folder / "audit.jsonl").read_text().splitlines()) <= 100


def deep(n: int) -> str:
    return "[" * n + "]" * n


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/mcp", json.dumps([{"jsonrpc": "2.0", "id": n, "method": "tools/list"} for n in range(10_000)])),
        ("/mcp", f'{{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {deep(50_000)}}}'),
        (
            "/mcp",
            '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "'
            + "x" * 900_000
            + '"}}',
        ),
        ("/api/v1/sql", f'{{"sql": {deep(100_000)}}}'),
        ("/api/v1/sql", json.dumps({"sql": "SELECT " + "(" * 20_000 + "1" + ")" * 20_000})),
        ("/api/v1/sql", json.dumps({"sql": "SELECT " + " + ".join(["1"] * 100_000)})),
        ("/api/v1/tools/fleet.cluster.verdicts", f'{{"cluster": {deep(100_000)}}}'),
    ],
    ids=["batch", "deep call", "long name", "deep json", "deep sql", "long sql", "deep tool"],
)
def test_odd_questions_get_one_line_and_the_hub_goes_on(attacked: Attacked, path: str, body: str):
    headers = {
        "content-type": JSON,
        "accept": "application/json, text/event-stream",
        "authorization": f"Bearer {attacked.reader}",
    }
    answer = httpx.post(attacked.url("api", path), content=body, headers=headers, timeout=60)
    assert answer.status_code < 500 or answer.status_code == 503
    assert "Traceback" not in answer.text and "/stallscope/" not in answer.text
    until(lambda: is_answering(attacked))
