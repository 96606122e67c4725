"""Small requests that wait at one time are decoded as one, and each gets what it would have got alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadInput
from stallscope.receive.gathering import Gathering
from stallscope.receive.otlp import Decoded, Decoder
from stallscope.store.hub import schema

from .requests import NOW_NS, add_logs, logs
from .test_logs import KEYS, RECORDS, VALUES

DECODER = Decoder(now_ns=lambda: NOW_NS)


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
def test_together_they_are_what_each_is_alone(requests):
    bodies = []
    for parts in requests:
        message = logs([])
        for records, resource in parts:
            add_logs(message, records, resource=resource)
        bodies.append(message.SerializeToString())
    alone = [DECODER.decode("logs", body, "a") for body in bodies]
    together = DECODER.logs_together(bodies, "a")
    if together is None:  # a record without a time tells nothing that a retry is known by
        assert any(one.counts for one in alone) or not any(one.n_records for one in alone)
        return
    assert [told(one) for one in together] == [told(one) for one in alone]


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
    assert [told(one) for one in together] == [told(DECODER.decode("logs", one, "a")) for one in bodies]
    assert [sorted(one.batch.tables) for one in together] == [
        ["calls", "collectives", "events", "nodes"],
        ["calls"],
        [],
        ["collectives", "events", "nodes"],
    ]


def test_a_record_that_says_too_much_is_rejected_in_its_own_request():
    small, large = logs([{"body": "small"}]), logs([{"body": "y"}, {"attributes": {"x": "y" * (2 << 20)}}])
    together = DECODER.logs_together([small.SerializeToString(), large.SerializeToString()], "a")
    assert together is not None
    assert [(one.n_records, one.n_rejected) for one in together] == [(1, 0), (2, 1)]


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
def test_what_is_not_whole_is_not_put_before_another(wrong):
    good = logs([{"body": "x"}]).SerializeToString()
    assert DECODER.logs_together([wrong, good], "a") is None


def test_one_that_is_wrong_does_not_harm_those_beside_it():
    good = [logs([{"body": str(i)}]).SerializeToString() for i in range(30)]
    bodies = [*good[:15], b"\x0a\x02\xff\xff", *good[15:]]
    gathering, barrier = Gathering(DECODER), threading.Barrier(len(bodies))

    def send(body: bytes) -> object:
        barrier.wait()
        try:
            return told(gathering.decode(body, "a"))
        except BadInput as error:
            return str(error)

    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(send, bodies))
    assert "no OTLP logs message" in str(found.pop(15))
    assert found == [told(DECODER.decode("logs", body, "a")) for body in good]


def test_tenants_are_never_decoded_together():
    gathering, barrier = Gathering(DECODER), threading.Barrier(20)

    def send(number: int) -> Decoded:
        barrier.wait()
        tenant = "ab"[number % 2]
        return gathering.decode(logs([{"body": tenant}]).SerializeToString(), tenant)

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(send, range(20)))
    for number, decoded in enumerate(found):
        tenant = "ab"[number % 2]
        assert decoded.batch.tenant == tenant
        assert decoded.batch.tables["events"]["value_text"].to_pylist() == [tenant]
