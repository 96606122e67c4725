"""CUDA errors: the first failed rank is named, survived errors are not."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.processes.cuda_errors import CODES, OUT_OF_MEMORY
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import Op
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


@pytest.mark.parametrize("code", [0, 600, 4, 709, -1])
def test_harmless_error_codes_are_not_reported(code):
    healthy = dp_trace()
    assert report_of(with_calls(healthy, failing(healthy, 1, code))).healthy
