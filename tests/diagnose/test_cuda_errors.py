"""CUDA errors: the first failed rank is named, survived errors are not."""

import signal
from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.processes.cuda_errors import CODES, OUT_OF_MEMORY
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import HostKind, Op
from stallscope.events.trace import Trace

from .builders import MS, dp_trace
from .reports import only, report_of


def failing(trace: Trace, rank: int, code: int, *, at: float = 1.0, op: Op = Op.SYNC) -> Array:
    """One failing call of a rank, at a share of the trace."""
    process = trace.processes[trace.processes["rank"] == rank][0]
    times = trace.collectives["ts_ns"]
    row = layout.empty(layout.CALLS, 1)
    row["ts_ns"] = times.min() + int(at * (times.max() - times.min())) + 5 * MS
    row["duration_ns"], row["op"], row["result"], row["symbol"] = MS, op, code, 1
    row["node"], row["pid"], row["tid"] = process["node"], process["pid"], process["pid"]
    row["count_bytes"] = 1 << 30
    return row


def with_calls(trace: Trace, *rows: Array) -> Trace:
    return replace(trace, calls=np.concatenate([trace.calls, *rows]), symbols=("", "cudaStreamSynchronize"))


@pytest.mark.parametrize("code", sorted(set(CODES) - {OUT_OF_MEMORY}))
def test_the_rank_that_failed_first_is_named_with_the_error(code):
    healthy = dp_trace()
    trace = with_calls(healthy, failing(healthy, 3, 719, at=1.5), failing(healthy, 2, code))
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("failure", [2], [3])
    assert verdict.causes[0].cause.name == CODES[code][0]
    assert CODES[code][1] in verdict.summary


def test_a_final_out_of_memory_error_is_reported():
    healthy = dp_trace()
    verdict = only(report_of(with_calls(healthy, failing(healthy, 1, OUT_OF_MEMORY, op=Op.ALLOC))))
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([1], "out_of_memory")
    assert verdict.evidence.requested_bytes == 1 << 30


def test_an_allocation_that_succeeds_on_retry_is_benign():
    healthy = dp_trace()
    refused = failing(healthy, 1, OUT_OF_MEMORY, at=0.2, op=Op.ALLOC)
    given = refused.copy()
    given["ts_ns"] += 20 * MS
    given["result"] = 0
    report = report_of(with_calls(healthy, refused, given))
    assert report.healthy
    assert any("got no GPU memory" in str(remark["what"]) for remark in report.benign)


@pytest.mark.parametrize(("code", "is_failure"), [(209, False), (700, True)])
def test_an_error_after_which_the_rank_continues_is_a_failure_only_if_it_ends_the_context(code, is_failure):
    """Libraries try variants of a kernel that the GPU may not have (error 209)."""
    healthy = dp_trace(n_steps=300)
    report = report_of(with_calls(healthy, failing(healthy, 1, code, at=0.1)))
    assert [verdict.kind for verdict in report.verdicts] == ["failure"] * is_failure
    assert (
        any("continued after an error" in str(remark["what"]) for remark in report.benign) is not is_failure
    )


def ended(trace: Trace, rank: int, status: int) -> Trace:
    """The trace; the process of a rank ends with a status after its last call."""
    rows = layout.empty(layout.HOST_EVENTS, 1)
    process = trace.processes[trace.processes["rank"] == rank][0]
    rows["node"], rows["pid"], rows["kind"] = process["node"], process["pid"], HostKind.EXIT
    rows["value"], rows["ts_ns"] = status, trace.calls["ts_ns"].max() + 20 * MS
    return replace(trace, host_events=rows)


def refused_lookup(at: float = 1.0) -> Trace:
    """A short job: a rank looks for a kernel that its GPU does not have."""
    healthy = dp_trace(n_steps=40)
    return with_calls(healthy, failing(healthy, 1, 209, at=at, op=Op.MODULE))


@pytest.mark.parametrize("status", [None, 0, 128 + signal.SIGTERM, 128 + signal.SIGKILL])
@pytest.mark.parametrize("at", [0.1, 0.9, 1.0])
def test_a_refused_lookup_of_a_kernel_is_an_answer(at: float, status: int | None):
    trace = refused_lookup(at)
    report = report_of(trace if status is None else ended(trace, 1, status))
    assert [verdict for verdict in report.verdicts if verdict.kind == "failure"] == []


@pytest.mark.parametrize("status", [1, 128 + signal.SIGABRT])
def test_a_refused_lookup_before_an_end_with_an_error_is_a_failure(status: int):
    verdict = only(report_of(ended(refused_lookup(), 1, status)))
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([1], "driver_mismatch")


@pytest.mark.parametrize("op", [Op.LAUNCH, Op.ALLOC, Op.COPY])
def test_work_after_a_refused_lookup_shows_that_it_was_not_the_reason_of_the_end(op: Op):
    trace = refused_lookup()
    work = trace.calls[-1:].copy()
    work["ts_ns"] += 2 * MS
    work["result"], work["op"] = 0, op
    report = report_of(ended(replace(trace, calls=np.concatenate([trace.calls, work])), 1, 1))
    assert not any(cause.cause.name == "driver_mismatch" for v in report.verdicts for cause in v.causes)


def test_a_rank_that_does_no_work_after_a_refused_lookup_while_others_do_has_failed():
    healthy = dp_trace(n_steps=300)
    rows = healthy.collectives
    pid = healthy.processes["pid"][healthy.processes["rank"] == 1][0]
    stopped_ns = rows["ts_ns"].min() + (rows["ts_ns"].max() - rows["ts_ns"].min()) // 4
    kept = rows[(rows["pid"] != pid) | (rows["ts_ns"] < stopped_ns)]
    alone = replace(healthy, collectives=kept, ends_ns=(int(rows["ts_ns"].max()) + 11_000 * MS,))
    trace = with_calls(alone, failing(healthy, 1, 209, at=0.25, op=Op.MODULE))
    verdict = report_of(trace).verdicts[0]
    assert (verdict.kind, verdict.ranks) == ("failure", [1])
    assert verdict.causes[0].cause.name == "driver_mismatch"


@pytest.mark.parametrize("code", [0, 600, 4, 709, -1])
def test_harmless_error_codes_are_not_reported(code):
    healthy = dp_trace()
    assert report_of(with_calls(healthy, failing(healthy, 1, code))).healthy
