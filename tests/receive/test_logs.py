"""OTLP logs become rows: attributes with a column are moved there, others are kept, in both decoders."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadInput
from stallscope.events.names import CATEGORY_NAMES
from stallscope.receive import logs as decoding
from stallscope.receive import otlp_requests
from stallscope.receive.otlp_requests import Decoded, Decoder
from stallscope.store.hub import schema

from .loop_decoder import by_loop
from .requests import NOW_NS, add_logs, logs

DECODERS = {"ptars": decoding.by_ptars, "loop": by_loop}


@pytest.fixture(params=DECODERS)
def decode(request: pytest.FixtureRequest) -> Callable[..., Decoded]:
    """Decodes a request's message, one way and the other."""
    decoder = Decoder(of_logs=DECODERS[request.param], now_ns=lambda: NOW_NS)
    return lambda message: decoder.decode("logs", message.SerializeToString(), "a")


def rows(decoded: Decoded, table: str = "events") -> list[dict[str, Any]]:
    return schema.conformed(table, decoded.batch.tables[table]).to_pylist()


def only(decoded: Decoded, table: str = "events") -> dict[str, Any]:
    (row,) = rows(decoded, table)
    return row


def attrs(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(row["attrs"] or "{}")


COLLECTIVE = {
    "nccl.op_type": "ncclAllReduce",
    "nccl.comm_id_hash": "0xdeadbeef",
    "nccl.seq": 7,
    "nccl.rank": 3,
    "nccl.nranks": 8,
    "nccl.count_bytes": 4096,
    "nccl.datatype": "ncclFloat32",
    "nccl.reduce_op": "sum",
}


def test_a_collective_of_another_agent_is_a_collective_here(decode):
    verdict = only(
        decode(logs([{"attributes": COLLECTIVE}], resource={"ingero.node.id": "n1"})), "collectives"
    )
    assert (verdict["op"], verdict["seq"], verdict["rank"], verdict["nranks"]) == ("all_reduce", 7, 3, 8)
    assert (verdict["comm_hash"], verdict["count_bytes"]) == ("00000000deadbeef", 4096)
    assert (verdict["datatype"], verdict["reduce_op"], verdict["node_id"]) == ("float32", "sum", "n1")
    kept = attrs(verdict)  # in the sender's words where ours are others
    assert kept["nccl.op_type"] == "ncclAllReduce" and kept["nccl.comm_id_hash"] == "0xdeadbeef"
    assert "nccl.seq" not in kept and "nccl.reduce_op" not in kept


def test_a_record_without_a_round_number_is_an_event(decode):
    verdict = only(decode(logs([{"attributes": {**COLLECTIVE, "nccl.seq": "seven"}}])))
    assert verdict["op"] == "all_reduce" and verdict["seq"] is None
    assert attrs(verdict)["nccl.seq"] == "seven"


def test_the_record_comes_before_the_scope_and_the_scope_before_the_resource(decode):
    message = logs(
        [{"attributes": {"rank": 1}}, {"attributes": {}}],
        resource={"rank": 3, "local_rank": 30, "ingero.cluster.id": "c"},
        scope={"rank": 2},
    )
    first, second = rows(decode(message))
    assert (first["rank"], second["rank"]) == (1, 2)
    assert first["local_rank"] == second["local_rank"] == 30
    assert first["cluster_id"] == "c"
    assert attrs(first)["otel.resource"]["rank"] == 3, "what was not chosen is not lost"


def test_every_record_keeps_the_resource_it_came_with(decode):
    message = logs([{"body": "x"}] * 2, resource={"host.name": "n1"})
    add_logs(message, [{"body": "y"}], resource={"host.name": "n2"})
    add_logs(message, [], resource={"host.name": "nobody"})
    add_logs(message, [{"body": "z", "attributes": {"host.name": "own"}}])
    assert [(r["node_id"], r["value_text"]) for r in rows(decode(message))] == [
        ("n1", "x"),
        ("n1", "x"),
        ("n2", "y"),
        ("own", "z"),
    ]


ODD = {
    "text": 'quotes " and \\ and \n and \x00 and ü and \U0001f4a9',
    "": "no name",
    "empty": "",
    "int": -(1 << 63),
    "float": 0.1,
    "whole": 2.0,
    "nan": math.nan,
    "inf": -math.inf,
    "yes": True,
    "bytes": b"\x00\xff",
    "list": [1, "two", [3.5, None], {"four": 5}],
    "map": {"a": {"b": [True]}, "c": b"d"},
    "nothing": None,
}
ODD_AS_JSON = {
    **ODD,
    "nan": "NaN",
    "inf": "-Infinity",
    "bytes": "AP8=",
    "map": {"a": {"b": [True]}, "c": "ZA=="},
}


def test_every_field_of_a_log_record_is_kept(decode):
    verdict = only(
        decode(
            logs(
                [
                    {
                        "attributes": ODD,
                        "severity_number": 9,
                        "severity_text": "INFO",
                        "trace_id": bytes(range(16)),
                        "span_id": bytes(range(8)),
                        "flags": 1,
                        "dropped_attributes_count": 4,
                        "observed_time_unix_nano": NOW_NS + 5,
                        "event_name": "odd",
                    }
                ],
                resource=ODD,
                scope={"s": 1},
            )
        )
    )
    kept = attrs(verdict)
    assert verdict["name"] == "odd"
    assert {key: kept[key] for key in ODD} == ODD_AS_JSON
    assert kept["otel.resource"] == ODD_AS_JSON
    assert kept["otel.scope"] == {"attributes": {"s": 1}}
    assert kept["otel.trace_id"] == bytes(range(16)).hex() and kept["otel.span_id"] == bytes(range(8)).hex()
    assert (kept["otel.severity_number"], kept["otel.severity_text"], kept["otel.flags"]) == (9, "INFO", 1)
    assert kept["otel.observed_time_unix_nano"] == NOW_NS + 5
    assert kept["otel.dropped_attributes_count"] == 4


@pytest.mark.parametrize(
    ("body", "text", "number"),
    [
        ("words", "words", None),
        (5, "5", 5.0),
        (0.25, "0.25", 0.25),
        (True, "true", None),
        ({"a": [1]}, '{"a":[1]}', None),
        (math.nan, "nan", None),
        (None, None, None),
        ("", "", None),
    ],
)
def test_a_body_is_stored_as_text_and_as_a_number_if_numeric(decode, body, text, number):
    verdict = only(decode(logs([{"body": body}])))
    assert (verdict["value_text"], verdict["value_double"]) == (text, number)


@pytest.mark.parametrize(
    ("time", "observed", "wanted", "n_untimed"),
    [
        (NOW_NS - 5, NOW_NS, NOW_NS - 5, 0),
        (0, NOW_NS - 9, NOW_NS - 9, 1),
        (0, 0, NOW_NS, 1),
        (12_345, NOW_NS - 9, NOW_NS - 9, 1),
        ((1 << 64) - 1, 0, NOW_NS, 1),
        (NOW_NS + 90_000 * 10**9, 0, NOW_NS, 1),
    ],
    ids=["own", "observed", "none", "1970", "end of time", "tomorrow"],
)
def test_a_time_that_cannot_be_true_is_replaced_kept_and_counted(decode, time, observed, wanted, n_untimed):
    decoded = decode(logs([{"time_unix_nano": time, "observed_time_unix_nano": observed, "body": "x"}]))
    verdict = only(decoded)
    assert verdict["ts_ns"] == wanted and verdict["ts"].timestamp() == pytest.approx(wanted / 1e9)
    assert decoded.counts.get("untimed_records", 0) == n_untimed
    assert attrs(verdict).get("otel.time_unix_nano") == (time if n_untimed and time else None)


@pytest.mark.parametrize("rank", [1 << 31, "x", 1.5, math.nan, True, [1]])
def test_a_value_that_does_not_fit_its_column_stays_an_attribute(decode, rank):
    verdict = only(decode(logs([{"attributes": {"rank": rank}}])))
    assert verdict["rank"] is None
    assert attrs(verdict)["rank"] == ("NaN" if rank != rank else rank)


def test_numbers_as_text_and_whole_floats_are_integers(decode):
    verdict = only(decode(logs([{"attributes": {"rank": "12", "seq": 7.0, "step": "-3"}}])))
    assert (verdict["rank"], verdict["seq"], verdict["step"], verdict["attrs"]) == (12, 7, -3, None)


def test_of_several_names_of_a_fact_the_best_counts_and_the_others_stay(decode):
    verdict = only(decode(logs([{"attributes": {"rank": 1, "nccl.rank": 2, "stallscope.rank": 3}}])))
    assert verdict["rank"] == 3
    assert attrs(verdict) == {"rank": 1, "nccl.rank": 2}


def test_our_agents_records_go_to_the_table_they_name(decode):
    ledger = {f"stallscope.{name}_ns": number for number, name in enumerate(CATEGORY_NAMES)}
    collective = {
        "stallscope.op": "all_reduce",
        "stallscope.comm_hash": "ffeeddccbbaa9988",
        "stallscope.comm_handle": "ffffffffffffffff",
        "stallscope.seq": 4,
        "stallscope.reduce_op": 1,
        **ledger,
    }
    message = logs(
        [
            {"event_name": "stallscope.collectives", "attributes": collective},
            {
                "event_name": "stallscope.snapshots",
                "attributes": {"stallscope.alive": 1, "stallscope.pid": 5},
            },
            {"event_name": "stallscope.collectives", "attributes": {**collective, "stallscope.seq": 5}},
            {"event_name": "stallscope.unheard", "attributes": {"x": 1}},
        ],
        resource={"stallscope.node.id": "n1", "stallscope.batch.id": "b-1", "stallscope.gpu_model": "H100"},
    )
    decoded = decode(message)
    assert decoded.batch.batch_id == "b-1"
    first, second = rows(decoded, "collectives")
    assert (first["seq"], second["seq"], first["comm_handle"], first["reduce_op"]) == (4, 5, -1, "sum")
    assert [first[f"{name}_ns"] for name in CATEGORY_NAMES] == list(range(len(CATEGORY_NAMES)))
    snapshot = only(decoded, "snapshots")
    assert (snapshot["alive"], snapshot["pid"], snapshot["node_id"]) == (1, 5, "n1")
    assert only(decoded)["name"] == "stallscope.unheard"
    assert only(decoded, "nodes")["gpu_model"] == "H100"


def test_only_the_oversized_record_of_a_request_is_rejected(decode):
    decoded = decode(logs([{"body": "small"}, {"attributes": {"x": "y" * (2 << 20)}}]))
    assert decoded.n_rejected == 1
    assert "1,048,576" in otlp_requests.response("logs", 1).partial_success.error_message
    assert only(decoded)["value_text"] == "small"


def test_an_empty_request_is_accepted(decode):
    decoded = decode(logs([]))
    assert decoded.n_records == 0 and not decoded.batch.tables


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\xff", b"hello, world", bytes(200)])
def test_a_body_that_is_not_a_valid_message_is_refused(body):
    for way in DECODERS.values():
        with pytest.raises(BadInput, match="not a valid OTLP logs message"):
            Decoder(of_logs=way).decode("logs", body, "a")


def test_only_a_batch_id_of_the_sender_identifies_a_batch(decode):
    named = logs([{"body": "x"}], resource={"stallscope.batch.id": "b1"})
    assert decode(named).batch.batch_id == "b1"
    assert decode(logs([{"body": "x"}])).batch.batch_id == ""


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.text(), st.binary()
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["rank", "nccl.rank", "op", "comm_hash", "seq", "value", "host.name"]) | st.text(
    max_size=5
)
RECORDS = st.lists(
    st.fixed_dictionaries(
        {"attributes": st.dictionaries(KEYS, VALUES, max_size=6), "body": VALUES},
        optional={
            "time_unix_nano": st.integers(0, (1 << 64) - 1),
            "event_name": st.sampled_from(["", "x", "stallscope.calls", "stallscope.collectives"]),
            "severity_text": st.text(max_size=4),
            "trace_id": st.binary(max_size=16),
        },
    ),
    max_size=5,
)


@settings(max_examples=60)
@given(records=RECORDS, resource=st.dictionaries(KEYS, VALUES, max_size=4))
def test_both_decoders_return_the_same_rows(records, resource):
    body = logs(records, resource=resource).SerializeToString()
    entry, other = (
        Decoder(of_logs=way, now_ns=lambda: NOW_NS).decode("logs", body, "a") for way in DECODERS.values()
    )
    assert entry.counts == other.counts and entry.batch.batch_id == other.batch.batch_id
    assert entry.batch.tables.keys() == other.batch.tables.keys()
    for name in entry.batch.tables:
        assert str(rows(entry, name)) == str(rows(other, name))
        assert all(attrs(row) is not None for row in rows(entry, name) if "attrs" in row)
