"""Records of one shape are decoded at once, with the same result as in the general decoder."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from stallscope.errors import BadInput
from stallscope.receive import logs as decoding
from stallscope.receive import uniform_records
from stallscope.receive.otlp_requests import Decoder
from stallscope.receive.record_shape import MixedShapes
from stallscope.store.hub import schema

from .loop_decoder import by_loop
from .requests import NOW_NS, add_logs, logs

KINDS = {
    "text": st.text(max_size=20) | st.integers(0, 20_000).map("z".__mul__),
    "word": st.sampled_from(["all_reduce", "ncclAllReduce", "0x1f", "00000000deadbeef", "12", "-7"]),
    "int": st.one_of(st.integers(0, 200), st.integers(-(1 << 63), (1 << 63) - 1)),
    "number": st.floats(),
    "truth": st.booleans(),
}
KEYS = st.sampled_from(
    [
        "rank",
        "nccl.rank",
        "op",
        "comm_hash",
        "seq",
        "value",
        "host.name",
        "gpu.model",
        "comm_handle",
        "x" * 120,
    ]
) | st.text(min_size=1, max_size=20)


@st.composite
def of_one_shape(draw: st.DrawFn) -> ExportLogsServiceRequest:
    """Requests of several resources whose records have the same fields, and attributes of the same types."""
    kinds = draw(st.dictionaries(KEYS, st.sampled_from(sorted(KINDS)), max_size=6))
    own = {
        "body": draw(st.sampled_from([None, *KINDS])),
        "severity_text": draw(st.booleans()),
        "severity_number": draw(st.booleans()),
        "flags": draw(st.booleans()),
        "dropped_attributes_count": draw(st.booleans()),
        "trace_id": draw(st.booleans()),
        "observed_time_unix_nano": draw(st.booleans()),
        "event_name": draw(st.booleans()),
    }
    values = {
        "severity_text": st.text(min_size=1, max_size=9),
        "severity_number": st.integers(1, 24),
        "flags": st.integers(1, (1 << 32) - 1),
        "dropped_attributes_count": st.integers(1, (1 << 32) - 1),
        "trace_id": st.binary(min_size=1, max_size=16),
        "observed_time_unix_nano": st.integers(1, (1 << 64) - 1),
        "event_name": st.sampled_from(["x", "nccl.collective", "stallscope.calls"]),
    }

    def record() -> dict[str, Any]:
        result: dict[str, Any] = {
            "time_unix_nano": draw(st.sampled_from([NOW_NS, NOW_NS + 1, 5])),
            "attributes": {key: draw(KINDS[kind]) for key, kind in kinds.items()},
        }
        if own["body"]:
            result["body"] = draw(KINDS[own["body"]])
        return result | {name: draw(made) for name, made in values.items() if own[name]}

    message = logs([])
    different = [record() for _ in range(draw(st.integers(1, 3)))]
    for n in [*draw(st.lists(st.integers(0, 2), max_size=2)), 70]:
        order = draw(st.lists(st.integers(0, len(different) - 1), min_size=1, max_size=9))
        attributes = draw(st.dictionaries(KEYS, st.one_of(*KINDS.values()), max_size=3))
        mixed = [different[order[i % len(order)]] for i in range(n)]
        add_logs(message, mixed, resource=attributes, scope={"rank": n})
    return message


def decoded(body: bytes, way: Any) -> object:
    done = Decoder(of_logs=way, now_ns=lambda: NOW_NS).decode("logs", body, "a")
    tables = {name: str(schema.conformed(name, part).to_pylist()) for name, part in done.batch.tables.items()}
    return done.n_records, done.n_rejected, done.counts, done.batch.batch_id, tables


@settings(max_examples=60)
@given(message=of_one_shape())
def test_the_uniform_decoder_matches_the_general_decoder(message):
    body = message.SerializeToString()
    assert decoded(body, decoding.by_shape) == decoded(body, by_loop)


def collectives(n: int = 1000) -> ExportLogsServiceRequest:
    """The records that a GPU agent sends in a loop: numbers of one or two bytes, texts of one or several lengths."""
    records = [
        {
            "event_name": "nccl.collective",
            "time_unix_nano": NOW_NS + i,
            "observed_time_unix_nano": NOW_NS + i,
            "attributes": {
                "nccl.op_type": "all_reduce",
                "nccl.comm_id_hash": "00000000deadbeef",
                "nccl.seq": 100 + i,
                "step": i - 20,
                "note": "y" * (i // 500),
                "ü": 0.5 * i,
            },
        }
        for i in range(n)
    ]
    return logs(records, resource={"host.name": "n1"})


@settings(max_examples=150)
@given(data=st.data())
def test_a_byte_that_is_wrong_is_never_read_as_something_else(data):
    body = bytearray(collectives(300).SerializeToString())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del body[at : at + data.draw(st.integers(0, 3))]
    try:
        result = decoded(bytes(body), decoding.by_shape)
    except MixedShapes:
        return
    assert result == decoded(bytes(body), by_loop)


def test_the_usual_records_are_read_all_at_once():
    records = uniform_records.records(collectives().SerializeToString())
    assert records.attributes.names == ["nccl.op_type", "nccl.comm_id_hash", "nccl.seq", "step", "note", "ü"]
    assert records.attributes.columns["nccl.seq"].to_pylist() == [100 + i for i in range(1000)]
    assert records.attributes.columns["step"].to_pylist() == [i - 20 for i in range(1000)]
    assert records.attributes.columns["note"].to_pylist() == ["y" * (i // 500) for i in range(1000)]


@pytest.mark.parametrize(
    "other",
    [
        {"attributes": {"a": 1}},
        {"attributes": {"b": 1}, "body": "x"},
        {"attributes": {"a": "1"}, "body": "x"},
        {"attributes": {"a": 1, "b": 2}, "body": "x"},
        {"attributes": {"a": 1}, "body": 5},
        {"attributes": {"a": [1]}, "body": "x"},
        {"attributes": {"a": None}, "body": "x"},
        {"attributes": {"a": 1}, "body": "x", "event_name": "named"},
    ],
)
def test_records_of_another_shape_are_left_to_the_others(other):
    body = logs([{"attributes": {"a": 1}, "body": "x"}] * 7 + [other]).SerializeToString()
    with pytest.raises(MixedShapes):
        decoding.by_shape(body, NOW_NS)
    assert decoded(body, decoding.decode) == decoded(body, by_loop)


def test_text_that_is_none_is_refused_like_by_the_others():
    body = collectives().SerializeToString().replace(b"all_reduce", b"all\xffreduce")
    with pytest.raises(MixedShapes):
        decoding.by_shape(body, NOW_NS)
    with pytest.raises(BadInput):
        decoding.decode(body, NOW_NS)


NUMBERS = [0, 1, 127, 128, (1 << 14) - 1, 1 << 14, (1 << 56) - 1, 1 << 56, (1 << 63) - 1, -1, -(1 << 63)]


def test_numbers_of_every_length_are_read():
    records = uniform_records.records(
        logs([{"attributes": {"a": entry}} for entry in NUMBERS * 120]).SerializeToString()
    )
    assert records.attributes.columns["a"].to_pylist() == NUMBERS * 120


def test_a_number_of_more_than_64_bits_is_none():
    body = logs([{"attributes": {"a": -1}}]).SerializeToString()
    assert uniform_records.records(body).attributes.columns["a"].to_pylist() == [-1]
    with pytest.raises(MixedShapes):
        uniform_records.records(body.replace(b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x02"))


@pytest.mark.parametrize("n", [60, 6_000])
def test_records_of_many_lengths_are_left_to_the_others(n):
    body = logs([{"body": "x" * (i % 60)} for i in range(n)]).SerializeToString()
    with pytest.raises(MixedShapes):
        uniform_records.records(body)


def test_attributes_of_every_record_are_the_same_record_by_record():
    attributes = uniform_records.records(collectives(3).SerializeToString()).attributes
    listed = attributes.listed()
    assert listed.parent.tolist() == [i for i in range(3) for _ in range(6)]
    assert listed.key.to_pylist() == [*attributes.names] * 3
    assert listed.text.to_pylist()[::6] == ["all_reduce"] * 3
    assert listed.integer.to_pylist()[2::6] == [100, 101, 102]
    assert listed.number.to_pylist()[5::6] == [0.0, 0.5, 1.0]
    assert listed.json.null_count == 18
