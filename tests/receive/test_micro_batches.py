"""Small requests that wait at the same time are decoded together, with the same answers as alone."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadInput, Overloaded
from stallscope.events import layout
from stallscope.exporters import hub_arrow
from stallscope.receive import arrow, arrow_batches
from stallscope.receive.micro_batches import MicroBatches
from stallscope.receive.otlp_requests import Decoded, Decoder
from stallscope.store.hub import schema

from .requests import NOW_NS, add_logs, logs
from .test_logs import KEYS, RECORDS, VALUES

DECODER = Decoder(now_ns=lambda: NOW_NS)


def of_logs() -> MicroBatches[bytes, Decoded]:
    return MicroBatches(lambda body, tenant: DECODER.decode("logs", body, tenant), DECODER.logs_together)


def told(decoded: Decoded) -> object:
    """All that a request became; texts, as NaN is not equal to itself."""
    tables = {
        name: str(schema.conformed(name, rows).to_pylist()) for name, rows in decoded.batch.tables.items()
    }
    return decoded.n_records, decoded.n_rejected, decoded.why_rejected, decoded.batch.batch_id, tables


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.lists(st.tuples(RECORDS, st.dictionaries(KEYS, VALUES, max_size=3)), max_size=3), max_size=4
    )
)
def test_requests_decoded_together_equal_requests_decoded_separately(requests):
    bodies = []
    for parts in requests:
        message = logs([])
        for records, resource in parts:
            add_logs(message, records, resource=resource)
        bodies.append(message.SerializeToString())
    alone = [DECODER.decode("logs", body, "a") for body in bodies]
    together = DECODER.logs_together(bodies, "a")
    if together is None:  # a record without a time tells nothing that a retry is known by
        assert any(entry.counts for entry in alone) or not any(entry.n_records for entry in alone)
        return
    assert [told(entry) for entry in together] == [told(entry) for entry in alone]


def test_records_for_several_tables_stay_with_their_request():
    of_ours = {"event_name": "stallscope.calls", "attributes": {"op": "cudaMemcpy", "pid": 1}}
    of_gpu = {"attributes": {"gpu.model": "H100"}, "body": "x"}
    collective = {"attributes": {"nccl.op": "all_reduce", "nccl.seq": 4, "nccl.comm_hash": "0x1f"}}
    bodies = [
        logs(records, resource={"host.name": f"n{i}"}).SerializeToString()
        for i, records in enumerate([[of_gpu, collective, of_ours], [of_ours], [], [collective, of_gpu]])
    ]
    together = DECODER.logs_together(bodies, "a")
    assert together is not None
    assert [told(body) for body in together] == [told(DECODER.decode("logs", body, "a")) for body in bodies]
    assert [sorted(body.batch.tables) for body in together] == [
        ["calls", "collectives", "events", "nodes"],
        ["calls"],
        [],
        ["collectives", "events", "nodes"],
    ]


def test_an_oversized_record_is_rejected_in_its_own_request():
    small, large = logs([{"body": "small"}]), logs([{"body": "y"}, {"attributes": {"x": "y" * (2 << 20)}}])
    together = DECODER.logs_together([small.SerializeToString(), large.SerializeToString()], "a")
    assert together is not None
    assert [(entry.n_records, entry.n_rejected) for entry in together] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x0a",
        b"\x0a\xff",
        b"\x0a\x05\x0a",  # says that more follows, which would be the next request's
        b"\x0a\x80\x80\x80\x80\x80\x01",
        b"\x12\x00",
        b"hello, world",
    ],
)
def test_an_incomplete_request_is_not_joined_with_another_request(wrong):
    good = logs([{"body": "x"}]).SerializeToString()
    assert DECODER.logs_together([wrong, good], "a") is None


def test_a_malformed_request_does_not_affect_concurrent_requests():
    good = [logs([{"body": str(i)}]).SerializeToString() for i in range(30)]
    bodies = [*good[:15], b"\x0a\x02\xff\xff", *good[15:]]
    gathering, barrier = of_logs(), threading.Barrier(len(bodies))

    def send(body: bytes) -> object:
        barrier.wait()
        try:
            return told(gathering.decode(body, "a", n_bytes=len(body)))
        except BadInput as error:
            return str(error)

    with ThreadPoolExecutor(len(bodies)) as pool:
        result = list(pool.map(send, bodies))
    assert "not a valid OTLP logs message" in str(result.pop(15))
    assert result == [told(DECODER.decode("logs", body, "a")) for body in good]


def test_tenants_are_never_decoded_together():
    gathering, barrier = of_logs(), threading.Barrier(20)

    def send(number: int) -> Decoded:
        barrier.wait()
        tenant = "ab"[number % 2]
        body = logs([{"body": tenant}]).SerializeToString()
        return gathering.decode(body, tenant, n_bytes=len(body))

    with ThreadPoolExecutor(20) as pool:
        result = list(pool.map(send, range(20)))
    for number, decoded in enumerate(result):
        tenant = "ab"[number % 2]
        assert decoded.batch.tenant == tenant
        assert decoded.batch.tables["events"]["value_text"].to_pylist() == [tenant]


def test_no_tenant_waits_for_anothers_requests():
    begun, may_end = threading.Event(), threading.Event()

    def alone(request: str, tenant: str) -> str:
        if tenant == "slow":
            begun.set()
            assert may_end.wait(20)
        return request

    gathering: MicroBatches[str, str] = MicroBatches(alone, lambda requests, tenant: None)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(gathering.decode, "x", "slow", n_bytes=1)
        assert begun.wait(20)
        assert gathering.decode("y", "quick", n_bytes=1) == "y" and not slow.done()
        may_end.set()
        assert slow.result(20) == "x"


def test_an_overloaded_request_is_refused_and_later_requests_are_decoded():
    indexes = [Overloaded("no place", 1.0), None]

    @contextmanager
    def at_work() -> Iterator[None]:
        if index := indexes.pop(0):
            raise index
        yield

    observed: list[str] = []
    gathering: MicroBatches[str, str] = MicroBatches(
        lambda request, tenant: observed.append(request) or request,
        lambda requests, tenant: None,
        at_work=at_work,
    )
    with pytest.raises(Overloaded, match="no place"):
        gathering.decode("first", "a", n_bytes=1)
    assert gathering.decode("second", "a", n_bytes=1) == "second"
    assert observed == ["second"], "what was refused is not decoded later"


def arrow_request(node: str, *, about: dict[str, str] | None = None, **n_rows: int) -> bytes:
    """An agent's request: so many rows by table, each with its own numbers."""
    tables = {}
    for name, n in n_rows.items():
        table = {entry.name: entry for entry in layout.TABLES}[name]
        rows = layout.empty(table, n)
        rows["ts_ns"] = NOW_NS + np.arange(n)
        rows["pid"] = sum(node.encode()) + np.arange(n)
        if "op" in rows.dtype.names:
            rows["op"] = np.arange(n) % 4
        if "comm_hash" in rows.dtype.names:
            rows["comm_hash"] = np.arange(n) % 3
        tables[name] = rows[[f.name for f in table.fields if f.name not in ("node", "symbol")]]
    return hub_arrow.request(tables, batch_id=f"of-{node}", node=node, cluster="c", about=about or {})


def arrow_told(batch: arrow.Batch) -> object:
    """All that a request of the Arrow lane became."""
    rows = {name: schema.conformed(name, part).to_pylist() for name, part in batch.tables.items()}
    return batch.batch_id, batch.tenant, rows


def arrow_bodies() -> list[bytes]:
    """Requests of several machines, with the same tables and others, and one that names no machine."""
    alike = [arrow_request(f"n{i}", collectives=i + 1, calls=3) for i in range(3)]
    other = arrow_request("n9", collectives=2, offcpu=4, about={"gpu_model": "H100", "agent": "x"})
    table = pa.table({"ts_ns": [NOW_NS], "node_id": ["own"], "symbol": ["cudaMalloc"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream = sink.getvalue().to_pybytes()
    head = {"batch_id": "plain", "tables": [{"name": "calls", "n_bytes": len(stream)}]}
    return [*alike, json.dumps(head).encode() + b"\n" + stream, other, arrow_request("n10")]


def test_arrow_requests_decoded_together_equal_separate_requests():
    bodies = arrow_bodies()
    together = arrow_batches.batches([arrow.read(body, limit=1 << 24) for body in bodies], "a")
    assert together is not None
    assert [arrow_told(entry) for entry in together] == [
        arrow_told(arrow.decode(body, "a", limit=1 << 24)) for body in bodies
    ]
    assert [[row["node_id"] for row in entry.tables["calls"].to_pylist()] for entry in together[:4]] == [
        *([f"n{i}"] * 3 for i in range(3)),
        ["own"],
    ]


def test_an_invalid_arrow_request_does_not_affect_concurrent_requests():
    good = [arrow.read(body, limit=1 << 24) for body in arrow_bodies()]
    wrong = arrow.Request("w", "n", "c", None, {"calls": pa.table({"ts_ns": [1], "pid": ["no number"]})}, 1)
    requests = [*good, wrong]
    gathering, barrier = MicroBatches(arrow.batch, arrow_batches.batches), threading.Barrier(len(requests))

    def send(request: arrow.Request) -> object:
        barrier.wait()
        try:
            return arrow_told(gathering.decode(request, "a", n_bytes=1))
        except BadInput as error:
            return str(error)

    with ThreadPoolExecutor(len(requests)) as pool:
        result = list(pool.map(send, requests))
    assert result[:-1] == [arrow_told(arrow.batch(entry, "a")) for entry in good]
    assert "the rows for table calls have wrong types" in str(result[-1])
