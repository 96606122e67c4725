"""The engine's own metrics as evidence: a full KV cache, and means that differ from the recorded requests."""

from dataclasses import replace

import numpy as np
import pytest
from tests.diagnose.serving.engine_traces import FIRST_NS, GAP_NS, MS, PID, SECOND, EngineTrace

from stallscope.diagnose.serving.own_metrics import differences, pressure
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.verdicts.inference_engine import report, verdicts
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.trace import Trace

LIMITS = Thresholds()


def reads(*values: dict[str, int], every_ns: int = SECOND) -> Array:
    rows = layout.empty(layout.ENGINE_METRICS, len(values))
    rows["ts_ns"] = SECOND + every_ns * np.arange(len(values))
    rows["pid"], rows["group_pid"], rows["engine"] = PID, PID, b"vllm"
    for row, columns in zip(rows, values, strict=True):
        for name, value in columns.items():
            row[name] = value
    return rows


@pytest.mark.parametrize(
    ("before", "after", "is_full"),
    [
        ({"n_preempted": 3}, {"n_preempted": 5}, True),
        ({"n_preempted": 3}, {"n_preempted": 3}, False),
        ({"n_preempted": 9}, {"n_preempted": 0}, False),  # the engine was restarted
        ({"kv_permille": 200, "n_waiting": 0}, {"kv_permille": 990, "n_waiting": 2}, True),
        ({"kv_permille": 200, "n_waiting": 0}, {"kv_permille": 990, "n_waiting": 0}, False),
        ({"kv_permille": 200, "n_waiting": 9}, {"kv_permille": 300, "n_waiting": 9}, False),
        ({}, {}, False),
    ],
)
def test_a_full_cache_has_preempted_or_waiting_requests(before, after, is_full):
    state = pressure(reads(before, after), SECOND + 10 * MS, SECOND + 20 * MS)
    assert state is not None
    assert state.is_full == is_full


def test_only_reads_around_the_interval_count():
    rows = reads({"n_preempted": 0}, {"n_preempted": 5}, {"n_preempted": 5}, {"n_preempted": 5})
    late = pressure(rows, SECOND + 2100 * MS, SECOND + 2200 * MS)
    assert late is not None
    assert not late.is_full
    assert pressure(rows[:1], SECOND, 2 * SECOND) is None


def queued() -> EngineTrace:
    """Requests that wait behind each other, as they do without space in the cache."""
    made = EngineTrace()
    for i in range(10, 20):
        made.late_first(i, 900 * MS)
    return made


def causes_of(trace: Trace) -> list[str]:
    return [each.causes[0].cause.name for each in verdicts(trace, report(trace, LIMITS), LIMITS)]


def test_waits_for_space_in_the_cache_are_named_by_the_metrics_of_the_engine():
    trace = queued().trace()
    n = 8
    full = reads(*({"kv_permille": 990, "n_waiting": 4, "n_preempted": i} for i in range(n)))
    assert causes_of(replace(trace, engine_metrics=full)) == ["kv_cache"]
    roomy = reads(*({"kv_permille": 300, "n_waiting": 4, "n_preempted": 0} for _ in range(n)))
    assert "kv_cache" not in causes_of(replace(trace, engine_metrics=roomy))


def published(first_ns: int, between_ns: int) -> Array:
    """Two reads around all requests: 50 first tokens and 450 times between tokens, as recorded."""
    before = {"n_first": 100, "first_ns": 0, "n_between": 1000, "between_ns": 0}
    after = {"n_first": 150, "first_ns": 50 * first_ns, "n_between": 1450, "between_ns": 450 * between_ns}
    rows = reads(before, after)
    rows["ts_ns"] = 0, 100 * SECOND
    return rows


def trace_with_tokens() -> Trace:
    trace = EngineTrace().trace()
    trace.requests["method"] = b"POST"
    trace.tokens["total_ns"] = trace.tokens["n"] * GAP_NS
    return trace


def test_equal_means_are_no_difference():
    trace = replace(trace_with_tokens(), engine_metrics=published(FIRST_NS, GAP_NS))
    assert differences(trace, 0, (PID,)) == []


def test_a_client_that_waits_longer_than_the_engine_publishes_is_a_difference():
    trace = replace(trace_with_tokens(), engine_metrics=published(FIRST_NS // 4, GAP_NS))
    (remark,) = differences(trace, 0, (PID,))
    assert (
        remark["what"]
        == "The mean time until the first token that vllm publishes differs from the recorded time"
    )
    assert (remark["published_ms"], remark["recorded_ms"]) == (FIRST_NS / 4e6, FIRST_NS / 1e6)
