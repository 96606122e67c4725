"""Attacks on the gRPC port by frames of HTTP/2. An honest agent next to each attack must lose nothing."""

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pyarrow as pa
import pytest

from . import http2
from .conftest import MEMORY, Attacked
from .test_hub_process import ARROW, arrow_request

pytestmark = pytest.mark.live

N = 2_000


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Connections that stay open until the honest agent has sent its rows."""
    with ExitStack() as stack:
        yield stack


def reset_calls(token: str) -> bytes:
    """Calls that end as soon as they begin (CVE-2023-44487)."""
    head, body = http2.call_headers(ARROW, token), http2.message(arrow_request(pa.table({"ts_ns": [1]})))
    return b"".join(
        http2.frame(http2.HEADERS, http2.END_HEADERS, stream, head)
        + http2.frame(http2.DATA, http2.END_STREAM, stream, body)
        + http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL)
        for stream in range(1, 2 * N, 2)
    )


def endless_headers(token: str) -> bytes:
    """Header fields that never end (CVE-2024-27316)."""
    more = http2.frame(http2.CONTINUATION, 0, 1, http2.field("x", "y" * 1_000))
    return http2.frame(http2.HEADERS, 0, 1, http2.call_headers(ARROW, token)) + more * N


def many_headers(token: str) -> bytes:
    head = http2.call_headers(ARROW, token)
    head += b"".join(http2.field(f"key-{number}", "value" * 5) for number in range(300))
    return b"".join(http2.frame(http2.HEADERS, 5, stream, head) for stream in range(1, 200, 2))


def pings(_: str) -> bytes:
    return http2.frame(http2.PING, payload=bytes(8)) * 50 * N


def settings(_: str) -> bytes:
    return http2.frame(http2.SETTINGS, payload=struct.pack(">HI", 3, 100)) * 50 * N


def priorities(_: str) -> bytes:
    return http2.frame(http2.PRIORITY, stream=1, payload=b"\0\0\0\0\x10") * 50 * N


def unreadable_frames(_: str) -> bytes:
    return b"".join(
        http2.frame(kind, 0xFF, stream, b"\xff" * 9) for kind in range(256) for stream in (0, 1, 2)
    )


@pytest.mark.parametrize(
    "flood",
    [reset_calls, endless_headers, many_headers, pings, settings, priorities, unreadable_frames],
)
@pytest.mark.parametrize("has_token", [False, True], ids=["stranger", "tenant"])
def test_a_flood_of_frames_blocks_no_other_client(
    sockets: ExitStack, attacked: Attacked, flood: Callable[[str], bytes], has_token: bool
):
    """The answers are not read, and the connections stay open."""
    content = flood(attacked.token if has_token else "")
    for _ in range(3):
        http2.sent(http2.connection(attacked.port("otlp_grpc"), sockets), content)
    assert attacked.peak_bytes() < MEMORY


def test_answers_that_cannot_be_sent_block_no_other_client(sockets: ExitStack, attacked: Attacked):
    """The window of the sender is 0, so the hub keeps the answers."""
    head, body = (
        http2.call_headers(ARROW, attacked.token),
        http2.message(arrow_request(pa.table({"ts_ns": [1]}))),
    )
    calls = b"".join(
        http2.frame(http2.HEADERS, http2.END_HEADERS, stream, head)
        + http2.frame(http2.DATA, http2.END_STREAM, stream, body)
        for stream in range(1, 200, 2)
    )
    for _ in range(10):
        http2.sent(http2.connection(attacked.port("otlp_grpc"), sockets, http2.NO_WINDOW), calls)
    assert attacked.peak_bytes() < MEMORY
