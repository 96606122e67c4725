"""A whole trace, cut into the batches in which its nodes would have sent it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallscope.diagnose.report.verdict import Report
from stallscope.diagnose.stream import Change, Retention, Stream
from stallscope.events.layout import TABLES, UNKNOWN, Array
from stallscope.events.trace import Trace

LISTS = ("processes", "communicators")


@dataclass
class Hand:
    """A clock that tests set by hand."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


@dataclass(frozen=True)
class Told:
    """The results of a stream: its changes, its report before the end, and the stream."""

    stream: Stream
    changes: list[Change]
    report: Report

    def of(self, kind: str) -> list[Change]:
        return [change for change in self.changes if change.kind == kind]

    @property
    def opened(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(change.verdict.kind, tuple(change.verdict.ranks)) for change in self.of("opened")]

    @property
    def updated(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(change.verdict.kind, tuple(change.verdict.ranks)) for change in self.of("updated")]


@dataclass(frozen=True)
class Cut:
    """How a trace is cut. behind_ns: by how much each node sends later. apart: each node sends a batch of its own."""

    n: int = 10
    behind_ns: Mapping[int, int] = field(default_factory=dict)
    apart: bool = False


def told(trace: Trace, cut: Cut, **rest: Any) -> Told:
    """Feed a trace to a new stream, batch by batch, and finish."""
    clock = Hand()
    stream = Stream(clock=clock, **{"retention": Retention(), **rest})
    changes = []
    for at_ns, batch in batches(trace, cut):
        clock.now_ns = at_ns
        changes += stream.feed(batch)
    report = stream.report()
    return Told(stream, changes + stream.finish(), report)


def batches(trace: Trace, cut: Cut) -> Iterator[tuple[int, Trace]]:
    """The batches in order of their arrival at the hub, each with that moment (wall clock)."""
    ahead = {clock.node: clock.wall_ns - clock.monotonic_ns for clock in reversed(trace.clocks)}
    shift = np.array([ahead.get(node, 0) + cut.behind_ns.get(node, 0) for node in range(len(trace.nodes))])
    observed = {table.name: _known_ns(getattr(trace, table.name), shift) for table in TABLES}
    ends = [end + shift[node] for node, end in enumerate(trace.ends_ns) if end != UNKNOWN]
    times = np.concatenate([*observed.values(), np.array(ends, np.int64)])
    edges = np.linspace(times.min() - 1, times.max(), cut.n + 1).astype(np.int64)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        tables: dict[str, Any] = {
            name: getattr(trace, name)[
                (when > (begin if name not in LISTS else times.min() - 1)) & (when <= end)
            ]
            for name, when in observed.items()
        }
        tables["processes"] = _not_ended_after(tables["processes"], end, shift)
        part = replace(
            trace,
            **tables,
            ends_ns=tuple(
                min(output, end - int(shift[node])) if output != UNKNOWN else UNKNOWN
                for node, output in enumerate(trace.ends_ns)
            ),
            lost=trace.lost if begin == edges[0] else {},
        )
        yield from ((end, entry) for entry in (_by_node(part) if cut.apart else [part]))


def _known_ns(rows: Array, shift: Array) -> Array:
    """The time at which a row is known: for calls and intervals, their end."""
    when = rows["ts_ns"].astype(np.int64)
    if "duration_ns" in (rows.dtype.names or ()):
        when = when + np.maximum(rows["duration_ns"], 0)
    known: Array = when + shift[rows["node"]]
    return known


def _not_ended_after(processes: Array, at_ns: int, shift: Array) -> Array:
    rows = processes.copy()
    rows["ended_ns"][rows["ended_ns"] + shift[rows["node"]] > at_ns] = UNKNOWN
    return rows


def _by_node(part: Trace) -> Iterator[Trace]:
    """Each node's own batch, in which it is the only node."""
    for node, name in enumerate(part.nodes):
        tables: dict[str, Any] = {}
        for table in TABLES:
            rows = getattr(part, table.name)
            tables[table.name] = rows[rows["node"] == node].copy()
            tables[table.name]["node"] = 0
        yield replace(
            part,
            **tables,
            nodes=(name,),
            ends_ns=part.ends_ns[node : node + 1],
            clocks=tuple(replace(clock, node=0) for clock in part.clocks if clock.node == node),
            probed=tuple(replace(clock, node=0) for clock in part.probed if clock.node == node),
            lost=part.lost if node == 0 else {},
        )
