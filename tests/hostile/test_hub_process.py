"""Attacks on a real hub process with a memory limit. An honest agent next to each attack must lose nothing."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pyarrow as pa
import pytest
from tests.patience import until
from tests.receive.requests import logs

from stallscope.exporters.hub_logs import METHOD as LOGS

from .conftest import MEMORY, Attacked

pytestmark = pytest.mark.live

ARROW = "/stallscope.v1.Ingest/Append"


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


def test_cancelled_requests_hold_no_room(attacked: Attacked):
    """More than a tenant may have in flight; afterwards its requests are stored as before."""
    headers = [("authorization", f"Bearer {attacked.token}")]
    body = arrow_request(pa.table({"ts_ns": pa.array([1])}))
    with grpc.insecure_channel(attacked.address) as channel:
        send = channel.unary_unary(ARROW)
        for _ in range(1_200):
            send.future(body, metadata=headers).cancel()

        def is_stored() -> bool:
            try:
                return bool(send(body, metadata=headers, timeout=20))
            except grpc.RpcError as refused:
                assert refused.code() is grpc.StatusCode.UNAVAILABLE
                return False

        until(is_stored)


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
