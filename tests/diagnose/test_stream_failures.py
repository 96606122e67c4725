"""Failing calls in a stream: reported once they are known to be the end of a process, and not before."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.processes.cuda_errors import OUT_OF_MEMORY
from stallscope.diagnose.stream import Change, Stream
from stallscope.events.names import Op
from stallscope.events.trace import Trace

from .builders import MS, dp_trace
from .cutting import Cut, Hand, batches, told
from .test_cuda_errors import failing, with_calls

SECOND = 1_000 * MS


def until(trace: Trace, end_ns: int) -> Trace:
    """The rows of a node up to a time of its clock, up to which its capture is complete."""
    calls, rows = trace.calls, trace.collectives
    known = calls["ts_ns"] + calls["duration_ns"] <= end_ns
    return replace(
        trace, calls=calls[known], collectives=rows[rows["ts_ns"] <= end_ns], ends_ns=(end_ns,), lost={}
    )


def after(trace: Trace, begin_ns: int, end_ns: int) -> Trace:
    """The rows of the node after that time."""
    before, whole = until(trace, begin_ns), until(trace, end_ns)
    return replace(
        whole,
        calls=whole.calls[~np.isin(whole.calls["ts_ns"], before.calls["ts_ns"])],
        collectives=whole.collectives[whole.collectives["ts_ns"] > begin_ns],
    )


def fed(*parts: Trace) -> list[list[Change]]:
    """The changes after each part and the two seconds that follow it."""
    clock, result = Hand(), []
    stream = Stream(clock=clock)
    for part in parts:
        changes = stream.feed(part)
        for _ in range(4):
            clock.now_ns += SECOND // 2
            changes += stream.tick()
        result.append(changes)
    return result


def test_an_allocation_failure_with_a_successful_retry_is_not_reported():
    healthy = dp_trace()
    refused = failing(healthy, 1, OUT_OF_MEMORY, at=0.2, op=Op.ALLOC)
    given = refused.copy()
    given["ts_ns"] += 20 * MS
    given["result"] = 0
    trace = with_calls(healthy, refused, given)
    refused_ns, end_ns = int(refused["ts_ns"][0]), trace.ends_ns[0]
    cut_ns = refused_ns + 2 * MS
    assert len(until(trace, cut_ns).calls) == 1
    assert fed(until(trace, cut_ns), after(trace, cut_ns, end_ns)) == [[], []]
    assert told(trace, Cut(40)).changes == []


def test_a_final_allocation_failure_is_reported_once_its_process_is_silent():
    healthy = dp_trace()
    trace = with_calls(healthy, failing(healthy, 1, OUT_OF_MEMORY, op=Op.ALLOC))
    end_ns = int(trace.calls["ts_ns"][0]) + SECOND
    first, later = fed(until(trace, end_ns), after(trace, end_ns, end_ns + 2 * SECOND))
    assert first == []
    assert [(entry.kind, entry.verdict.kind, entry.verdict.ranks) for entry in later] == [
        ("opened", "failure", [1])
    ]


def test_a_process_that_goes_on_after_all_closes_its_incident():
    whole = dp_trace(n_steps=120)
    times = whole.collectives["ts_ns"]
    middle = int(np.median(times))
    moved = whole.collectives.copy()
    moved["ts_ns"][times > middle] += 5 * SECOND
    refused = failing(whole, 1, OUT_OF_MEMORY, op=Op.ALLOC)
    refused["ts_ns"] = middle
    trace = with_calls(replace(whole, collectives=moved), refused)
    silent_ns, end_ns = middle + 4 * SECOND, int(moved["ts_ns"].max()) + MS
    silent, going = fed(until(trace, silent_ns), after(trace, silent_ns, end_ns))
    assert [(entry.kind, entry.verdict.kind) for entry in silent] == [("opened", "failure")]
    closed = [entry for entry in going if entry.verdict.kind == "failure"]
    assert [(entry.kind, entry.reason) for entry in closed] == [("closed", "the process continued")]


@pytest.mark.parametrize("code", [700, 719])
def test_an_error_that_destroys_its_context_is_reported_immediately(code):
    healthy = dp_trace()
    trace = with_calls(healthy, failing(healthy, 2, code))
    clock, changes = Hand(), []
    stream = Stream(clock=clock)
    for at_ns, batch in batches(trace, Cut(30)):
        clock.now_ns = at_ns
        changes += [*stream.feed(batch), *stream.tick()]
    assert [(change.kind, change.verdict.ranks) for change in changes] == [("opened", [2])]
