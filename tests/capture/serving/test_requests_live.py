"""Requests to a real server, with real eBPF: each kind of response, connection and end."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.probes.program import Program
from stallscope.capture.serving.engine_spans import id_hash
from stallscope.capture.serving.requests import request_rows
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import RequestFlag

from ...patience import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import GAP_S, N_TOKENS

pytestmark = [pytest.mark.bpf, pytest.mark.live]

GAP_NS = int(GAP_S * 1e9)


@dataclass
class Server:
    """A server, and the requests to it that were recorded."""

    process: subprocess.Popen[str]
    address: str
    program: Program
    requests: list[Array] = field(default_factory=list)
    tokens: list[Array] = field(default_factory=list)

    def connection(self) -> socket.socket:
        if not self.address.isdigit():
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.address)
            return connection
        return socket.create_connection(("127.0.0.1", int(self.address)))

    def drain(self) -> None:
        self.requests.append(self.program.requests.drain())
        self.tokens.append(self.program.tokens.drain())

    def open_connection(self, column: str = "is_chunked", least: int = 0) -> Array:
        """The connection with an open request, once a column has at least this value."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            rows = self.program.connections()
            request = rows["request"]
            rows = rows[
                (request["ts_ns"] > 0) & (request["pid"] == self.process.pid) & (rows[column] >= least)
            ]
            if len(rows):
                return rows[0]
        raise AssertionError("no open request")

    def recorded(self, n: int) -> Array:
        """The first n requests, once they have been recorded."""
        end_s = time.monotonic() + PATIENCE_S
        while sum(map(len, self.requests)) < n and time.monotonic() < end_s:
            self.drain()
            time.sleep(0.005)
        rows = np.concatenate(self.requests)
        assert len(rows) == n, rows
        return rows


@pytest.fixture
def server(program: Program, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def start(address: str = "0", *, is_engine: bool = True) -> Server:
        script = Path(__file__).parent / "scripted_server.py"
        process = subprocess.Popen([sys.executable, script, address], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        running.append(Server(process, process.stdout.readline().strip(), program))
        if is_engine:
            program.record_requests([process.pid])
        running[-1].drain()
        running[-1].requests.clear()
        running[-1].tokens.clear()
        return running[-1]

    yield start
    for each in running:
        program.forget_engines([each.process.pid])
        with each.process:  # closes the pipe
            each.process.kill()


def post(path: str, body: bytes = b"{}") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end) and (part := connection.recv(1 << 16)):
        data += part
    return data


def in_order(*times_ns: int) -> bool:
    return all(before <= after for before, after in pairwise(times_ns))


def test_each_token_of_a_chunked_stream_is_counted(server):
    traced = server()
    before_ns = time.monotonic_ns()
    with traced.connection() as connection:
        connection.sendall(post("/stream?key=secret"))
        until(connection, b"0\r\n\r\n")
        request = traced.recorded(1)[0]
    assert (request["method"], request["path"], request["status"]) == (b"POST", b"/stream", 200)
    assert request["request_bytes"] == len(post("/stream?key=secret"))
    assert request["n_tokens"] == N_TOKENS
    assert request["flags"] == RequestFlag.STREAMS
    times = [
        int(request[name]) for name in ("ts_ns", "read_ns", "answer_ns", "first_ns", "last_ns", "end_ns")
    ]
    assert in_order(before_ns, *times, time.monotonic_ns())
    assert request["first_ns"] - request["answer_ns"] >= 0.9 * GAP_NS
    gaps_ns = np.concatenate(traced.tokens)["gap_ns"]
    assert len(gaps_ns) == N_TOKENS - 1
    assert gaps_ns.min() >= 0.9 * GAP_NS
    assert gaps_ns.max() == request["gap_ns"]


def test_the_hash_of_the_id_at_the_begin_of_a_response_is_recorded(server):
    running = server()
    for path in ("/ids", "/spaced_id", "/long_id", "/sized"):
        with running.connection() as connection:
            connection.sendall(post(path))
            until(connection, b"0\r\n\r\n" if path == "/ids" else {"/sized": b"9"}.get(path, b"}"))
    rows = request_rows(running.recorded(4), {}, 0)
    rows = rows[np.argsort(rows["ts_ns"])]
    assert rows["id_hash"].tolist() == [id_hash("cmpl-7")] * 2 + [UNKNOWN] * 2


def test_a_chunk_in_three_writes_is_one_token(server):
    traced = server()
    with traced.connection() as connection:
        connection.sendall(post("/pieces"))
        until(connection, b"0\r\n\r\n")
    assert traced.recorded(1)[0]["n_tokens"] == N_TOKENS


def test_a_last_chunk_in_two_writes_ends_the_response(server):
    traced = server()
    with traced.connection() as connection:
        for _ in range(2):  # the next request on the connection is not affected
            connection.sendall(post("/split_end"))
            until(connection, b"0\r\n\r\n")
        requests = traced.recorded(2)
    assert [int(each["n_tokens"]) for each in requests] == [1, 1]
    assert [int(each["flags"]) & RequestFlag.ABORTED for each in requests] == [0, 0]


def test_a_response_with_a_length_ends_with_its_last_byte_and_keeps_the_connection(server):
    traced = server()
    with traced.connection() as connection:
        for body in (b"{}", b"x" * 3000):
            connection.sendall(post("/sized", body))
            until(connection, b"0123456789")
        first, second = traced.recorded(2)
    assert [int(each["n_tokens"]) for each in (first, second)] == [0, 0]
    assert [int(each["request_bytes"]) for each in (first, second)] == [
        len(post("/sized")),
        len(post("/sized", b"x" * 3000)),
    ]
    assert first["status"] == 201
    assert first["flags"] == 0
    assert first["first_ns"] - first["answer_ns"] >= 0.9 * GAP_NS
    assert second["ts_ns"] >= first["end_ns"]


def test_pipelined_requests_are_separate(server):
    traced = server()
    with traced.connection() as connection:
        connection.sendall(post("/sized") + post("/stream") + post("/sized"))
        until(connection, b"0\r\n\r\n")
        until(connection, b"0123456789")
        requests = traced.recorded(3)
    assert requests["path"].tolist() == [b"/sized", b"/stream", b"/sized"]
    assert requests["n_tokens"].tolist() == [0, N_TOKENS, 0]
    assert (requests["flags"] & RequestFlag.PIPELINED > 0).tolist() == [False, True, True]


def test_a_body_that_arrives_later_completes_the_request(server):
    traced = server()
    whole = post("/sized", b"y" * 100)
    with traced.connection() as connection:
        connection.sendall(whole[:-60])
        traced.open_connection()
        time.sleep(GAP_S)
        connection.sendall(whole[-60:])
        until(connection, b"0123456789")
        request = traced.recorded(1)[0]
    assert request["complete_ns"] - request["read_ns"] >= 0.9 * GAP_NS
    assert request["request_bytes"] == len(whole)


def test_a_response_without_a_length_ends_with_its_connection(server):
    traced = server()
    with traced.connection() as connection:
        connection.sendall(b"GET /closing HTTP/1.1\r\n\r\n")
        until(connection, b"never")
    request = traced.recorded(1)[0]
    assert (request["method"], int(request["n_tokens"]), int(request["flags"])) == (
        b"GET",
        N_TOKENS,
        RequestFlag.STREAMS,
    )


def test_a_connection_that_the_client_resets_aborts_the_request(server):
    traced = server()
    with traced.connection() as connection:
        connection.sendall(post("/never"))
        traced.open_connection()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert traced.recorded(1)[0]["flags"] & RequestFlag.ABORTED


def test_a_request_without_an_answer_is_open(server):
    traced = server()
    with traced.connection() as connection:
        connection.sendall(post("/never"))
        waiting = traced.open_connection()["request"]
    assert waiting["path"] == b"/never"
    assert waiting["flags"] == RequestFlag.UNANSWERED


@pytest.mark.parametrize("path", ["/full", "/polled"])  # until a write fails; until a poll returns
def test_the_time_in_which_a_client_takes_no_data_is_counted(server, path):
    traced = server()
    with traced.connection() as connection:
        connection.sendall(post(path))
        full_ns = 0
        while (last_ns := int(traced.open_connection("full_since_ns", 1)["full_since_ns"])) != full_ns:
            full_ns = last_ns  # the client's kernel takes data until its own buffer is full
            time.sleep(0.05)
        time.sleep(0.2)
        until(connection, b"0\r\n\r\n")
        request = traced.recorded(1)[0]
    assert request["blocked_ns"] >= 0.19e9


def test_requests_on_a_unix_socket(server, tmp_path):
    traced = server(str(tmp_path / "socket"))
    with traced.connection() as connection:
        connection.sendall(post("/stream"))
        until(connection, b"0\r\n\r\n")
        connection.sendall(post("/sized"))
        until(connection, b"0123456789")
        requests = traced.recorded(2)
    assert requests["n_tokens"].tolist() == [N_TOKENS, 0]


def test_requests_to_other_processes_are_not_recorded(server):
    other, traced = server(is_engine=False), server()
    for each in (other, traced):
        with each.connection() as connection:
            connection.sendall(post("/sized"))
            until(connection, b"0123456789")
    assert traced.recorded(1)["pid"].tolist() == [traced.process.pid]


def test_the_hash_of_the_client_is_of_its_address(server):
    running = server()
    clients = []
    for address in ("127.0.0.1", "127.0.0.1", "127.0.0.2"):
        with socket.create_connection(
            ("127.0.0.1", int(running.address)), source_address=(address, 0)
        ) as client:
            client.sendall(post("/sized"))
            until(client, b"0123456789")
        clients.append(int(running.recorded(len(clients) + 1)[-1]["client"]))
    assert clients[0] == clients[1] != clients[2]
    assert 0 not in clients
