"""The socket for orchestrators: several readers, each with the open incidents first; no other user may connect."""

import json
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from stallscope.errors import CannotTrace
from stallscope.exporters.event_socket import EventSocket, message, message_type


def line(incident: str, state: str = "open", **values: Any) -> dict[str, Any]:
    recommendation = {"action": "look", "because": "b", "ranks": [2], "nodes": ["n0"], "confidence": 0.9}
    verdict = {
        "kind": "straggler",
        "severity": "high",
        "ranks": [2],
        "nodes": ["n0"],
        "pids": [7],
        "summary": "s",
    }
    verdict |= {"confidence": 0.9, "recommendation": recommendation}
    own = {
        "incident": incident,
        "state": state,
        "change": "opened",
        "at_ns": 5,
        "kind": "straggler",
        "cause": "block_io",
        "reason": "",
        "is_resolved": state == "closed",
    }
    return own | {"verdict": verdict} | values


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.sock"


@pytest.fixture
def server(path: Path) -> Iterator[EventSocket]:
    with closing(EventSocket(path)) as opened:
        yield opened


class Reader:
    """A client that reads messages."""

    def __init__(self, path: Path):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(30)
        self.connection.connect(str(path))
        self.stream = self.connection.makefile("rb")

    def message(self) -> dict[str, Any]:
        return dict(json.loads(self.stream.readline()))


@pytest.fixture
def connect() -> Iterator[Callable[[Path], Reader]]:
    """Connects readers, and closes them at the end."""
    with ExitStack() as stack:

        def connected(path: Path) -> Reader:
            reader = Reader(path)
            stack.callback(reader.connection.close)
            stack.callback(reader.stream.close)
            return reader

        yield connected


def test_every_reader_gets_open_incidents_and_changes(server, path, connect):
    server.take(line("a"))
    readers = [connect(path), connect(path)]
    assert [reader.message()["incident"] for reader in readers] == ["a", "a"]
    server.take(line("a", "closed", change="closed"))
    assert [reader.message()["type"] for reader in readers] == ["resolved", "resolved"]
    server.take(line("b"))
    late = connect(path)
    message = late.message()
    assert (message["incident"], message["type"]) == ("b", "straggler")
    assert message["recommendation"]["action"] == "look"


def test_reader_that_does_not_read_delays_no_other(server, path, connect):
    stuck, good = connect(path), connect(path)
    server.take(line("first"))
    assert stuck.message()["incident"] == good.message()["incident"] == "first"
    for number in range(3000):
        server.take(line(f"i{number}", "closed"))
        assert good.message()["incident"] == f"i{number}"


def test_only_the_owner_may_connect(server, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_socket_of_an_ended_agent_is_replaced_and_of_a_running_agent_is_not(server, path, connect):
    with pytest.raises(CannotTrace, match="--event-socket"):
        EventSocket(path)
    abandoned = path.with_name("old.sock")
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(abandoned))
    with closing(EventSocket(abandoned)):
        connect(abandoned)


@pytest.mark.parametrize(
    ("kind", "cause", "expected"),
    [
        ("hang", "lock_contention", "hang"),
        ("failure", "out_of_memory", "memory"),
        ("device", "unknown", "gpu_fault"),
        ("straggler", "gpu_fault", "gpu_fault"),
        ("straggler", "block_io", "straggler"),
    ],
)
def test_type_of_a_message(kind, cause, expected):
    assert message_type(line("a", kind=kind, cause=cause)) == expected


def test_end_of_the_data_is_not_the_end_of_the_fault():
    closed = line("a", "closed", is_resolved=False, reason="the job sent no more events")
    sent = message(closed)
    assert (sent["type"], sent["reason"]) == ("ended", "the job sent no more events")
    assert message(line("a", "closed"))["type"] == "resolved"
