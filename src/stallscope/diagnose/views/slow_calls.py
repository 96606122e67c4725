"""Slow-call chains: the waits of the calling thread during a call that took far longer than similar calls.

Similar calls have the same function and size class in one process; copies are compared by their time per byte. First
calls of a function load and compile, and are left out. Overlap in time is not a cause: only waits of the calling thread
inside the call count, each with its share of the call.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.processes.single import outermost
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

SLOW_FACTOR = 10.0
"""A call is slow from this multiple of the median of similar calls on ..."""

SLOW_NS = 1_000_000
"""... and from this length on: shorter calls cost too little."""

MIN_SIMILAR_CALLS = 5
"""Fewer calls have no typical length."""

_MIN_SHARE = 0.05
_PER_BYTE_FROM = 1 << 16  # smaller copies take a fixed time


@dataclass(frozen=True)
class Link:
    """A wait within the call. share: of the call's duration. by: the task that took the CPU, where known."""

    category: Category
    share: float
    by: str = ""


@dataclass(frozen=True)
class Chain:
    """A slow call and its waits, longest first; the remaining time was inside the call itself. Times in ns.

    wall_ns: entry, since 1970; None without a clock. usual_ns: typical time of similar calls (for a copy of this size).
    """

    node: str
    pid: int
    tid: int
    function: str
    op: Op
    wall_ns: int | None
    duration_ns: int
    usual_ns: float
    n_like: int
    count_bytes: int
    links: tuple[Link, ...]

    @property
    def explained(self) -> float:
        """Share of the call in which its thread waited: 0 to 1."""
        return sum(link.share for link in self.links)


def chains(trace: Trace, *, most: int = 50) -> list[Chain]:
    """The slow calls of a trace that have similar calls, the longest first. most: limit of their number."""
    calls = outermost(trace.calls)
    if not len(calls):
        return []
    order = np.lexsort((calls["ts_ns"], calls["symbol"], calls["pid"], calls["node"]))
    calls = calls[order]
    is_first = _changes(calls, ("node", "pid", "symbol"))
    function = np.cumsum(is_first)
    cost = _comparable(calls)
    size = np.where(cost != calls["duration_ns"], -1, _size_class(calls))
    kind = function * 128 + size + 1
    slow_calls: list[tuple[int, float, int]] = []
    for value in np.unique(kind[~is_first]):
        rows = np.flatnonzero((kind == value) & ~is_first)
        if len(rows) < MIN_SIMILAR_CALLS:
            continue
        typical_cost = float(np.median(cost[rows]))
        slow = rows[(cost[rows] > SLOW_FACTOR * typical_cost) & (calls["duration_ns"][rows] >= SLOW_NS)]
        slow_calls += [
            (int(row), typical_cost * float(calls["duration_ns"][row] / cost[row]), len(rows)) for row in slow
        ]
    slow_calls.sort(key=lambda slow_call: -int(calls["duration_ns"][slow_call[0]]))
    return [_chain(trace, calls[row], typical_ns, n) for row, typical_ns, n in slow_calls[:most]]


def _changes(rows: Array, columns: tuple[str, ...]) -> Array:
    """Where a group begins, along rows sorted by these columns: (n,) bool."""
    begins = np.zeros(len(rows), bool)
    begins[:1] = True
    for column in columns:
        begins[1:] |= rows[column][1:] != rows[column][:-1]
    return begins


def _comparable(calls: Array) -> Array:
    """The value by which calls are compared: their duration, for large copies the ns per byte. (n,) float64."""
    by_byte = (calls["op"] == Op.COPY) & (calls["count_bytes"] >= _PER_BYTE_FROM)
    return np.where(by_byte, calls["duration_ns"] / np.maximum(calls["count_bytes"], 1), calls["duration_ns"])


def _size_class(calls: Array) -> Array:
    """Power of two of the bytes, 0 where they are unknown."""
    n_bytes = np.maximum(calls["count_bytes"], 0)
    return np.floor(np.log2(n_bytes + 1)).astype(np.int64)


def _chain(trace: Trace, call: Array, usual_ns: float, n_like: int) -> Chain:
    symbol = int(call["symbol"])
    return Chain(
        node=trace.nodes[int(call["node"])],
        pid=int(call["pid"]),
        tid=int(call["tid"]),
        function=trace.symbols[symbol] if symbol < len(trace.symbols) else "",
        op=Op(int(call["op"])),
        wall_ns=wall_ns(trace, int(call["node"]), int(call["ts_ns"])),
        duration_ns=int(call["duration_ns"]),
        usual_ns=usual_ns,
        n_like=n_like,
        count_bytes=int(call["count_bytes"]),
        links=_links(trace, call),
    )


def _links(trace: Trace, call: Array) -> tuple[Link, ...]:
    """The waits of the calling thread during the call."""
    off = trace.offcpu
    begin, end = int(call["ts_ns"]), int(call["ts_ns"] + call["duration_ns"])
    rows = off[(off["node"] == call["node"]) & (off["tid"] == call["tid"]) & (off["pid"] == call["pid"])]
    leaves = np.where(rows["duration_ns"] == UNKNOWN, end, rows["ts_ns"] + rows["duration_ns"])
    inside = np.minimum(leaves, end) - np.maximum(rows["ts_ns"], begin)
    links = []
    for category in np.unique(rows["category"][inside > 0]):
        held = (rows["category"] == category) & (inside > 0)
        share = float(inside[held].sum() / max(end - begin, 1))
        longest = rows[held][np.argmax(inside[held])]
        by = longest["by_comm"].decode("utf-8", "replace") if category == Category.PREEMPTED else ""
        if share >= _MIN_SHARE:
            links.append(Link(Category(int(category)), min(share, 1.0), by))
    return tuple(sorted(links, key=lambda link: -link.share))
