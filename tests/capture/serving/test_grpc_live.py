"""Requests to a real gRPC server, with real eBPF: unary and streaming, many streams on a connection, each end."""

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest

from stallscope.capture.probes.program import Program
from stallscope.capture.serving.requests import open_rows, request_rows, with_text_paths
from stallscope.events import kernel, layout
from stallscope.events.layout import Array
from stallscope.events.names import RequestFlag
from stallscope.events.request_times import is_failed

sys.path.insert(0, str(Path(__file__).parent))
from grpc_server import GAP_S, LARGE_BYTES, N_TOKENS

pytestmark = [pytest.mark.bpf, pytest.mark.live]

PATIENCE_S = 20.0
GAP_NS = int(GAP_S * 1e9)
N_STREAMS = 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, DATA, SETTINGS, WINDOW = 1, 0, 4, 8
END_STREAM, END_HEADERS = 1, 4
INDEXED_POST, INDEXED_HTTP = b"\x83", b"\x86"  # RFC 7541, appendix A: :method POST, :scheme http


@dataclass
class Server:
    """A server, and the requests to it that were recorded."""

    process: subprocess.Popen[str]
    port: int
    program: Program
    requests: list[Array] = field(default_factory=list)
    tokens: list[Array] = field(default_factory=list)

    def channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", options)

    def drain(self) -> None:
        self.requests.append(self.program.requests.drain())
        self.tokens.append(self.program.tokens.drain())

    def open_requests(self) -> Array:
        rows = open_rows(self.program.connections(), self.program.http2_connections(), self.program.streams())
        return rows[rows["request"]["pid"] == self.process.pid]

    def waiting(self, until: Callable[[Array], bool]) -> Array:
        """The open requests, once they fulfil a condition."""
        end_s = time.monotonic() + PATIENCE_S
        while not until(rows := self.open_requests()):
            assert time.monotonic() < end_s, rows
            time.sleep(0.005)
        return rows

    def recorded(self, n: int) -> Array:
        """The first n requests in the order of their arrival, once they have been recorded."""
        end_s = time.monotonic() + PATIENCE_S
        while sum(map(len, self.requests)) < n and time.monotonic() < end_s:
            self.drain()
            time.sleep(0.005)
        rows = with_text_paths(layout.joined([np.empty(0, kernel.REQUEST), *self.requests]))
        assert len(rows) == n, rows
        return rows[np.argsort(rows["ts_ns"], kind="stable")]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[subprocess.Popen[str], int]]:
    words = [sys.executable, Path(__file__).parent / "grpc_server.py"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    with process:
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def server(program: Program, running: tuple[subprocess.Popen[str], int]) -> Iterator[Server]:
    process, port = running
    traced = Server(process, port, program)
    program.record_requests([process.pid])
    traced.drain()
    traced.requests.clear()
    traced.tokens.clear()
    yield traced
    program.forget_engines([process.pid])


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def text(data: bytes, *, is_huffman: bool = False) -> bytes:
    return bytes([len(data) | is_huffman << 7]) + data


def fields(path: bytes) -> bytes:
    """The header fields of a request. path: the field :path."""
    rest = (
        b"\x00"
        + text(b"content-type")
        + text(b"application/grpc")
        + b"\x00"
        + text(b"te")
        + text(b"trailers")
    )
    return INDEXED_POST + INDEXED_HTTP + path + b"\x01" + text(b"localhost") + rest


def message(data: bytes = b"prompt") -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


def call(stream: int, path: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, fields(path)) + frame(DATA, END_STREAM, stream, message())


def read_all(connection: socket.socket) -> threading.Thread:
    def read() -> None:
        with suppress(OSError):
            while connection.recv(1 << 16):
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_a_unary_call_has_no_tokens(server: Server):
    before_ns = time.monotonic_ns()
    with server.channel() as channel:
        assert channel.unary_unary("/tests.Engine/Whole")(b"prompt") == b"whole"
        request = server.recorded(1)[0]
    assert (request["method"], request["path"]) == (b"POST", b"/tests.Engine/Whole")
    assert (int(request["n_tokens"]), int(request["flags"])) == (0, 0)
    names = ("ts_ns", "read_ns", "complete_ns", "first_ns", "last_ns", "end_ns")
    times = [before_ns, *(int(request[name]) for name in names), time.monotonic_ns()]
    assert times == sorted(times)
    assert request["first_ns"] - request["complete_ns"] >= 0.9 * GAP_NS
    assert request["request_bytes"] == len(message(b"prompt"))


def test_the_model_is_known_only_of_requests_to_triton(server: Server):
    body = b"\x0a\x06resnet\x12\x011"  # ModelInferRequest: model_name, model_version
    with server.channel() as channel:
        for path in ("/inference.GRPCInferenceService/ModelInfer", "/tests.Engine/Whole"):
            channel.unary_unary(path)(body)
        requests = server.recorded(2)
    assert requests["model"].tolist() == [b"resnet", b""]


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a\x40" + bytes(64),  # a name that is too long
        b"\x0a\x06res",  # a message that ends in the name
        b"\x12\x06resnet",  # another field
        b"\x0a",
    ],
)
def test_a_message_without_a_short_name_has_no_model(server: Server, body: bytes):
    with server.channel() as channel:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(body)
        (request,) = server.recorded(1)
    assert request["model"] == b""


def test_a_call_with_the_status_of_an_error_has_failed(server: Server):
    paths = ["/tests.Engine/Refused", "/tests.Engine/Unknown", "/tests.Engine/BegunRefused"]
    with server.channel() as channel:
        for path in 2 * paths:  # the second time, the server refers to fields by their index
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(path)(b"prompt")
        for _ in range(2):
            with pytest.raises(grpc.RpcError):
                list(channel.unary_stream("/tests.Engine/Broken")(b"prompt"))
        requests = server.recorded(8)
    assert is_failed(request_rows(requests, {}, 0)).all()


def test_a_stream_that_ends_without_a_message_has_not_failed(server: Server):
    with server.channel() as channel:
        for _ in range(2):
            assert list(channel.unary_stream("/tests.Engine/Begun")(b"prompt")) == []
            for path in ("/tests.Engine/Empty", "/inference.GRPCInferenceService/ModelStreamInfer"):
                assert list(channel.stream_stream(path)(iter([b"prompt"]))) == []
        requests = server.recorded(6)
    assert not is_failed(request_rows(requests, {}, 0)).any()


RAW_SERVER = """
import socket, sys
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
connection, _ = listening.accept()
for answer in sys.argv[1:]:
    data = b""
    while not data.endswith(b"prompt") and (part := connection.recv(1 << 16)):
        data += part
    for byte in bytes.fromhex(answer):  # each byte in a write of its own
        connection.sendall(bytes([byte]))
connection.recv(1)
"""


def test_a_status_with_the_huffman_code_and_from_the_dynamic_table(program: Program):
    coded = b"\x40" + text(huffman("grpc-status"), is_huffman=True)  # inserted into the table
    statuses = [
        coded + text(b"\x07", is_huffman=True),  # the code of "0"
        b"\xbe",  # index 62: the same field
        b"\x7e" + text(b"13"),  # the same name
        b"\xbe",
        b"\xbf",
        b"\x00" + text(b"grpc-status") + text(b"0"),
        b"\x00" + text(b"other-stats") + text(b"5"),
    ]
    streams = [2 * i + 1 for i in range(len(statuses))]
    begin, end = END_HEADERS, END_HEADERS | END_STREAM
    answers = [
        frame(HEADERS, begin, i, b"\x88") + frame(DATA, 0, i, message()) + frame(HEADERS, end, i, status)
        for i, status in zip(streams, statuses, strict=True)
    ]
    words = [sys.executable, "-c", RAW_SERVER, *(answer.hex() for answer in answers)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = Server(process, int(process.stdout.readline()), program)
        program.record_requests([process.pid])
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
            for n, stream in enumerate(streams, 1):
                connection.sendall(call(stream, b"\x04" + text(b"/tests.Engine/Whole")))
                requests = server.recorded(n)
    program.forget_engines([process.pid])
    assert is_failed(request_rows(requests, {}, 0)).tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_requests_of_a_client_have_its_address(server: Server):
    with server.channel() as channel:
        channel.unary_unary("/tests.Engine/Whole")(b"prompt")
        channel.unary_unary("/tests.Engine/Whole")(b"prompt")
        requests = server.recorded(2)
    assert requests["client"][0] == requests["client"][1] != 0


def test_each_message_of_a_stream_is_a_token(server: Server):
    with server.channel() as channel:
        assert len(list(channel.unary_stream("/tests.Engine/Tokens")(b"prompt"))) == N_TOKENS
        request = server.recorded(1)[0]
    assert request["path"] == b"/tests.Engine/Tokens"
    assert request["n_tokens"] == N_TOKENS
    assert request["flags"] == RequestFlag.STREAMS
    gaps_ns = np.concatenate(server.tokens)["gap_ns"]
    assert len(gaps_ns) == N_TOKENS - 1
    assert gaps_ns.min() >= 0.9 * GAP_NS
    assert gaps_ns.max() == request["gap_ns"]


def test_many_streams_on_a_connection_are_separate(server: Server):
    with server.channel() as channel:
        for _ in range(2):  # the second time, the client refers to the path by its index
            answers = [channel.unary_stream("/tests.Engine/Tokens")(b"x" * 10 * i) for i in range(N_STREAMS)]
            assert [len(list(answer)) for answer in answers] == [N_TOKENS] * N_STREAMS
            wholes = [channel.unary_unary("/tests.Engine/Whole").future(b"y") for _ in range(N_STREAMS)]
            assert [whole.result() for whole in wholes] == [b"whole"] * N_STREAMS
        requests = server.recorded(4 * N_STREAMS)
    streamed = requests[requests["path"] == b"/tests.Engine/Tokens"]
    assert streamed["n_tokens"].tolist() == [N_TOKENS] * 2 * N_STREAMS
    assert sorted(set(streamed["request_bytes"].tolist())) == [5 + 10 * i for i in range(N_STREAMS)]
    assert (requests["path"] == b"/tests.Engine/Whole").sum() == 2 * N_STREAMS
    assert len(np.concatenate(server.tokens)) == 2 * N_STREAMS * (N_TOKENS - 1)


def test_each_message_of_a_client_on_an_answered_stream_begins_a_request(server: Server):
    n_rounds = 3
    answered = threading.Semaphore(0)

    def prompts() -> Iterator[bytes]:
        for _ in range(n_rounds):
            yield b"prompt"
            for _ in range(N_TOKENS):
                answered.acquire(timeout=PATIENCE_S)

    with server.channel() as channel:
        for _ in channel.stream_stream("/tests.Engine/Chat")(prompts()):
            answered.release()
        requests = server.recorded(n_rounds)
    assert requests["n_tokens"].tolist() == [N_TOKENS] * n_rounds
    assert (requests["first_ns"] - requests["ts_ns"]).min() >= 0.9 * GAP_NS
    assert requests["gap_ns"].max() < requests["end_ns"].max() - requests["ts_ns"].min()


def test_a_call_without_an_answer_is_open_until_the_client_cancels_it(server: Server):
    with server.channel() as channel:
        call = channel.unary_unary("/tests.Engine/Never").future(b"prompt")
        row = server.waiting(lambda rows: len(rows) == 1)[0]
        assert row["request"]["path"] == b"/tests.Engine/Never"
        assert row["request"]["flags"] == RequestFlag.UNANSWERED
        call.cancel()
        request = server.recorded(1)[0]
    assert request["flags"] & (RequestFlag.ABORTED | RequestFlag.CLIENT_LEFT)
    assert len(server.open_requests()) == 0


def test_the_end_of_a_connection_ends_its_requests(server: Server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        path = b"\x04" + text(b"/tests.Engine/Never")
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + call(1, path) + call(3, path))
        server.waiting(lambda rows: len(rows) == 2)
    requests = server.recorded(2)
    assert (requests["flags"] & RequestFlag.ABORTED > 0).all()


def test_paths_with_the_huffman_code_and_from_the_dynamic_table(server: Server):
    # "/tests.Engine/Whole" in the code of RFC 7541, appendix B
    coded = huffman("/tests.Engine/Whole")
    literal = b"\x44" + text(coded, is_huffman=True)  # name 4 (:path), inserted into the table
    other = (
        b"\x40" + text(b"x-request") + text(b"secret")
    )  # one more insertion: the path is now the second entry
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        read_all(connection)
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + call(1, literal))
        server.recorded(1)
        headers = fields(b"\xbe") + other  # index 62
        connection.sendall(frame(HEADERS, END_HEADERS, 3, headers) + frame(DATA, END_STREAM, 3, message()))
        server.recorded(2)
        for byte in call(5, b"\xbf"):  # index 63; each byte in a write of its own
            connection.sendall(bytes([byte]))
        requests = server.recorded(3)
    assert requests["path"].tolist() == [b"/tests.Engine/Whole"] * 3


def huffman(path: str) -> bytes:
    """The code of RFC 7541, appendix B, for the letters of these tests."""
    codes = {
        **{"/": "011000", "t": "01001", "e": "00101", "s": "01000", ".": "010111", "E": "1100000"},
        **{"n": "101010", "g": "100110", "i": "00110", "W": "1110010", "h": "100111", "o": "00111"},
        **{"l": "101000", "r": "101100", "p": "101011", "c": "00100", "-": "010110"},
        **{"a": "00011", "u": "101101"},
    }
    bits = "".join(codes[letter] for letter in path)
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def test_a_connection_from_before_the_trace_is_recorded(server: Server):
    server.program.forget_engines([server.process.pid])
    with server.channel() as channel:
        whole, tokens = (
            channel.unary_unary("/tests.Engine/Whole"),
            channel.unary_stream("/tests.Engine/Tokens"),
        )
        whole(b"before")
        server.program.record_requests([server.process.pid])
        whole(b"after")
        list(tokens(b"a path that is new on the connection"))
        requests = server.recorded(2)
    assert requests["path"].tolist() == [b"(unknown)", b"/tests.Engine/Tokens"]
    assert requests["n_tokens"].tolist() == [0, N_TOKENS]


def test_a_client_that_opens_no_window_blocks_the_server(server: Server):
    path = b"\x04" + text(b"/tests.Engine/Large")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        read_all(connection)
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + call(1, path))
        row = server.waiting(lambda rows: len(rows) == 1 and rows["full_since_ns"][0] > 0)[0]
        stalled_ns = time.monotonic_ns()
        time.sleep(0.2)
        more = struct.pack(">I", 2 * N_TOKENS * LARGE_BYTES)
        opened_ns = time.monotonic_ns()
        connection.sendall(frame(WINDOW, 0, 0, more) + frame(WINDOW, 0, 1, more))
        request = server.recorded(1)[0]
    assert row["full_since_ns"] <= stalled_ns
    assert request["blocked_ns"] >= opened_ns - stalled_ns
    assert request["n_tokens"] == N_TOKENS
