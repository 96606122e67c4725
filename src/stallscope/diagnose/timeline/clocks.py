"""All arrivals on one clock, found from the job itself, with an error bar; and clock readings as wall time.

Each node's CLOCK_MONOTONIC starts somewhere else and drifts. The rounds of the job, the wall clocks of the nodes and
probes over the network tie the clocks together (see offsets). Nodes without such a tie are aligned by the
end of their captures, with an infinite error: durations are right, lateness is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.timeline.node_rounds import NodeRounds, meetings
from stallscope.diagnose.timeline.offsets import (
    FEWEST,
    MIN_ERROR_NS,
    SAME_CLOCK,
    WALL_ERROR_NS,
    Evidence,
    Offset,
    by_wall_clocks,
    combined,
    evidence,
    wall_offset,
)
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Clock, Trace

_DRIFT = 2e-5  # drift of two undisciplined clocks, at most
_FEWEST_NODES = 3  # nodes tied by releases from which the error of their wall clocks is learned
_WALL_SPREADS = 4.0  # wall clocks are off by up to this many median errors
_WALL_MIN_NS = 1_000_000.0

Readings = Mapping[int, tuple[Clock, Clock]]


@dataclass(frozen=True)
class Clocks:
    """arrival_ns: int64 (n,), the timeline's arrivals on the clock of the first node. offsets: by node number, against
    the first node's clock. error_ns: float64 by node number, against the common clock of the job, inf for nodes that
    are not tied to it.
    """

    arrival_ns: Array
    offsets: dict[int, Offset]
    error_ns: Array

    def common_ns(self, node: int, t_ns: int) -> int:
        """A time of a node's clock on the common clock; unchanged where the node is unknown."""
        offset = self.offsets.get(node)
        return t_ns if offset is None else t_ns - round(offset.at(t_ns))

    def common_times_ns(self, node: int, t_ns: Array) -> Array:
        """Times of a node's clock on the common clock: int64 (n,); unchanged where the node is unknown."""
        offset, t_ns = self.offsets.get(node), t_ns.astype(np.int64)
        return t_ns if offset is None else t_ns - np.rint(offset.ns(t_ns)).astype(np.int64)

    def are_tied(self, *nodes: int) -> bool:
        """Whether the clocks of these nodes are tied to the common clock, with a known error."""
        return all(node in self.offsets and np.isfinite(self.offsets[node].error_ns) for node in nodes)


def aligned(timeline: Timeline, trace: Trace) -> Clocks:
    """All arrivals on one clock: by the job's rounds, the nodes' wall clocks, and probes that are more accurate.

    Probes (events.Trace.probed) are readings of the nodes' clocks against one wall clock.
    """
    arrival = timeline.ts_ns
    if not timeline.n_processes:
        return Clocks(arrival, {}, np.zeros(0))
    start, nodes = int(timeline.node.min()), np.unique(timeline.node).tolist()
    offsets = {start: SAME_CLOCK}
    if len(nodes) > 1:
        readings, latest = by_wall_clocks(trace.clocks), _latest_ns(timeline)
        root, offsets = _offsets(timeline, start, readings=readings)
        offsets = _closest(offsets, trace.probed, root, latest_ns=latest)
        offsets = _side_by_side(offsets, trace.ends_ns, root, latest_ns=latest)
        offsets = _against(start, offsets, root, latest_ns=latest)
    error = np.full(int(timeline.node.max()) + 1, np.inf)
    common = arrival.copy() if len(offsets) > 1 else arrival
    for node in nodes:
        error[node] = offsets[node].error_ns
        if node != start:
            rows = _rows_of(timeline, node)
            common[rows] = arrival[rows] - np.rint(offsets[node].ns(arrival[rows])).astype(np.int64)
    return Clocks(common, offsets, error)


def _rows_of(timeline: Timeline, node: int) -> slice:
    """The rows of a node's processes, which have consecutive numbers."""
    begin, end = np.searchsorted(timeline.node, [node, node + 1])
    return slice(int(timeline.first[begin]), int(timeline.first[end]))


def _latest_ns(timeline: Timeline) -> dict[int, int]:
    """The last arrival of each node, on its own clock."""
    return {
        int(node): int(timeline.ts_ns[_rows_of(timeline, int(node))].max(initial=0))
        for node in np.unique(timeline.node)
    }


def _closest(
    offsets: dict[int, Offset], probed: Sequence[Clock], root: int, *, latest_ns: dict[int, int]
) -> dict[int, Offset]:
    """The offsets from the job, replaced by offsets from probes that are more accurate."""
    read = {clock.node: clock for clock in probed}
    if root not in read:
        return offsets
    first, out = read[root], dict(offsets)
    for node in latest_ns.keys() & read.keys() - {root}:
        other = read[node]
        at = (other.monotonic_ns - other.wall_ns) - (first.monotonic_ns - first.wall_ns)
        ago_ns = max(other.monotonic_ns - latest_ns[node], 0)
        error = first.error_ns + other.error_ns + _DRIFT * ago_ns + MIN_ERROR_NS
        if node not in out or error < out[node].error_ns:
            out[node] = Offset(float(at), 0.0, float(other.monotonic_ns), float(error))
    return out


def _side_by_side(
    offsets: dict[int, Offset], ends_ns: Sequence[int], root: int, *, latest_ns: dict[int, int]
) -> dict[int, Offset]:
    """The offsets, and for nodes without an offset the difference of the ends of their captures or last arrivals."""

    def end_ns(node: int) -> int:
        is_known = node < len(ends_ns) and ends_ns[node] != UNKNOWN
        return ends_ns[node] if is_known else latest_ns[node]

    out = dict(offsets)
    for node in latest_ns.keys() - offsets.keys():
        out[node] = Offset(float(end_ns(node) - end_ns(root)), 0.0, float(latest_ns[node]), np.inf)
    return out


def _against(
    start: int, offsets: dict[int, Offset], root: int, *, latest_ns: dict[int, int]
) -> dict[int, Offset]:
    """The offsets against the clock of `start`, with their errors against the root's, as lateness counts."""
    if start == root:
        return offsets
    offset_of_start = offsets[start]
    at_ns = offset_of_start.at(latest_ns[start])
    back = Offset(-at_ns, -offset_of_start.drift, latest_ns[start] - at_ns, 0.0)
    out = {
        node: replace(_chained(back, offset), error_ns=offset.error_ns) for node, offset in offsets.items()
    }
    return out | {start: replace(SAME_CLOCK, error_ns=offset_of_start.error_ns)}


def _offsets(timeline: Timeline, start: int, *, readings: Readings) -> tuple[int, dict[int, Offset]]:
    """A root node, and the offset of each node that can be tied to it: over communicators that span nodes, or by wall
    clocks.
    """
    met = meetings(timeline)
    root = _root(met, start)
    shown = _tree(met, root, readings=readings)
    wall_error_ns = _wall_error_ns(shown, readings)
    offsets = {root: SAME_CLOCK}
    for node, (reference, by_rounds) in shown.items():
        by_wall = wall_offset(readings.get(reference), readings.get(node), error_ns=wall_error_ns)
        offset = combined(by_rounds, by_wall, wall_error_ns=wall_error_ns)
        if offset is not None and reference in offsets:
            offsets[node] = _chained(offsets[reference], offset)
    for node in np.unique(timeline.node).tolist():
        by_wall = wall_offset(readings.get(root), readings.get(node), error_ns=wall_error_ns)
        if by_wall is not None and node not in offsets:
            offsets[node] = by_wall
    return root, offsets


def _root(met: NodeRounds, start: int) -> int:
    """The node whose host work before releases is the median of all nodes': the first of equals."""
    usable = met.is_last & (met.release_ns != UNKNOWN)
    nodes, index = np.unique(met.node[usable], return_inverse=True)
    if not len(nodes):
        return start
    edges = np.flatnonzero(np.diff(index)) + 1
    host = np.array([np.median(part) for part in np.split(met.host_ns[usable], edges)])
    apart = np.abs(host - np.sort(host)[(len(host) - 1) // 2])
    return int(nodes[np.flatnonzero(apart <= MIN_ERROR_NS)[0]])


def _tree(met: NodeRounds, root: int, *, readings: Readings) -> dict[int, tuple[int, Evidence]]:
    """For each node that shares rounds with the root, directly or through others: a node nearer to the root, and the
    evidence from their common rounds. Nodes come after the nodes that they are tied to.
    """
    nodes_of = _nodes_by_comm(met)
    n_rounds = np.bincount(met.comm, minlength=max(nodes_of, default=-1) + 1)
    # One round or two, as of a communicator of the start, bound the offset loosely.
    left = sorted(
        nodes_of, key=lambda comm: (n_rounds[comm] < FEWEST * len(nodes_of[comm]), -len(nodes_of[comm]))
    )
    shown: dict[int, tuple[int, Evidence]] = {}
    depth = {root: 0}
    while left:
        comm = next((comm for comm in left if depth.keys() & set(nodes_of[comm])), None)
        if comm is None:
            break
        left.remove(comm)
        reference = min((node for node in nodes_of[comm] if node in depth), key=lambda node: depth[node])
        for node in nodes_of[comm]:
            if node in depth:
                continue
            by_wall = wall_offset(readings.get(reference), readings.get(node), error_ns=WALL_ERROR_NS)
            by_rounds = evidence(met, met.of(reference), met.of(node), by_wall=by_wall)
            if by_rounds is not None:
                shown[node], depth[node] = (reference, by_rounds), depth[reference] + 1
    return shown


def _wall_error_ns(shown: dict[int, tuple[int, Evidence]], readings: Readings) -> float:
    """The error of two nodes' wall clocks: from nodes with accurate offsets by releases, otherwise the error of NTP."""
    apart = []
    for node, (reference, by_rounds) in shown.items():
        by_wall = wall_offset(readings.get(reference), readings.get(node), error_ns=0.0)
        if by_wall and by_rounds.releases and by_rounds.early_ns + by_rounds.late_ns < _WALL_MIN_NS:
            apart.append(abs(by_wall.at(by_rounds.releases.since_ns) - by_rounds.releases.at_ns))
    if len(apart) < _FEWEST_NODES:
        return WALL_ERROR_NS
    return max(_WALL_SPREADS * float(np.median(apart)), _WALL_MIN_NS)


def _nodes_by_comm(met: NodeRounds) -> dict[int, list[int]]:
    """The nodes of each communicator that spans several, in order of the communicators."""
    pair, n_pairs = numbered(met.comm, met.node)
    comm, node = np.zeros((2, n_pairs), np.int64)
    comm[pair], node[pair] = met.comm, met.node
    edges = np.flatnonzero(np.diff(comm)) + 1
    groups = zip(comm[np.append(0, edges)].tolist(), np.split(node, edges), strict=True) if n_pairs else ()
    return {number: nodes.tolist() for number, nodes in groups if len(nodes) > 1}


def _chained(first: Offset, second: Offset) -> Offset:
    at = second.at_ns + first.at(second.since_ns - second.at_ns)
    error = (first.error_ns**2 + second.error_ns**2) ** 0.5
    return Offset(at, first.drift + second.drift, second.since_ns, error)


def wall_ns(trace: Trace, node: int, at_ns: float) -> int | None:
    """Wall time of a moment of a node's monotonic clock, by its nearest reading; None without readings."""
    readings = [clock for clock in trace.clocks if clock.node == node]
    if not readings:
        return None
    nearest: Clock = min(readings, key=lambda clock: abs(clock.monotonic_ns - at_ns))
    return int(at_ns) - nearest.monotonic_ns + nearest.wall_ns
