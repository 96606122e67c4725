"""The offset between two nodes' clocks: each kind of evidence as an interval, and the intersection of the intervals.

Causality gives hard bounds: no rank leaves a synchronising collective before the last rank has entered it.
Releases from one collective are nearly simultaneous, unless host work delays one of them. Such work is in the time
ledger, so the interval of the releases is as wide as the difference of the two nodes' host work. Wall clocks bound
the offset as accurately as the machines keep them. If releases and wall clocks contradict each other, hard bounds
take precedence, and the error covers both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.timeline.node_rounds import NodeRounds
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Clock

FEWEST = 5  # shared releases of two nodes from which on their times count as evidence
MIN_ERROR_NS = 50_000.0  # releases of one collective differ by this much between GPUs, steadily
WALL_ERROR_NS = 5_000_000.0  # machines synchronised by NTP differ by less
_DRIFT_SPAN_NS = 1_000_000_000  # shorter periods cannot show a drift
_MAX_DRIFT = 2e-4  # two wall-clock readings that differ by more were taken around a step of the clock
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

    def at(self, t_ns: float) -> float:
        """The offset at one time of the other clock."""
        return float(self.ns(np.array([t_ns]))[0])


SAME_CLOCK = Offset(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Evidence:
    """The evidence of two nodes' rounds for the offset of their clocks.

    releases: by near-simultaneous releases; early_ns, late_ns: how much less or more the offset can be, as one node
    does more host work before its releases. bounds: by causality alone. low_ns, high_ns: the tightest bounds,
    relative to the line of `releases` (or of the wall clocks, where there is none); infinite without any. is_exact:
    the releases are the ends of the collectives on the GPUs.
    """

    releases: Offset | None
    early_ns: float
    late_ns: float
    bounds: Offset | None
    low_ns: float
    high_ns: float
    is_exact: bool = False


def evidence(met: NodeRounds, reference: slice, other: slice, *, by_wall: Offset | None) -> Evidence | None:
    """The evidence from all common rounds of two nodes; None without common rounds."""
    a, b = _common(met, reference, other)
    if not len(a):
        return None
    known_a, known_b = met.release_ns[a] != UNKNOWN, met.release_ns[b] != UNKNOWN
    shared = known_a & known_b & met.is_last[a] & met.is_last[b] & met.waits[a] & met.waits[b]
    releases, early_ns, late_ns = None, 0.0, 0.0
    if shared.sum() >= FEWEST:
        difference = (met.release_ns[b] - met.release_ns[a])[shared].astype(np.float64)
        releases = _by_releases(met.release_ns[b][shared], difference)
        more_ns = float(np.median((met.host_ns[b] - met.host_ns[a])[shared]))
        early_ns, late_ns = max(more_ns, 0.0), max(-more_ns, 0.0)
    lower, upper = known_a & met.waits[a] & met.holds[b], known_b & met.waits[b] & met.holds[a]
    low = np.where(lower, met.arrival_ns[b] - met.release_ns[a], -np.inf)
    high = np.where(upper, met.release_ns[b] - met.arrival_ns[a], np.inf)
    line = releases or by_wall
    at = line.ns(met.arrival_ns[b]) if line else 0.0
    return Evidence(
        releases=releases,
        early_ns=early_ns,
        late_ns=late_ns,
        bounds=_by_bounds(met.arrival_ns[b], low, high) if releases is None else None,
        low_ns=float((low - at).max()) if line else -np.inf,
        high_ns=float((high - at).min()) if line else np.inf,
        is_exact=met.has_ends and releases is not None,
    )


def combined(shown: Evidence, by_wall: Offset | None, *, wall_error_ns: float) -> Offset | None:
    """The offset that the evidence allows, with an error that covers the remaining range.

    by_wall: by the nodes' wall clocks, which differ by up to wall_error_ns.
    """
    line = shown.releases or by_wall
    if shown.is_exact:
        return shown.releases
    if line is None or shown.low_ns > shown.high_ns + 2 * MIN_ERROR_NS:
        return shown.releases or shown.bounds  # the line drifts away from the bounds: they cannot be compared
    hard = shown.low_ns, shown.high_ns
    kinds = []
    if shown.releases:
        error = shown.releases.error_ns
        kinds.append((-shown.early_ns - error, shown.late_ns + error))
    if by_wall:
        apart = by_wall.at(line.since_ns) - line.at_ns
        kinds.append((apart - wall_error_ns, apart + wall_error_ns))
    possible = [kind for kind in kinds if _overlap(kind, hard)]
    if not possible:
        return shown.releases or shown.bounds
    low, high = np.array(possible).T
    if low.max() <= high.min():
        low, high = low.max(), high.min()
    else:
        low, high = low.min(), high.max()
    low, high = max(low, hard[0]), min(high, hard[1])
    return replace(line, at_ns=line.at_ns + (low + high) / 2, error_ns=max(abs(high - low) / 2, MIN_ERROR_NS))


def _overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] + MIN_ERROR_NS and second[0] <= first[1] + MIN_ERROR_NS


def _common(met: NodeRounds, reference: slice, other: slice) -> tuple[Array, Array]:
    """The rows of two nodes in the rounds of both."""
    a, b = np.arange(reference.start, reference.stop), np.arange(other.start, other.stop)
    if not np.array_equal(met.round[reference], met.round[other]):
        _, of_a, of_b = np.intersect1d(
            met.round[reference], met.round[other], assume_unique=True, return_indices=True
        )
        a, b = a[of_a], b[of_b]
    return a, b


def _by_releases(t_ns: Array, difference_ns: Array) -> Offset:
    """A line through the differences of near-simultaneous releases, by medians, which a few outliers cannot move."""
    since = float(t_ns[0])
    drift = 0.0
    half = len(t_ns) // 2
    is_long = half >= 10 and t_ns[-1] - t_ns[0] >= _DRIFT_SPAN_NS
    run = float(np.median(t_ns[half:]) - np.median(t_ns[:half])) if is_long else 0.0
    if run >= _DRIFT_SPAN_NS / 8:  # less if most releases are close together, and one is far away
        drift = float(np.median(difference_ns[half:]) - np.median(difference_ns[:half])) / run
        spread = 1.4826 * float(np.median(np.abs(difference_ns - np.median(difference_ns))))
        if abs(drift) * run < spread / half**0.5:
            drift = 0.0  # no more than chance
    flat = difference_ns - drift * (t_ns - since)
    at = float(np.median(flat))
    error = 1.4826 * float(np.median(np.abs(flat - at)))
    return Offset(at, drift, since, max(error, MIN_ERROR_NS))


def _by_bounds(t_ns: Array, low_ns: Array, high_ns: Array) -> Offset | None:
    """The middle between the tightest bounds; in windows, as a drifting clock would make bounds cross.

    low_ns, high_ns: float64 (n,), infinite where a round bounds the difference from the other side only.
    """
    if not np.isfinite(low_ns).any() or not np.isfinite(high_ns).any():
        return None
    order = np.argsort(t_ns, kind="stable")
    t_ns, low_ns, high_ns = t_ns[order], low_ns[order], high_ns[order]
    windows = np.array_split(np.arange(len(t_ns)), min(_N_WINDOWS, max(len(t_ns) // (2 * FEWEST), 1)))
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
            drift = 0.0  # within the width of the bounds
    flat = drift * (times - since)
    low, high = float((lows - flat).max()), float((highs - flat).min())
    return Offset((low + high) / 2, drift, since, max(abs(high - low) / 2, MIN_ERROR_NS))


def by_wall_clocks(clocks: Sequence[Clock]) -> dict[int, tuple[Clock, Clock]]:
    """The first and the last reading of each node's monotonic against its wall clock."""
    out: dict[int, tuple[Clock, Clock]] = {}
    for clock in sorted(clocks, key=lambda clock: clock.monotonic_ns):
        out[clock.node] = out.get(clock.node, (clock, clock))[0], clock
    return out


def wall_offset(
    first: tuple[Clock, Clock] | None, other: tuple[Clock, Clock] | None, *, error_ns: float
) -> Offset | None:
    """The offset of a node's monotonic clock by the readings of two nodes' wall clocks; None without readings."""
    if first is None or other is None:
        return None
    begin, end = (
        float((o.monotonic_ns - o.wall_ns) - (f.monotonic_ns - f.wall_ns))
        for f, o in zip(first, other, strict=True)
    )
    run = other[1].monotonic_ns - other[0].monotonic_ns
    drift = (end - begin) / run if run >= _DRIFT_SPAN_NS else 0.0
    if abs(drift) > _MAX_DRIFT:
        return Offset(end, 0.0, float(other[1].monotonic_ns), error_ns + abs(end - begin))
    return Offset(begin, drift, float(other[0].monotonic_ns), error_ns)
