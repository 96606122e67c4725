"""The engine's own spans next to the recorded requests."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stallscope.diagnose import diagnose
from stallscope.diagnose.report.text import report as text_of
from stallscope.diagnose.serving.joined_spans import joined_spans
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, RequestFlag
from stallscope.events.trace import Trace

sys.path.insert(0, str(Path(__file__).parent))
from engine_traces import FIRST_NS, LATE, MS, EngineTrace

DELAY_NS = 300 * MS


def with_spans(engine: EngineTrace, *, outside_ns: int) -> Trace:
    """Each request has a span whose times are shorter by outside_ns."""
    requests = engine.requests
    requests["id_hash"] = np.arange(len(requests)) + 1000
    rows = layout.empty(layout.ENGINE_SPANS, len(requests))
    rows["ts_ns"], rows["id_hash"] = requests["ts_ns"], requests["id_hash"]
    rows["first_ns"] = requests["first_ns"] - requests["ts_ns"] - outside_ns
    rows["whole_ns"] = requests["end_ns"] - requests["ts_ns"] - outside_ns
    rows["queue_ns"], rows["prefill_ns"], rows["decode_ns"] = MS, rows["first_ns"] - MS, UNKNOWN
    return replace(engine.trace(), engine_spans=rows[::-1].copy())


def late_first() -> EngineTrace:
    engine = EngineTrace()
    for i in LATE:
        engine.off(*engine.late_first(i, DELAY_NS), Category.FAULT)
    return engine


def test_a_verdict_has_the_times_of_the_spans_of_its_requests():
    report = diagnose(with_spans(late_first(), outside_ns=0))
    (verdict,) = report.verdicts
    evidence = verdict.evidence
    assert evidence.n_spans == len(LATE)
    assert evidence.engine_ms is not None
    assert evidence.engine_ms["queue"] == 1
    assert evidence.engine_ms["prefill"] == DELAY_NS / MS - 1
    assert "decode" not in evidence.engine_ms
    assert evidence.recorded_ms == {"first": DELAY_NS / MS, "whole": pytest.approx(DELAY_NS / MS + 90)}
    assert "spans of 4 requests: queue 1.0 ms" in text_of(report)


def test_time_that_the_engine_does_not_see_is_reported():
    remarks = [each["what"] for each in diagnose(with_spans(EngineTrace(), outside_ns=15 * MS)).benign]
    assert (
        "The mean time until the first token in the engine's spans differs from the recorded time" in remarks
    )
    remarks = [each["what"] for each in diagnose(with_spans(EngineTrace(), outside_ns=MS)).benign]
    assert not any("spans" in str(each) for each in remarks)


def span_remarks(trace: Trace) -> list[str]:
    return [
        str(each["what"]) for each in diagnose(trace).benign if "in the engine's spans" in str(each["what"])
    ]


def test_the_first_byte_of_a_response_in_one_part_is_not_a_first_token():
    engine = EngineTrace()
    trace = with_spans(engine, outside_ns=0)
    engine.requests["flags"] = 0
    engine.requests["first_ns"] = engine.requests["end_ns"]
    assert span_remarks(trace) == []


def test_aborted_requests_are_not_compared():
    engine = EngineTrace()
    trace = with_spans(engine, outside_ns=0)
    engine.requests["flags"] = RequestFlag.STREAMS | RequestFlag.ABORTED
    engine.requests["end_ns"] += 1000 * MS
    assert span_remarks(trace) == []


def test_times_are_compared_of_the_same_requests():
    engine = EngineTrace()
    for i in range(0, 50, 2):
        engine.late_first(i, DELAY_NS)
    trace = with_spans(engine, outside_ns=0)
    trace.engine_spans["first_ns"][trace.engine_spans["id_hash"] % 2 == 0] = UNKNOWN
    joined = joined_spans(trace, engine.requests)
    assert joined is not None
    assert joined.own_ms["first"] == joined.recorded_ms["first"] == FIRST_NS / MS
    assert (joined.n, joined.n_recorded) == (50, {"first": 25, "whole": 50})


def requests_with(ids: list[int]) -> Array:
    rows = EngineTrace(len(ids)).requests
    rows["id_hash"] = ids
    return rows


def test_only_a_unique_id_is_joined():
    spans = layout.empty(layout.ENGINE_SPANS, 4)
    spans["id_hash"], spans["first_ns"], spans["whole_ns"] = (
        (1, 2, 2, 3),
        (5 * MS, 6 * MS, 7 * MS, 8 * MS),
        MS,
    )
    trace = replace(Trace(), engine_spans=spans)
    joined = joined_spans(trace, requests_with([1, 2, 3, 3, 4, UNKNOWN]))
    assert joined is not None
    assert (joined.n, joined.own_ms["first"], joined.recorded_ms["first"]) == (1, 5, FIRST_NS / MS)
    assert joined_spans(trace, requests_with([UNKNOWN, 9])) is None
