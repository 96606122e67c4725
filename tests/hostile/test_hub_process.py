"""Attacks on a real hub process with a memory limit. An honest agent next to each attack must lose nothing."""

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pytest
from tests.hub.conftest import HubProcess
from tests.hub.test_hub import CLOCK, collectives
from tests.patience import until
from tests.receive.requests import logs

from stallscope.exporters.hub_logs import METHOD as LOGS
from stallscope.exporters.hub_output import HubOutput, Target
from stallscope.serve.tokens import FILE_NAME, Tokens

pytestmark = pytest.mark.live

ARROW = "/stallscope.v1.Ingest/Append"
MEMORY = 1_000_000_000
N_BATCHES, ROWS = 20, 50


@dataclass(frozen=True)
class Hub:
    """A running hub, and the tokens of its tenants."""

    process: HubProcess
    folder: Path
    attacker: str
    honest: str


@dataclass(frozen=True)
class Attacked:
    """A running hub under attack. token: of the tenant that attacks."""

    process: HubProcess
    address: str
    token: str
    folder: Path

    def peak_bytes(self) -> int:
        """The peak memory of the process."""
        text = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) * 1024


@contextmanager
def started(folder: Path) -> Iterator[Hub]:
    """A hub with a memory limit."""
    tokens = Tokens(folder / FILE_NAME)
    attacker, honest = (tokens.create(["ingest"], tenant) for tenant in ("attacker", "honest"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STALLSCOPE_HUB_MEMORY_BYTES", str(MEMORY))
        process = HubProcess(folder, "--insecure-no-tls")
    try:
        yield Hub(process, folder, attacker, honest)
    finally:
        process.process.kill()
        process.process.wait()


@contextmanager
def honest_agent(hub: Hub, folder: Path) -> Iterator[Attacked]:
    """The hub under attack; at the end an honest agent sends rows, and all of them must arrive."""
    address = f"127.0.0.1:{hub.process.ports().otlp_grpc}"
    node = f"n{time.monotonic_ns()}"
    target = Target(address=address, node=node, cluster="c", token=lambda: hub.honest, insecure=True)
    line = HubOutput.open(target, folder / "spool", max_spool_bytes=10**8)
    yield Attacked(hub.process, address, hub.attacker, hub.folder)
    for number in range(N_BATCHES):
        line.offer({"collectives": collectives(ROWS, number * ROWS)}, clock=CLOCK)
        time.sleep(0.02)
    until(lambda: not list((folder / "spool").glob("*.batch")), state=line.status)
    line.close()
    assert not list((folder / "spool").rglob("*.batch")), line.status()
    assert "dropped" not in line.status() and "set aside" not in line.status()
    assert hub.process.process.poll() is None
    assert "Traceback" not in hub.process.said.read_text()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Hub]]:
    """The hub of most attacks; a new hub once an attack has ended it."""
    with ExitStack() as stack:
        hubs: list[Hub] = []

        def current() -> Hub:
            if not hubs or hubs[-1].process.process.poll() is not None:
                hubs.append(stack.enter_context(started(tmp_path_factory.mktemp("hostile") / "hub")))
            return hubs[-1]

        yield current


@pytest.fixture
def attacked(running: Callable[[], Hub], tmp_path: Path) -> Iterator[Attacked]:
    with honest_agent(running(), tmp_path) as attacked:
        yield attacked


@pytest.fixture
def attacked_alone(tmp_path: Path) -> Iterator[Attacked]:
    """A hub without earlier refusals."""
    with started(tmp_path / "hub") as hub, honest_agent(hub, tmp_path) as attacked:
        yield attacked


@pytest.fixture
def open_streams() -> Iterator[Callable[[str, int, list[tuple[str, str]]], None]]:
    """Opens n calls that send their headers and then no message, until the end of the test."""
    release, channels = threading.Event(), []

    def never() -> Iterator[bytes]:
        release.wait()
        yield from ()

    def opened(address: str, n: int, headers: list[tuple[str, str]]) -> None:
        for number in range(n):
            channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1), ("x", number)])
            channel.stream_unary(LOGS).future(never(), metadata=headers)
            channels.append(channel)

    yield opened
    release.set()
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("has_token", [False, True], ids=["stranger", "tenant"])
def test_idle_streams_do_not_block_other_clients(
    open_streams: Callable[[str, int, list[tuple[str, str]]], None], attacked: Attacked, has_token: bool
):
    """The streams stay open until `attacked` has sent and checked the rows of the honest agent."""
    headers = [("authorization", f"Bearer {attacked.token}")] if has_token else []
    open_streams(attacked.address, 100, headers)


def arrow_request(rows: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(rows)
    return with_head(sink.getvalue().to_pybytes())


def with_head(body: bytes) -> bytes:
    """A request of the Arrow endpoint with this stream of rows for `events`."""
    head = {
        "batch_id": "b",
        "node": "n",
        "cluster": "c",
        "tables": [{"name": "events", "n_bytes": len(body)}],
    }
    return json.dumps(head).encode() + b"\n" + body


def dictionary_bomb() -> bytes:
    n = 500_000
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int8)), pa.array(["x" * 8_000]))
    return arrow_request(pa.table({"ts_ns": pa.array(np.arange(n)), "value_text": text}))


def compressed_bomb() -> bytes:
    n = 900_000
    columns = {name: np.zeros(n, np.int64) for name in ("ts_ns", "seq", "step", "pid", "tid", "duration_ns")}
    return arrow_request(pa.table(columns), compression="zstd")


def resource_bomb() -> bytes:
    records = [{"body": "x"}] * 2_000
    return logs(records, resource={"note": "y" * 200_000}).SerializeToString()


def attributes_bomb() -> bytes:
    """A record with 1.3 million attributes of five bytes."""
    message = logs([{"body": "x"}])
    record = message.resource_logs[0].scope_logs[0].log_records[0]
    record.MergeFromString(b"\x32\x03\x0a\x01k" * 1_300_000)
    return message.SerializeToString()


def resources_bomb() -> bytes:
    return b"\x0a\x00" * 1_000_000


def record_batches_bomb() -> bytes:
    """40,000 record batches of one row."""
    batch = pa.record_batch({"ts_ns": pa.array([1])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(40_000):
            writer.write_batch(batch)
    return with_head(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    "bomb",
    [
        dictionary_bomb,
        compressed_bomb,
        resource_bomb,
        attributes_bomb,
        resources_bomb,
        record_batches_bomb,
    ],
)
def test_a_small_request_that_decodes_to_much_is_refused(attacked: Attacked, bomb: Callable[[], bytes]):
    body = bomb()
    method = ARROW if body.startswith(b"{") else LOGS
    assert len(gzip.compress(body, 1)) < 5_000_000
    with grpc.insecure_channel(attacked.address, [("grpc.max_send_message_length", -1)]) as channel:
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(method)(
                    body, metadata=[("authorization", f"Bearer {attacked.token}")], timeout=20
                )
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "decoded" in refused.value.details()
    assert attacked.peak_bytes() < MEMORY


def part(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    length, size = b"", len(content)
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def test_a_value_nested_too_deeply_is_refused_without_a_stack_trace(attacked: Attacked):
    nested = b"\x10\x01"
    for _ in range(90):
        nested = part(5, part(1, nested))
    attribute = part(6, part(1, b"k") + part(2, nested))
    body = part(1, part(2, part(2, attribute)))
    with grpc.insecure_channel(attacked.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(LOGS)(body, metadata=[("authorization", f"Bearer {attacked.token}")])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_record_with_very_many_attributes_is_stored_soon(attacked: Attacked):
    """Below the limit, but each attribute was once a column: a body of 2 MB took minutes."""
    records = [{"attributes": {f"key{number}": number for number in range(100_000)}}]
    with grpc.insecure_channel(attacked.address) as channel:
        channel.unary_unary(LOGS)(
            logs(records).SerializeToString(),
            metadata=[("authorization", f"Bearer {attacked.token}")],
            timeout=60,
        )


def test_a_flood_of_refusals_stays_small_in_the_audit_log(attacked_alone: Attacked):
    with grpc.insecure_channel(attacked_alone.address) as channel:
        call = channel.unary_unary(LOGS)
        for _ in range(500):
            with pytest.raises(grpc.RpcError):
                call(b"", metadata=[("authorization", "Bearer nonsense")], timeout=20)
    lines = (attacked_alone.folder / "audit.jsonl").read_text().splitlines()
    assert 1 <= len(lines) <= 100
