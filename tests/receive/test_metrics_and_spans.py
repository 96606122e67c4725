"""OTLP metrics and traces become rows: right type, unit and growth; nothing odd goes uncounted, nothing is dropped."""

import json
import math
from typing import Any

import pytest

from stallscope.errors import BadInput
from stallscope.receive.otlp_requests import Decoded, Decoder
from stallscope.store.hub import schema

from .requests import NOW_NS, add_numbers, numbers, spans

SECOND_NS = 10**9


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(now_ns=lambda: NOW_NS)


def decoded(decoder: Decoder, message: Any, signal: str = "metrics") -> Decoded:
    return decoder.decode(signal, message.SerializeToString(), "a")


def rows(result: Decoded, table: str = "node_metrics") -> list[dict[str, Any]]:
    return schema.conformed(table, result.batch.tables[table]).to_pylist()


def test_a_gauge_of_another_agent_lands_with_node_rank_and_value(decoder):
    message = numbers(
        [{"as_double": 0.31, "attributes": {"ingero.node.rank": 3, "dominant_signal": "memory"}}],
        name="ingero.node.health_score",
        resource={"ingero.node.id": "n3", "ingero.cluster.id": "c1"},
    )
    (row,) = rows(decoded(decoder, message))
    assert (row["name"], row["kind"], row["unit"], row["value_double"]) == (
        "ingero.node.health_score",
        "gauge",
        "1",
        0.31,
    )
    assert (row["node_id"], row["cluster_id"], row["rank"]) == ("n3", "c1", 3)
    assert json.loads(row["attrs"])["dominant_signal"] == "memory"
    assert row["is_cumulative"] is None and row["increase"] is None


def test_gpu_attributes_of_a_node_metric_are_stored_with_the_node(decoder):
    message = numbers(
        [{"as_int": 1, "attributes": {"ingero.gpu_model": "h100-80gb", "ingero.gpu_count": 8}}],
        name="ingero.node.info",
        resource={"ingero.node.id": "n3", "ingero.provider": "aws"},
    )
    (node,) = rows(decoded(decoder, message), "nodes")
    assert (node["node_id"], node["gpu_model"], node["n_gpus"], node["provider"]) == (
        "n3",
        "h100-80gb",
        8,
        "aws",
    )


def counter(at_s: int, value: int, *, start_s: int = 0, monotonic: bool = True) -> Any:
    point = {"time_unix_nano": NOW_NS + at_s * SECOND_NS, "as_int": value}
    if start_s:
        point["start_time_unix_nano"] = NOW_NS + start_s * SECOND_NS
    return numbers([point], kind="sum", is_monotonic=monotonic, aggregation_temporality=2)


def growth(decoder: Decoder, *messages: Any) -> list[tuple[float | None, bool | None]]:
    result = [rows(decoded(decoder, message))[0] for message in messages]
    return [(row["increase"], row["is_reset"]) for row in result]


def test_a_cumulative_counter_grows_by_the_difference(decoder):
    assert growth(decoder, counter(-30, 10), counter(-20, 14), counter(-10, 14)) == [
        (None, False),
        (4.0, False),
        (0.0, False),
    ]


def test_a_decreasing_counter_is_a_reset(decoder):
    last = decoded(decoder, counter(-30, 10)), decoded(decoder, counter(-20, 3))
    assert (rows(last[1])[0]["increase"], rows(last[1])[0]["is_reset"]) == (3.0, True)
    assert last[1].counts["counter_resets"] == 1


def test_a_counter_with_a_later_start_time_is_a_reset(decoder):
    assert growth(decoder, counter(-30, 10, start_s=-90), counter(-10, 50, start_s=-20))[1] == (50.0, True)


def test_a_decreasing_non_monotonic_sum_is_not_a_reset(decoder):
    assert growth(decoder, counter(-30, 10, monotonic=False), counter(-20, 3, monotonic=False))[1] == (
        -7.0,
        False,
    )


def test_a_point_that_is_sent_again_grows_by_the_same(decoder):
    assert growth(decoder, counter(-30, 10), counter(-20, 14), counter(-20, 14))[2] == (4.0, False)


def test_counters_of_other_attributes_and_tenants_are_others(decoder):
    first = numbers(
        [{"as_int": 5, "attributes": {"gpu": 0}}], kind="sum", is_monotonic=True, aggregation_temporality=2
    )
    other = numbers(
        [{"as_int": 9, "attributes": {"gpu": 1}}], kind="sum", is_monotonic=True, aggregation_temporality=2
    )
    assert growth(decoder, first, other)[1] == (None, False)
    assert rows(decoder.decode("metrics", first.SerializeToString(), "b"))[0]["increase"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_are_null_kept_as_text_and_counted(decoder, value):
    result = decoded(decoder, numbers([{"as_double": value}]))
    (row,) = rows(result)
    assert row["value_double"] is None and result.counts["not_finite_values"] == 1
    assert json.loads(row["attrs"])["otel.value"] in ("NaN", "Infinity")


def test_a_metric_that_is_there_twice_is_stored_twice_and_counted(decoder):
    message = numbers([{"as_int": 1}])
    add_numbers(message, [{"as_int": 2}], name="gpu.power")
    result = decoded(decoder, message)
    assert [row["value_double"] for row in rows(result)] == [1.0, 2.0]
    assert result.counts["repeated_metric_names"] == 1


def test_integers_beyond_a_double_are_kept_exactly(decoder):
    (row,) = rows(decoded(decoder, numbers([{"as_int": (1 << 53) + 1}])))
    assert json.loads(row["attrs"])["otel.value"] == (1 << 53) + 1


def test_points_without_value_or_time_are_stored_as_that(decoder):
    result = decoded(decoder, numbers([{"flags": 1}, {"as_int": 3, "time_unix_nano": 0}]))
    none, timed = rows(result)
    assert none["value_double"] is None and timed["ts_ns"] == NOW_NS
    assert result.counts["untimed_records"] == 1 and result.batch.batch_id == ""


def test_histograms_and_summaries_keep_their_shape(decoder):
    message = numbers([])
    metrics = message.resource_metrics[0].scope_metrics[0].metrics
    del metrics[:]
    histogram = metrics.add(name="h").histogram
    histogram.aggregation_temporality = 1
    histogram.data_points.add(
        time_unix_nano=NOW_NS, count=3, sum=6.5, bucket_counts=[1, 2], explicit_bounds=[2.0], min=1, max=4
    )
    exponential = metrics.add(name="e").exponential_histogram
    exponential.aggregation_temporality = 2
    point = exponential.data_points.add(time_unix_nano=NOW_NS, count=2, sum=3, scale=1, zero_count=1)
    point.positive.bucket_counts.extend([0, 1])
    summary = metrics.add(name="s").summary.data_points.add(time_unix_nano=NOW_NS, count=4, sum=8)
    summary.quantile_values.add(quantile=0.5, value=2)
    metrics.add(name="without data")
    result = decoded(decoder, message)
    h, e, s = rows(result)
    assert (h["kind"], h["n"], h["value_double"], h["is_cumulative"]) == ("histogram", 3, 6.5, False)
    kept = json.loads(h["attrs"])
    assert (kept["otel.bounds"], kept["otel.counts"], kept["otel.min"], kept["otel.max"]) == (
        [2],
        [1, 2],
        1,
        4,
    )
    assert e["is_cumulative"] and json.loads(e["attrs"])["otel.positive"] == {"offset": 0, "counts": [0, 1]}
    assert (s["kind"], s["n"], json.loads(s["attrs"])["otel.quantiles"]) == ("summary", 4, [[0.5, 2]])
    assert result.counts["empty_metrics"] == 1


def test_a_span_is_an_event_with_a_duration(decoder):
    span = {
        "name": "step",
        "trace_id": bytes(range(16)),
        "span_id": bytes(range(8)),
        "kind": 1,
        "start_time_unix_nano": NOW_NS - 900,
        "end_time_unix_nano": NOW_NS - 100,
        "attributes": {"rank": 3, "note": "x"},
    }
    (row,) = rows(decoded(decoder, spans([span], resource={"host.name": "n1"}), "traces"), "events")
    assert (row["name"], row["ts_ns"], row["duration_ns"], row["rank"]) == ("step", NOW_NS - 900, 800, 3)
    kept = json.loads(row["attrs"])
    assert (kept["otel.trace_id"], kept["otel.kind"], kept["note"]) == (
        bytes(range(16)).hex(),
        "internal",
        "x",
    )


def test_a_span_that_ends_before_it_begins_has_no_duration_and_keeps_its_end(decoder):
    span = {"name": "x", "start_time_unix_nano": NOW_NS, "end_time_unix_nano": NOW_NS - 5}
    (row,) = rows(decoded(decoder, spans([span]), "traces"), "events")
    assert row["duration_ns"] is None and json.loads(row["attrs"])["otel.end_time_unix_nano"] == NOW_NS - 5


@pytest.mark.parametrize("signal", ["metrics", "traces"])
def test_a_body_that_is_not_a_valid_message_is_refused(decoder, signal):
    with pytest.raises(BadInput, match="not a valid OTLP"):
        decoder.decode(signal, b"\xff\xff\xff", "a")
