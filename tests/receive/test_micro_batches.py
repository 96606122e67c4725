"""Small requests that wait at the same time are decoded together, with the same answers as alone."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadInput, Overloaded
from stallscope.events import layout
from stallscope.exporters import hub_arrow
from stallscope.receive import arrow, arrow_batches, micro_batches, otlp_requests
from stallscope.receive.admission import SharedLimit
from stallscope.receive.micro_batches import MicroBatches, Waiting
from stallscope.receive.otlp_requests import Decoded, DecodedTogether, Decoder
from stallscope.receive.receiver import Accepted, Receiver
from stallscope.store.hub import schema
from stallscope.store.hub.batches import Batch, BatchMember, Receipt, separated

from .requests import NOW_NS, add_logs, logs
from .test_logs import KEYS, RECORDS, VALUES

DECODER = Decoder(now_ns=lambda: NOW_NS)


def told(decoded: Decoded) -> object:
    """The result of a request, as text, because NaN is not equal to itself."""
    return decoded.n_records, decoded.n_rejected, stored(decoded.batch)


def stored(batch: Batch) -> object:
    """The stored form of a request's rows."""
    tables = {name: str(schema.conformed(name, rows).to_pylist()) for name, rows in batch.tables.items()}
    return batch.batch_id, batch.tenant, tables


def told_together(together: DecodedTogether) -> list[object]:
    """The same of requests that were decoded together."""
    members = [
        BatchMember(batch_id, n_rows)
        for batch_id, n_rows in zip(together.batch_ids, together.n_rows, strict=True)
    ]
    batches = [stored(batch) for batch, _ in separated(together.batch, members)]
    return list(zip(together.n_records, together.n_rejected, batches, strict=True))


class StoreInMemory:
    """The store of a receiver: remembers the rows of each request, by the future that it resolves."""

    def __init__(self) -> None:
        self.rows: dict[Future[Receipt], object] = {}
        self.sizes: list[int] = []

    def check_room(self) -> None:
        return None

    def announced(self) -> nullcontext[None]:
        return nullcontext()

    def append_together(self, batch: Batch, members: Sequence[BatchMember]) -> None:
        self.sizes.append(len(members))
        for part, member in separated(batch, members):
            self.rows[member.stored] = stored(part)
            member.stored.set_result(Receipt(member.n_all_rows, False, 1))


def receiver_of(store: StoreInMemory) -> Receiver:
    return Receiver(store, lambda headers: pytest.fail("not asked"))  # type: ignore[arg-type]


def answers(sent: Sequence[Callable[[], Accepted]]) -> list[Accepted | str]:
    """The results of requests that are sent at the same time."""
    barrier = threading.Barrier(len(sent))

    def send(one: Callable[[], Accepted]) -> Accepted | str:
        barrier.wait()
        try:
            accepted = one()
            accepted.future.result(20)
            return accepted
        except BadInput as error:
            return str(error)

    with ThreadPoolExecutor(len(sent)) as pool:
        return list(pool.map(send, sent))


@settings(max_examples=60)
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
    if together is None:  # a record without a time does not identify a retry
        assert any(entry.counts for entry in alone) or not any(entry.n_records for entry in alone)
        return
    assert told_together(together) == [told(entry) for entry in alone]


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
    assert told_together(together) == [told(DECODER.decode("logs", body, "a")) for body in bodies]
    assert [sorted(n_rows) for n_rows in together.n_rows] == [
        ["calls", "collectives", "events", "nodes"],
        ["calls"],
        [],
        ["collectives", "events", "nodes"],
    ]


def test_an_oversized_record_is_rejected_in_its_own_request():
    small, large = logs([{"body": "small"}]), logs([{"body": "y"}, {"attributes": {"x": "y" * (2 << 20)}}])
    together = DECODER.logs_together([small.SerializeToString(), large.SerializeToString()], "a")
    assert together is not None
    assert (together.n_records, together.n_rejected) == ([1, 2], [0, 1])


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x0a",
        b"\x0a\xff",
        b"\x0a\x05\x0a",  # announces more bytes, which would belong to the next request
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
    store = StoreInMemory()
    receiver = receiver_of(store)
    result = answers([partial(receiver.otlp, "logs", body, "a") for body in bodies])
    assert "not a valid OTLP logs message" in str(result.pop(15))
    for number, accepted in enumerate(result):
        assert f"'value_text': '{number}'" in str(store.rows[accepted.future])
    assert receiver.counters.read()["logs_received"] == 30


def test_rejected_records_are_reported_to_their_own_sender():
    bodies = [logs([{"body": "x"}, {"attributes": {"x": "y" * (80 << 10)}}]).SerializeToString()] * 3
    receiver = receiver_of(StoreInMemory())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp_requests, "MAX_ATTRS_BYTES", 1000)
        accepted = answers([partial(receiver.otlp, "logs", body, "a") for body in bodies])
    for each in accepted:
        message = each.answer(each.future.result())
        assert message.partial_success.rejected_log_records == 1
        assert "exceed" in message.partial_success.error_message


def test_tenants_are_never_decoded_together():
    store = StoreInMemory()
    receiver = receiver_of(store)
    bodies = {tenant: logs([{"body": tenant}]).SerializeToString() for tenant in "ab"}
    result = answers([partial(receiver.otlp, "logs", bodies["ab"[i % 2]], "ab"[i % 2]) for i in range(20)])
    for number, accepted in enumerate(result):
        _, tenant, tables = store.rows[accepted.future]
        assert tenant == "ab"[number % 2] and f"'value_text': '{tenant}'" in tables["events"]


def test_no_tenant_waits_for_anothers_requests():
    begun, may_end = threading.Event(), threading.Event()

    def store(group: list[Waiting[str]], tenant: str) -> None:
        if tenant == "slow":
            begun.set()
            assert may_end.wait(20)
        for entry in group:
            entry.stored.set_result(Receipt(1, False, 1))

    gathering = MicroBatches(store, room=SharedLimit(100, "bytes"))
    slow = gathering.submit("x", "slow", n_bytes=1)
    assert begun.wait(20)
    assert gathering.submit("y", "quick", n_bytes=1).result(20) and not slow.done()
    may_end.set()
    assert slow.result(20)


def test_requests_that_arrive_during_a_turn_are_the_next_turn():
    sizes: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def store(group: list[Waiting[int]], tenant: str) -> None:
        sizes.append(len(group))
        begun.set()
        assert may_end.wait(20)
        for entry in group:
            entry.stored.set_result(Receipt(1, False, entry.request))

    room = SharedLimit(1000, "bytes")
    gathering = MicroBatches(store, room=room)
    first = gathering.submit(0, "a", n_bytes=1)
    assert begun.wait(20)
    later = [gathering.submit(number, "a", n_bytes=1) for number in range(1, 300)]
    may_end.set()
    assert [each.result(20).received_us for each in [first, *later]] == list(range(300))
    assert sizes == [1, 256, 43]


def test_a_full_group_is_decoded_without_waiting_for_more_requests(monkeypatch: pytest.MonkeyPatch):
    n_bytes, sleeps, groups = 200_000, [], []
    queued, begun = threading.Semaphore(0), threading.Semaphore(0)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleeps.append)
    monkeypatch.setattr(micro_batches, "time", clock)

    def store(group: list[Waiting[int]], tenant: str) -> None:
        groups.append((len(group), len(sleeps)))
        begun.release()
        assert queued.acquire(timeout=20)
        for entry in group:
            entry.stored.set_result(Receipt(1, False, 1))

    gathering = MicroBatches(store, room=SharedLimit(100 * n_bytes, "bytes"))
    futures = []
    for n_requests in (1, 3, 11):  # each part is queued while the store is busy with the part before
        futures += [gathering.submit(number, "a", n_bytes=n_bytes) for number in range(n_requests)]
        if n_requests > 1:
            queued.release()
        assert begun.acquire(timeout=20)
    queued.release(2)
    for each in futures:
        each.result(20)
    assert groups[:3] == [(1, 0), (3, 0), (10, 0)]


def test_an_overloaded_request_is_refused_and_later_requests_are_decoded():
    indexes = [Overloaded("no place", 1.0), None]

    @contextmanager
    def at_work() -> Iterator[None]:
        if index := indexes.pop(0):
            raise index
        yield

    observed: list[str] = []

    def store(group: list[Waiting[str]], tenant: str) -> None:
        for entry in group:
            observed.append(entry.request)
            entry.stored.set_result(Receipt(1, False, 1))

    gathering = MicroBatches(store, room=SharedLimit(100, "bytes"), at_work=at_work)
    with pytest.raises(Overloaded, match="no place"):
        gathering.submit("first", "a", n_bytes=1).result(20)
    gathering.submit("second", "a", n_bytes=1).result(20)
    assert observed == ["second"], "a refused request is not decoded later"


def test_waiting_requests_are_bounded_by_their_bytes():
    may_end, begun = threading.Event(), threading.Event()

    def store(group: list[Waiting[str]], tenant: str) -> None:
        begun.set()
        assert may_end.wait(20)
        for entry in group:
            entry.stored.set_result(Receipt(1, False, 1))

    room = SharedLimit(100, "bytes of requests")
    gathering = MicroBatches(store, room=room)
    futures = [gathering.submit("x", "a", n_bytes=50)]
    assert begun.wait(20)
    with pytest.raises(Overloaded, match="bytes of requests"):
        gathering.submit("y", "a", n_bytes=50)
    may_end.set()
    assert futures[0].result(20)


def arrow_request(node: str, *, about: dict[str, str] | None = None, **n_rows: int) -> bytes:
    """An agent's request: this many rows by table, each with different numbers."""
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
    """The result of a request to the Arrow endpoint."""
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
    requests = [arrow.read(body, limit=1 << 24) for body in bodies]
    groups = arrow_batches.alike(requests)
    assert groups == [[0, 1, 2], [3], [4], [5]]
    observed: dict[int, Batch] = {}
    for numbers in groups:
        batch, n_rows = arrow_batches.together([requests[number] for number in numbers], "a")
        members = [
            BatchMember(requests[number].batch_id, rows) for number, rows in zip(numbers, n_rows, strict=True)
        ]
        observed |= zip(numbers, [part for part, _ in separated(batch, members)], strict=True)
    assert [arrow_told(observed[number]) for number in range(6)] == [
        arrow_told(arrow.decode(body, "a", limit=1 << 24)) for body in bodies
    ]
    assert [
        [row["node_id"] for row in observed[number].tables["calls"].to_pylist()] for number in range(4)
    ] == [*([f"n{i}"] * 3 for i in range(3)), ["own"]]


def test_an_invalid_arrow_request_does_not_affect_concurrent_requests():
    good = arrow_bodies()
    table = pa.table({"ts_ns": [1], "pid": ["no number"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream = sink.getvalue().to_pybytes()
    head = {"batch_id": "w", "tables": [{"name": "calls", "n_bytes": len(stream)}]}
    wrong = [json.dumps(head).encode() + b"\n" + stream, good[0][: len(good[0]) // 2]]
    store = StoreInMemory()
    receiver = receiver_of(store)
    result = answers([partial(receiver.arrow, body, "a") for body in [*good, *wrong]])
    for body, accepted in zip(good, result, strict=False):
        batch = arrow.decode(body, "a", limit=1 << 24)
        assert not batch.tables or store.rows[accepted.future] == stored(batch)
    assert "the rows for table calls have wrong types" in str(result[-2])
    assert isinstance(result[-1], str)


def test_a_small_request_with_many_rows_is_stored_alone():
    rows = layout.empty(layout.COLLECTIVES, 40_000)
    names = [field.name for field in layout.COLLECTIVES.fields if field.name != "node"]
    rows["ts_ns"] = NOW_NS
    large = hub_arrow.request({"collectives": rows[names]}, batch_id="l", node="n", cluster="c", about={})
    assert len(large) < 1 << 18
    store = StoreInMemory()
    receiver = receiver_of(store)
    result = answers([partial(receiver.arrow, body, "a") for body in [large, *arrow_bodies()[:3]]])
    assert result[0].future.result().n_rows == 40_000
