"""The shared context of all tracks of a timeline: processes, one clock for all nodes, and the rounds of the job."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stallscope.diagnose import Thresholds
from stallscope.diagnose.timeline import Clocks, Rounds, Timeline, aligned, rounds, timeline_of
from stallscope.diagnose.views import kernels_on_host_clock
from stallscope.events.layout import TABLES, UNKNOWN, Array
from stallscope.events.trace import Clock, Trace


@dataclass(frozen=True)
class Process:
    """A process of the trace. row: its number in the timeline, -1 without collectives."""

    node: int
    pid: int
    rank: int
    comm: str
    row: int


@dataclass(frozen=True)
class TraceContext:
    """A trace on one clock. matched: its rounds. begin_ns, end_ns: of all records, on the common clock.

    shift_ns: by node, the offset by wall times, for nodes whose clock the job's rounds could not align.
    """

    trace: Trace
    timeline: Timeline
    clocks: Clocks
    matched: Rounds
    processes: tuple[Process, ...]
    shift_ns: Mapping[int, int]
    begin_ns: int
    end_ns: int

    def common_ns(self, node: int, ts_ns: Array) -> Array:
        """Times of a node's clock on the first node's clock: int64."""
        if node not in self.clocks.offsets:
            return ts_ns.astype(np.int64) - self.shift_ns.get(node, 0)
        return self.clocks.common_times_ns(node, ts_ns)

    def from_wall_ns(self, wall_ns: int) -> int:
        """A wall time on the common clock, by the nearest reading of the first node that has one."""
        readings = [clock for clock in self.trace.clocks if clock.node == self.first_node]
        if not readings:
            return self.begin_ns
        nearest = min(readings, key=lambda clock: abs(clock.wall_ns - wall_ns))
        return wall_ns - nearest.wall_ns + nearest.monotonic_ns

    @cached_property
    def nccl_kernels(self) -> tuple[Array, Array]:
        """The operations of NCCL that have times on their GPU, and their starts on the clock of their node."""
        return kernels_on_host_clock(self.trace.gpu_kernels)

    @property
    def first_node(self) -> int:
        """The node whose clock is the common clock."""
        return int(self.timeline.node.min(initial=0)) if self.timeline.n_processes else 0


def trace_context(trace: Trace) -> TraceContext:
    """The context of a trace."""
    timeline = timeline_of(trace)
    clocks = aligned(timeline, trace)
    first = int(timeline.node.min()) if timeline.n_processes else 0
    known = _shifts(trace.clocks, first)
    partial = TraceContext(
        trace,
        timeline,
        clocks,
        rounds(timeline, clocks, Thresholds()),
        _processes(trace, timeline),
        known,
        0,
        0,
    )
    begin_ns, end_ns = _span(partial)
    return replace(partial, begin_ns=begin_ns, end_ns=end_ns)


def _shifts(readings: tuple[Clock, ...], first: int) -> dict[int, int]:
    """The lead of each node's monotonic clock over the first node's clock, if their wall clocks are right."""
    lead_ns = {reading.node: reading.monotonic_ns - reading.wall_ns for reading in reversed(readings)}
    return {node: value - lead_ns[first] for node, value in lead_ns.items()} if first in lead_ns else {}


def _processes(trace: Trace, timeline: Timeline) -> tuple[Process, ...]:
    """Every process named by any record, by node, rank and pid."""
    rows = {(int(n), int(p)): i for i, (n, p) in enumerate(zip(timeline.node, timeline.pid, strict=True))}
    process_rows = {(int(row["node"]), int(row["pid"])): row for row in trace.processes}
    named = (
        {key for table in TABLES for key in _keys(getattr(trace, table.name))}
        | rows.keys()
        | process_rows.keys()
    )
    processes = []
    for node, pid in named:
        row = rows.get((node, pid), UNKNOWN)
        rank = int(timeline.rank[row]) if row >= 0 else UNKNOWN
        recorded = process_rows.get((node, pid))
        if rank == UNKNOWN and recorded is not None:
            rank = int(recorded["rank"])
        comm = recorded["comm"].decode("utf-8", "replace") if recorded is not None else ""
        processes.append(Process(node, pid, rank, comm, row))
    return tuple(
        sorted(
            processes,
            key=lambda process: (process.node, process.rank if process.rank >= 0 else 1 << 40, process.pid),
        )
    )


def _keys(rows: Array) -> set[tuple[int, int]]:
    pairs = np.unique(rows[["node", "pid"]])
    return {(int(node), int(pid)) for node, pid in pairs.tolist()}


def _span(partial: TraceContext) -> tuple[int, int]:
    """First and last moment of all records and of the capture."""
    first, last = [], []
    for table in TABLES:
        rows = getattr(partial.trace, table.name)
        for node in np.unique(rows["node"]).tolist():
            node_rows = rows[rows["node"] == node]
            begin = partial.common_ns(node, node_rows["ts_ns"])
            length = (
                node_rows["duration_ns"]
                if "duration_ns" in (node_rows.dtype.names or ())
                else np.zeros(len(node_rows), np.int64)
            )
            if table.name != "processes":  # a process may be far older than the capture
                first.append(int(begin.min()))
            last.append(int((begin + np.maximum(length, 0)).max()))
    for node, end_ns in enumerate(partial.trace.ends_ns):
        if end_ns >= 0:
            last.append(int(partial.common_ns(node, np.array([end_ns]))[0]))
    return min(first, default=0), max(last, default=0)
