"""How long each GPU worked before a collective and waited in it, by its own clock.

Between the end of one collective and the start of the next a GPU does its own work. Both are times of its own
clock, so no other clock is needed; only time it spent idle until the host enqueued is to be taken off. For that the
host's arrivals are put on the GPU's clock. A kernel cannot start before it was enqueued, nor can a host be released
before what it waited for has ended: bounds from both sides, made anew all along, as GPU clocks drift by milliseconds
in minutes. The second is close to the truth (a release follows the end at once) where the waits are for the
collectives; where they are not, it scatters and is not used. The first is close only where the GPU is not behind.
Which one is close may differ from rank to rank: so it is told, too, what a GPU has worked at least and at most.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array

_ROWS_IN_BLOCK = 32
_PROMPT_NS = 200_000  # releases that follow the ends of collectives scatter by less than this
_FEWEST = 8
_BLOCKS_FOR_DRIFT = 24
_NOT_SEEN = 1e18


@dataclass(frozen=True)
class GpuTime:
    """known: bool (n,), the row's own and the previous one's times are known, and no record was lost between.
    own_ns: float64 (n,), work of the GPU between the collective before and this one; least_ns, most_ns: what it is at
    least and at most by the bounds on its clock. held_ns: float64 (n,), from its start to its end, in which the GPU
    waits for the others' and transfers. All 0 where not known.
    error_ns: float64 (p,), how far the host's arrivals may be off on the GPU's clock.
    """

    known: Array
    own_ns: Array
    least_ns: Array
    most_ns: Array
    held_ns: Array
    error_ns: Array


def gpu_time(line: Timeline) -> GpuTime | None:
    """The GPUs' times; None where no collective has any."""
    start_ns, end_ns = line.rows["gpu_start_ns"], line.rows["gpu_end_ns"]
    told = (start_ns != UNKNOWN) & (end_ns != UNKNOWN)
    if not told.any():
        return None
    known = line.is_whole & told & ~_near_gaps(line)
    known[1:] &= told[:-1]
    enqueued = _enqueued(line, told)
    at, held = np.flatnonzero(known), np.zeros(len(told))
    held[at] = np.maximum(end_ns[at] - start_ns[at], 0)

    def worked(since_ns: Array) -> Array:
        own = np.zeros(len(told))
        own[at] = np.maximum(start_ns[at] - np.maximum(end_ns[at - 1], since_ns[at]), 0)
        return own

    return GpuTime(
        known=known,
        own_ns=worked(enqueued.likely_ns),
        least_ns=worked(enqueued.latest_ns),
        most_ns=worked(enqueued.earliest_ns),
        held_ns=held,
        error_ns=enqueued.error_ns,
    )


def _near_gaps(line: Timeline) -> Array:
    """Rows between which a record of their process may have been lost: bool (n,). A gap is seen in the next row of the
    same communicator only, and what was lost may have come right after any row since the one before it there.
    """
    near = np.zeros(len(line.rows) + 1, np.int64)
    gaps = np.flatnonzero(~line.is_whole & ~line.is_first)
    if len(gaps):
        pair = line.calls.pair
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
    """Arrivals on the clock of the process's GPU, float64 (n,); and how far the likely ones may be off, (p,)."""

    earliest_ns: Array
    likely_ns: Array
    latest_ns: Array
    error_ns: Array


def _enqueued(line: Timeline, told: Array) -> _Enqueued:
    ts_ns, start_ns, end_ns = (line.rows[name] for name in ("ts_ns", "gpu_start_ns", "gpu_end_ns"))
    release, is_last = line.releases
    has_release = told & is_last & (release != UNKNOWN)
    earliest, likely, latest = (ts_ns.copy() for _ in range(3))
    error = np.zeros(line.n_processes)
    for process in range(line.n_processes):
        mine = slice(int(line.first[process]), int(line.first[process + 1]))
        here = np.flatnonzero(told[mine]) + mine.start
        if not len(here):
            continue
        high = (start_ns[here] - ts_ns[here]).astype(np.float64)
        low = np.where(has_release[here], end_ns[here] - release[here], -_NOT_SEEN)
        offset = _offset(ts_ns[here], low, high)
        for out, by in ((earliest, offset.least), (likely, offset.likely), (latest, offset.most)):
            out[here] += np.rint(by).astype(np.int64)
        error[process] = offset.error
    return _Enqueued(earliest, likely, latest, error)


@dataclass(frozen=True)
class _Offset:
    """What to add to each host time to get the GPU's, float64 (k,). error: of the likely one."""

    least: Array
    likely: Array
    most: Array
    error: float


def _offset(ts: Array, low: Array, high: Array) -> _Offset:
    base = float(high.min())
    low, high = low - base, high - base  # small numbers keep their digits
    seen = low > -_NOT_SEEN / 2
    least = np.full(len(ts), -_NOT_SEEN)
    if seen.sum() >= _FEWEST:
        drift = _drift(ts[seen], low[seen], np.maximum)
        flat = np.where(seen, low - drift * (ts - ts[0]), -np.inf)
        tightest = _nearby(flat, np.maximum)
        behind = (tightest - flat)[seen]
        spread = float(np.median(behind[np.isfinite(behind)]))
        least = tightest + drift * (ts - ts[0]) + base
        if spread <= _PROMPT_NS and (tightest <= high - drift * (ts - ts[0]) + _PROMPT_NS).mean() > 0.9:
            return _Offset(least, least, least, spread)
    drift = _drift(ts, high, np.minimum)
    tightest = _nearby(high - drift * (ts - ts[0]), np.minimum)
    most = tightest + drift * (ts - ts[0]) + base
    return _Offset(np.minimum(least, most), most, most, 0.0)


def _drift(ts: Array, bound: Array, tightest: np.ufunc) -> float:
    """The slope of the tightest bounds of some stretches: the median over pairs, which a loose one cannot move."""
    n_blocks = min(_BLOCKS_FOR_DRIFT, len(ts) // _FEWEST)
    if n_blocks < 4:
        return 0.0
    starts = np.linspace(0, len(ts), n_blocks, endpoint=False).astype(np.int64)
    value, when = tightest.reduceat(bound, starts), ts[starts].astype(np.float64)
    i, j = np.triu_indices(n_blocks, k=max(n_blocks // 4, 1))
    return float(np.median((value[j] - value[i]) / np.maximum(when[j] - when[i], 1.0)))


def _nearby(bound: Array, tightest: np.ufunc) -> Array:
    """The tightest bound of each row's block and the two beside it; finite wherever any is."""
    starts = np.arange(0, len(bound), _ROWS_IN_BLOCK)
    each = tightest.reduceat(bound, starts)
    padded = np.concatenate([each[:1], each, each[-1:]])
    around = tightest(tightest(padded[:-2], padded[1:-1]), padded[2:])
    if not np.isfinite(around).all():
        usual = np.flatnonzero(np.isfinite(around))
        around = np.interp(np.arange(len(around)), usual, around[usual])
    smooth: Array = np.repeat(around, _ROWS_IN_BLOCK)[: len(bound)]
    return smooth
