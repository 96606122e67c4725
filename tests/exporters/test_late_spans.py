"""Spans of late requests: which requests have one, its content, and ids that stay the same."""

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from stallscope.events import layout
from stallscope.exporters.late_spans import LateSpans
from stallscope.exporters.otlp_messages import Incident, resource, spans_request

MS = 10**6


def requests(n: int, *, first_ms: float = 20, gap_ms: float = 10, begin: int = 0):
    rows = layout.empty(layout.REQUESTS, n)
    rows["ts_ns"] = 10**9 + 100 * MS * (begin + np.arange(n))
    rows["pid"], rows["tid"], rows["method"], rows["path"] = 7, 8, b"POST", b"/v1/completions"
    rows["engine"], rows["status"], rows["n_tokens"] = b"vllm", 200, 10
    rows["first_ns"] = rows["gap_at_ns"] = rows["ts_ns"] + int(first_ms * MS)
    rows["gap_ns"] = int(gap_ms * MS)
    rows["end_ns"] = rows["first_ns"] + 100 * MS
    return rows


def test_a_request_that_is_late_for_its_endpoint_has_a_span():
    spans = LateSpans("node-7")
    assert list(spans.take(requests(50), 5)) == []
    (late,) = spans.take(requests(1, first_ms=400, begin=50), 5)
    assert late["summary"] == "delayed by 380 ms before its first token"
    assert late["begin_ns"] == 10**9 + 5000 * MS + 5
    assert late["attributes"]["stallscope.time_to_first_token_ms"] == 400
    assert "gen_ai.request.model" not in late["attributes"]


def test_a_long_pause_between_tokens_is_named():
    spans = LateSpans("node-7")
    list(spans.take(requests(50), 0))
    (late,) = spans.take(requests(1, gap_ms=300, begin=50), 0)
    assert late["attributes"]["stallscope.late_part"] == "gap"
    assert late["attributes"]["stallscope.late_ms"] == 290


def test_the_first_requests_of_an_endpoint_have_no_span():
    assert list(LateSpans("node-7").take(requests(10, first_ms=5000), 0)) == []


def test_the_ids_of_a_span_derive_from_the_request():
    def exported(node: str) -> Span:
        spans = LateSpans(node)
        list(spans.take(requests(50), 0))
        (late,) = spans.take(requests(1, first_ms=400, begin=50), 0)
        message = spans_request([Incident(**late)], resource(node))
        (span,) = message.resource_spans[0].scope_spans[0].spans
        return span

    first, again, other = exported("node-7"), exported("node-7"), exported("node-8")
    assert (first.trace_id, first.span_id) == (again.trace_id, again.span_id)
    assert first.span_id != other.span_id
    assert first.kind == Span.SPAN_KIND_SERVER
    assert first.name == "POST /v1/completions"


def test_a_second_with_many_late_requests_has_the_latest_of_them():
    spans = LateSpans("node-7")
    list(spans.take(requests(300), 0))
    rows = requests(60, first_ms=400, begin=300)
    rows["first_ns"][7] += 500 * MS
    late = list(spans.take(rows, 0))
    assert len(late) == 20
    assert late[0]["attributes"]["stallscope.late_ms"] == 880
