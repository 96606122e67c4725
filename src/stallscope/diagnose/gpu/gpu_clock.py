"""The work of each GPU before a collective and its wait in the collective, by the GPU's clock.

Between the end of a collective and the start of the next, a GPU does its own work. Both times are on its own clock, so
no other clock is needed, except to subtract the idle time before the host enqueued the collective. For that, the
host's arrivals are converted to the GPU's clock. A kernel cannot start before it was enqueued. A host cannot be
released before the work that it waits for has ended. These two bounds are updated continuously, as GPU clocks drift by
milliseconds in minutes. The second bound is tight (a release immediately follows the end) if the waits are for the
collectives; otherwise it scatters and is not used. The first bound is tight only if the GPU is not behind. The tighter
bound may differ from rank to rank, so the minimum and the maximum work of each GPU are provided as well.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Op

_ROWS_IN_BLOCK = 32
_PROMPT_NS = 200_000  # releases that follow the ends of collectives scatter by less than this
_LOOSE_NS = 1_000_000  # a bound that is lower than another bound by more is loose
_FEWEST = 8
_BLOCKS_FOR_DRIFT = 24
_MAX_DRIFT = 1e-3  # more is an effect of odd times, not of a clock
_NO_BOUND_NS = 1e18  # beyond any difference of two offsets of one pair of clocks


@dataclass(frozen=True)
class GpuTime:
    """known: bool (n,), the times of the row and of the previous row are known, and no record was lost in between.
    own_ns: float64 (n,), work of the GPU between the previous collective and this collective; min_ns, max_ns: its
    bounds by the bounds on the GPU's clock. They lack the work before the collective was enqueued, unless the GPU is
    behind its host (is_behind: bool (n,)). paced_ns: float64 (n,), the same with that work, at most the time of the
    host since the previous call. held_ns: float64 (n,), from its start to its end, in which the GPU waits for other
    GPUs and transfers. All 0 where not known.
    error_ns: float64 (p,), the error of the host's arrivals on the GPU's clock.
    """

    known: Array
    own_ns: Array
    min_ns: Array
    max_ns: Array
    paced_ns: Array
    is_behind: Array
    held_ns: Array
    error_ns: Array


def gpu_time(timeline: Timeline) -> GpuTime | None:
    """The GPUs' times; None if no collective has GPU times."""
    start_ns, end_ns = timeline.rows["gpu_start_ns"], timeline.rows["gpu_end_ns"]
    has_times = (start_ns != UNKNOWN) & (end_ns != UNKNOWN)
    if not has_times.any():
        return None
    known = timeline.is_whole & has_times & ~_near_gaps(timeline)
    known[1:] &= has_times[:-1]
    enqueued = _enqueued(timeline, has_times)
    at, held = np.flatnonzero(known), np.zeros(len(has_times))
    held[at] = np.maximum(end_ns[at] - start_ns[at], 0)

    free_ns = np.maximum(end_ns[at - 1], _end_before_on_stream(timeline, end_ns)[at])

    def worked(since_ns: Array) -> Array:
        own = np.zeros(len(has_times))
        own[at] = np.maximum(start_ns[at] - np.maximum(free_ns, since_ns[at]), 0)
        return own

    is_behind = np.zeros(len(has_times), bool)
    is_behind[at] = free_ns > enqueued.latest_ns[at]
    return GpuTime(
        known=known,
        own_ns=worked(enqueued.likely_ns),
        min_ns=worked(enqueued.latest_ns),
        max_ns=worked(enqueued.earliest_ns),
        paced_ns=worked(np.append(enqueued.earliest_ns[:1], enqueued.earliest_ns[:-1])),
        is_behind=is_behind,
        held_ns=held,
        error_ns=enqueued.error_ns,
    )


def _end_before_on_stream(timeline: Timeline, end_ns: Array) -> Array:
    """The end of the process's previous collective on the same stream: int64 (n,), UNKNOWN where there is none.

    Until that end, a collective waits for other GPUs rather than for work of its own GPU. Sends have a queue of their
    own, so that they do not wait for receives.
    """
    rows, out = timeline.rows, np.full(len(end_ns), UNKNOWN)
    queue, _ = numbered(timeline.process, rows["stream"], rows["op"] == Op.SEND)
    order = np.argsort(queue, kind="stable")
    same = np.diff(queue[order]) == 0
    out[order[1:][same]] = end_ns[order[:-1][same]]
    return out


def _near_gaps(timeline: Timeline) -> Array:
    """Rows before which a record of their process may have been lost: bool (n,).

    A gap shows only in the next row of the same communicator. The lost record may follow any row since the previous row
    of that communicator.
    """
    near = np.zeros(len(timeline.rows) + 1, np.int64)
    gaps = np.flatnonzero(~timeline.is_whole & ~timeline.is_first)
    if len(gaps):
        pair = timeline.calls.pair
        order = np.argsort(pair, kind="stable")
        before = np.full(len(pair), UNKNOWN)
        same = np.diff(pair[order]) == 0
        before[order[1:][same]] = order[:-1][same]
        begin = np.where(before[gaps] != UNKNOWN, before[gaps] + 1, gaps)
        np.add.at(near, begin, 1)
        np.add.at(near, gaps + 1, -1)
    is_near: Array = np.cumsum(near)[:-1] > 0
    return is_near


@dataclass(frozen=True)
class _Enqueued:
    """Arrivals on the clock of the process's GPU, float64 (n,); and the error of likely_ns, (p,)."""

    earliest_ns: Array
    likely_ns: Array
    latest_ns: Array
    error_ns: Array


def _enqueued(timeline: Timeline, has_times: Array) -> _Enqueued:
    ts_ns, start_ns, end_ns = (timeline.rows[name] for name in ("ts_ns", "gpu_start_ns", "gpu_end_ns"))
    release, is_last = timeline.releases
    has_release = has_times & is_last & (release != UNKNOWN)
    earliest, likely, latest = (ts_ns.copy() for _ in range(3))
    error = np.zeros(timeline.n_processes)
    for process in range(timeline.n_processes):
        of_process = slice(int(timeline.first[process]), int(timeline.first[process + 1]))
        rows = np.flatnonzero(has_times[of_process]) + of_process.start
        if not len(rows):
            continue
        high = start_ns[rows] - ts_ns[rows]
        base = int(high.min())  # the clocks may be decades apart, and small floats keep their digits
        low = np.where(has_release[rows], end_ns[rows] - release[rows] - base, -_NO_BOUND_NS)
        offset = _offset(ts_ns[rows], low, (high - base).astype(np.float64))
        for out, by in ((earliest, offset.least), (likely, offset.likely), (latest, offset.most)):
            out[rows] += base + np.rint(by).astype(np.int64)
        error[process] = offset.error
    return _Enqueued(earliest, likely, latest, error)


@dataclass(frozen=True)
class _Offset:
    """The offset from each host time to the GPU's time, beyond a base: float64 (k,). error: of `likely`."""

    least: Array
    likely: Array
    most: Array
    error: float


def _offset(ts: Array, low: Array, high: Array) -> _Offset:
    """low, high: float64 (k,), bounds of the offset, beyond the same base."""
    has_low = low > -_NO_BOUND_NS / 2
    least = np.full(len(ts), -_NO_BOUND_NS)
    if has_low.sum() >= _FEWEST:
        drift = _drift(ts[has_low], low[has_low], np.maximum)
        flat = np.where(has_low, low - drift * (ts - ts[0]), -np.inf)
        near = _nearby(flat, np.maximum)
        behind = (near - flat)[has_low]
        spread = float(np.median(behind[np.isfinite(behind)]))
        tightest = _with_far(ts, near)
        least = tightest + drift * (ts - ts[0])
        if spread <= _PROMPT_NS and (tightest <= high - drift * (ts - ts[0]) + _PROMPT_NS).mean() > 0.9:
            return _Offset(least, least, least, spread)
    drift = _drift(ts, high, np.minimum)
    tightest = _nearby(high - drift * (ts - ts[0]), np.minimum)
    most = tightest + drift * (ts - ts[0])
    return _Offset(np.minimum(least, most), most, most, 0.0)


def _drift(ts: Array, bound: Array, tightest: np.ufunc) -> float:
    """The slope of the tightest bounds of some blocks: the median over pairs, which a loose bound cannot move."""
    n_blocks = min(_BLOCKS_FOR_DRIFT, len(ts) // _FEWEST)
    if n_blocks < 4:
        return 0.0
    starts = np.linspace(0, len(ts), n_blocks, endpoint=False).astype(np.int64)
    value, times = tightest.reduceat(bound, starts), ts[starts].astype(np.float64)
    i, j = np.triu_indices(n_blocks, k=max(n_blocks // 4, 1))
    drift = float(np.median((value[j] - value[i]) / np.maximum(times[j] - times[i], 1.0)))
    return drift if abs(drift) <= _MAX_DRIFT else 0.0


def _nearby(bound: Array, tightest: np.ufunc) -> Array:
    """The tightest bound of each row's block and its two neighbours, interpolated where it is not finite."""
    starts = np.arange(0, len(bound), _ROWS_IN_BLOCK)
    each = tightest.reduceat(bound, starts)
    padded = np.concatenate([each[:1], each, each[-1:]])
    around = tightest(tightest(padded[:-2], padded[1:-1]), padded[2:])
    if not np.isfinite(around).all():
        known = np.flatnonzero(np.isfinite(around))
        around = np.interp(np.arange(len(around)), known, around[known])
    smooth: Array = np.repeat(around, _ROWS_IN_BLOCK)[: len(bound)]
    return smooth


def _with_far(ts: Array, least: Array) -> Array:
    """The lower bound of each row, or a bound of any other row minus the drift in between, if that is far higher.

    While a host calls after the end of the collectives, none of its releases follows an end at once.
    """
    drift_ns = _MAX_DRIFT * (ts - ts[0])
    of_earlier = np.maximum.accumulate(least + drift_ns) - drift_ns
    of_later = np.maximum.accumulate((least - drift_ns)[::-1])[::-1] + drift_ns
    far = np.maximum(of_earlier, of_later)
    return np.asarray(np.where(far > least + _LOOSE_NS, far, least))
