"""All arrivals on one clock, found from the job itself, with an error bar; and clock readings as wall time.

Each node's CLOCK_MONOTONIC starts somewhere else and drifts. No rank can be released from a synchronising
collective before the last rank has entered it: every round bounds the difference of two nodes' clocks from both
sides. Where ranks of two nodes wait for the same round, they are released nearly at once, which tells the
difference much closer, also when one of them is always late (which bounds alone cannot tell from an offset).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.timeline.node_rounds import Meetings, meetings
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Clock, Trace

_FEWEST = 5  # releases that two nodes must share before their times are believed
_LEAST_ERROR_NS = 50_000.0  # releases of one collective differ by so much between GPUs, steadily
_DRIFT = 2e-5  # two clocks that nothing disciplines part by up to so much
_DRIFT_SPAN_NS = 1_000_000_000  # shorter stretches cannot tell a drift
_N_WINDOWS = 8


@dataclass(frozen=True)
class Offset:
    """One clock against another: other = reference + at_ns + drift x (t - since_ns), within error_ns."""

    at_ns: float
    drift: float
    since_ns: float
    error_ns: float

    def ns(self, t_ns: Array) -> Array:
        """The offset at times of the other clock: float64."""
        return self.at_ns + self.drift * (t_ns - self.since_ns)


_NONE = Offset(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Clocks:
    """arrival_ns: int64 (n,), the timeline's arrivals on the clock of the first node. offsets: by node number, of
    the nodes whose clock could be tied to the first one's. error_ns: float64 by node number, inf for the others.
    """

    arrival_ns: Array
    offsets: dict[int, Offset]
    error_ns: Array

    def common_ns(self, node: int, t_ns: int) -> int:
        """A time of a node's clock on the common clock; unchanged where the node could not be tied."""
        offset = self.offsets.get(node)
        return t_ns if offset is None else t_ns - round(float(offset.ns(np.array([t_ns]))[0]))


def aligned(line: Timeline, probed: Sequence[Clock] = ()) -> Clocks:
    """All arrivals on one clock.

    probed: readings of the nodes' clocks against one wall clock (events.Trace.probed): they tie the nodes that the
    job does not tie, and those it ties less closely than the probes.
    """
    arrival = line.ts_ns
    if not line.n_processes:
        return Clocks(arrival, {}, np.zeros(0))
    start = int(line.node.min())
    offsets = {start: _NONE}
    if len(np.unique(line.node)) > 1:
        offsets = _closest(_offsets(line, start), probed, start, latest_ns=_latest_ns(line))
    error = np.full(int(line.node.max()) + 1, np.inf)
    common = arrival.copy() if len(offsets) > 1 else arrival
    for node, offset in offsets.items():
        error[node] = offset.error_ns
        if offset is not _NONE:
            rows = _rows_of(line, node)
            common[rows] = arrival[rows] - np.rint(offset.ns(arrival[rows])).astype(np.int64)
    return Clocks(common, offsets, error)


def _rows_of(line: Timeline, node: int) -> slice:
    """The rows of a node's processes, which are numbered in its order."""
    begin, end = np.searchsorted(line.node, [node, node + 1])
    return slice(int(line.first[begin]), int(line.first[end]))


def _latest_ns(line: Timeline) -> dict[int, int]:
    """The last arrival of each node, on its own clock."""
    return {
        int(node): int(line.ts_ns[_rows_of(line, int(node))].max(initial=0)) for node in np.unique(line.node)
    }


def _closest(
    offsets: dict[int, Offset], probed: Sequence[Clock], start: int, *, latest_ns: dict[int, int]
) -> dict[int, Offset]:
    """The offsets from the job, and those from probes where these are closer."""
    read = {clock.node: clock for clock in probed}
    if start not in read:
        return offsets
    first, out = read[start], dict(offsets)
    for node in latest_ns.keys() & read.keys() - {start}:
        other = read[node]
        at = (other.monotonic_ns - other.wall_ns) - (first.monotonic_ns - first.wall_ns)
        ago_ns = max(other.monotonic_ns - latest_ns[node], 0)
        error = first.error_ns + other.error_ns + _DRIFT * ago_ns + _LEAST_ERROR_NS
        if node not in out or error < out[node].error_ns:
            out[node] = Offset(float(at), 0.0, float(other.monotonic_ns), float(error))
    return out


def _offsets(line: Timeline, start: int) -> dict[int, Offset]:
    """The offset of each node that can be tied to the first one, over communicators that span nodes."""
    met = meetings(line)
    found = {start: _NONE}
    nodes_of = _nodes_by_comm(met)
    n_rounds = np.bincount(met.comm, minlength=max(nodes_of, default=-1) + 1)
    # One round or two, as of a communicator of the start, tie loosely whatever they tie.
    left = sorted(
        nodes_of, key=lambda comm: (n_rounds[comm] < _FEWEST * len(nodes_of[comm]), -len(nodes_of[comm]))
    )
    n_nodes = len(np.unique(line.node))
    while left and len(found) < n_nodes:
        comm = next((comm for comm in left if found.keys() & set(nodes_of[comm])), None)
        if comm is None:
            break
        left.remove(comm)
        known = [node for node in nodes_of[comm] if node in found]
        reference = min(known, key=lambda node: found[node].error_ns)
        for node in nodes_of[comm]:
            offset = None if node in found else _between(met, met.of(reference), met.of(node))
            if offset is not None:
                found[node] = _chained(found[reference], offset)
    return found


def _nodes_by_comm(met: Meetings) -> dict[int, list[int]]:
    """The nodes of each communicator that spans several, in order of the communicators."""
    pair, n_pairs = numbered(met.comm, met.node)
    comm, node = np.zeros((2, n_pairs), np.int64)
    comm[pair], node[pair] = met.comm, met.node
    edges = np.flatnonzero(np.diff(comm)) + 1
    found = zip(comm[np.append(0, edges)].tolist(), np.split(node, edges), strict=True) if n_pairs else ()
    return {number: nodes.tolist() for number, nodes in found if len(nodes) > 1}


def _chained(first: Offset, second: Offset) -> Offset:
    at = second.at_ns + float(first.ns(np.array([second.since_ns - second.at_ns]))[0])
    error = (first.error_ns**2 + second.error_ns**2) ** 0.5
    return Offset(at, first.drift + second.drift, second.since_ns, error)


def _between(met: Meetings, mine: slice, theirs: slice) -> Offset | None:
    """The offset of one node's clock against another's, from all rounds that both took part in."""
    a, b = np.arange(mine.start, mine.stop), np.arange(theirs.start, theirs.stop)
    if not np.array_equal(met.round[mine], met.round[theirs]):
        _, own, other = np.intersect1d(
            met.round[mine], met.round[theirs], assume_unique=True, return_indices=True
        )
        a, b = a[own], b[other]
    known_a, known_b = met.release_ns[a] != UNKNOWN, met.release_ns[b] != UNKNOWN
    shared = known_a & known_b & met.is_last[a] & met.is_last[b] & met.waits[a] & met.waits[b]
    if shared.sum() >= _FEWEST:
        difference = (met.release_ns[b] - met.release_ns[a])[shared].astype(np.float64)
        return _by_releases(met.release_ns[b][shared], difference)
    lower, upper = known_a & met.waits[a] & met.holds[b], known_b & met.waits[b] & met.holds[a]
    if not lower.any() or not upper.any():
        return None
    low = np.where(lower, met.arrival_ns[b] - met.release_ns[a], -np.inf)
    high = np.where(upper, met.release_ns[b] - met.arrival_ns[a], np.inf)
    order = np.argsort(met.arrival_ns[b], kind="stable")
    return _by_bounds(met.arrival_ns[b][order], low[order], high[order])


def _by_releases(t_ns: Array, difference_ns: Array) -> Offset:
    """A line through the differences of near-simultaneous releases, by medians, which a few odd ones cannot move."""
    since = float(t_ns[0])
    drift = 0.0
    half = len(t_ns) // 2
    if half >= 10 and t_ns[-1] - t_ns[0] >= _DRIFT_SPAN_NS:
        run = float(np.median(t_ns[half:]) - np.median(t_ns[:half]))
        drift = float(np.median(difference_ns[half:]) - np.median(difference_ns[:half])) / run
        spread = 1.4826 * float(np.median(np.abs(difference_ns - np.median(difference_ns))))
        if abs(drift) * run < spread / half**0.5:
            drift = 0.0  # no more than chance
    flat = difference_ns - drift * (t_ns - since)
    at = float(np.median(flat))
    error = 1.4826 * float(np.median(np.abs(flat - at)))
    return Offset(at, drift, since, max(error, _LEAST_ERROR_NS))


def _by_bounds(t_ns: Array, low_ns: Array, high_ns: Array) -> Offset | None:
    """The middle between the tightest bounds; in windows, as a drifting clock would make bounds cross.

    low_ns, high_ns: float64 (n,), infinite where a round bounds the difference from the other side only.
    """
    windows = np.array_split(np.arange(len(t_ns)), min(_N_WINDOWS, max(len(t_ns) // (2 * _FEWEST), 1)))
    lows = np.array([low_ns[w].max() for w in windows])
    highs = np.array([high_ns[w].min() for w in windows])
    times = np.array([t_ns[w].mean() for w in windows])
    full = np.isfinite(lows) & np.isfinite(highs)
    if not full.any():
        return None
    lows, highs, times = lows[full], highs[full], times[full]
    middle, half = (lows + highs) / 2, np.abs(highs - lows) / 2
    since, drift = float(t_ns[0]), 0.0
    if len(times) >= 4 and times[-1] - times[0] >= _DRIFT_SPAN_NS:
        drift = float(np.polyfit(times - since, middle, 1)[0])
        if abs(drift) * (times[-1] - times[0]) < float(np.median(half)):
            drift = 0.0  # no more than the bounds leave open
    flat = drift * (times - since)
    low, high = float((lows - flat).max()), float((highs - flat).min())
    return Offset((low + high) / 2, drift, since, max(abs(high - low) / 2, _LEAST_ERROR_NS))


def wall_ns(trace: Trace, node: int, at_ns: float) -> int | None:
    """Wall time of a moment of a node's monotonic clock, by its nearest reading; None without readings."""
    readings = [clock for clock in trace.clocks if clock.node == node]
    if not readings:
        return None
    nearest: Clock = min(readings, key=lambda clock: abs(clock.monotonic_ns - at_ns))
    return int(at_ns) - nearest.monotonic_ns + nearest.wall_ns
