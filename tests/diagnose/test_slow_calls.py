"""Slow-call chains: similar calls are compared, and only the wait of the calling thread explains a call."""

import numpy as np
import pytest

from stallscope.diagnose.views.slow_calls import chains
from stallscope.events import layout
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

from .builders import MS

US = 1000


def trace_of(calls: list[tuple[int, int, Op, int]], off: list[tuple[int, int, Category, int]] = []) -> Trace:  # noqa: B006
    """calls: begin, length, operation, bytes of thread 7. off: begin, length, category, thread."""
    rows = layout.empty(layout.CALLS, len(calls))
    for row, (begin, length, op, n_bytes) in zip(rows, calls, strict=True):
        row["ts_ns"], row["duration_ns"], row["op"], row["count_bytes"] = begin, length, op, n_bytes
        row["pid"] = row["tid"] = 7
        row["symbol"] = int(op == Op.COPY) + 1
    offcpu = layout.empty(layout.OFFCPU, len(off))
    for row, (begin, length, category, tid) in zip(offcpu, off, strict=True):
        row["ts_ns"], row["duration_ns"], row["category"], row["tid"], row["pid"] = (
            begin,
            length,
            category,
            tid,
            7,
        )
        row["by_comm"] = b"hog" if category == Category.PREEMPTED else b""
    return Trace(calls=rows, offcpu=offcpu, symbols=("", "cudaMalloc", "cudaMemcpy"))


def steady(n: int = 30, op: Op = Op.ALLOC, length: int = 200 * US, n_bytes: int = 4096):
    return [(i * 10 * MS, length, op, n_bytes) for i in range(n)]


def test_a_steady_function_has_no_chain():
    assert chains(trace_of(steady())) == []


def test_the_first_call_is_not_slow_but_first():
    assert (
        chains(trace_of([(0, 26 * MS, Op.ALLOC, 4096), *[(b + 50 * MS, *rest) for b, *rest in steady()]]))
        == []
    )


def test_a_link_has_the_category_and_share_of_the_blocked_time():
    calls = steady()
    calls[20] = (200 * MS, 8 * MS, Op.ALLOC, 4096)
    off = [
        (201 * MS, 6 * MS, Category.PREEMPTED, 7),
        (100 * MS, 9 * MS, Category.IO, 7),  # another time
        (201 * MS, 6 * MS, Category.LOCK, 8),  # another thread
    ]
    (chain,) = chains(trace_of(calls, off))
    assert (chain.function, chain.duration_ns, chain.n_like) == ("cudaMalloc", 8 * MS, 29)
    assert chain.usual_ns == pytest.approx(200 * US)
    (link,) = chain.links
    assert (link.category, link.by) == (Category.PREEMPTED, "hog")
    assert chain.explained == pytest.approx(0.75)


def test_a_large_copy_is_compared_by_its_bytes():
    calls = [(i * 100 * MS, MS // 8, Op.COPY, 1 << 20) for i in range(20)]
    calls[10] = (1000 * MS, 34 * MS, Op.COPY, 272 << 20)
    assert chains(trace_of(calls)) == []
    calls[12] = (1200 * MS, 20 * MS, Op.COPY, 1 << 20)
    (chain,) = chains(trace_of(calls))
    assert chain.usual_ns == pytest.approx(MS / 8)
    assert chain.links == ()


def test_of_many_the_longest_are_given():
    calls = steady(400)
    for i in range(100, 400, 10):
        calls[i] = (i * 10 * MS, (2 + i // 100) * MS, Op.ALLOC, 4096)
    result = chains(trace_of(calls), most=5)
    assert [chain.duration_ns for chain in result] == [5 * MS] * 5
    assert np.isfinite([chain.usual_ns for chain in result]).all()
