"""How long each GPU worked before a collective and waited in it, by its own clock.

Between the end of one collective and the start of the next a GPU does its own work. Both are times of its own
clock, so no other clock is needed; only time it spent idle until the host enqueued is to be taken off. For that the
host's arrivals are put on the GPU's clock. A kernel cannot start before it was enqueued, nor can a host be released
before what it waited for has ended: bounds from both sides, made anew all along, as GPU clocks drift by milliseconds
in minutes. The second is close to the truth (a release follows the end at once) where the waits are for the
collectives; where they are not, it scatters and is not used. The first is close only where the GPU is not behind.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array

_ROWS_IN_BLOCK = 32
_PROMPT_NS = 200_000  # releases that follow the ends of collectives scatter by less than this
_FEWEST = 8
_BLOCKS_FOR_DRIFT = 24
_NOT_SEEN = 1e18


@dataclass(frozen=True)
class GpuTime:
    """known: bool (n,), the row's own and the previous one's times are known, and no record was lost between.
    own_ns: float64 (n,), work of the GPU between the collective before and this one. held_ns: float64 (n,), from its
    start to its end, in which the GPU waits for the others' and transfers. Both 0 where not known.
    error_ns: float64 (p,), how far the host's arrivals may be off on the GPU's clock.
    """

    known: Array
    own_ns: Array
    held_ns: Array
    error_ns: Array


def gpu_time(line: Timeline) -> GpuTime | None:
    """The GPUs' times; None where no collective has any."""
    start_ns, end_ns = line.rows["gpu_start_ns"], line.rows["gpu_end_ns"]
    told = (start_ns != UNKNOWN) & (end_ns != UNKNOWN)
    if not told.any():
        return None
    known = line.is_whole & told
    known[1:] &= told[:-1]
    enqueued, error_ns = _enqueued_ns(line, told)
    own, held = np.zeros(len(told)), np.zeros(len(told))
    at = np.flatnonzero(known)
    began = np.maximum(end_ns[at - 1], enqueued[at])
    own[at] = np.maximum(start_ns[at] - began, 0)
    held[at] = np.maximum(end_ns[at] - start_ns[at], 0)
    return GpuTime(known, own, held, error_ns)


def _enqueued_ns(line: Timeline, told: Array) -> tuple[Array, Array]:
    """Arrivals on the clock of the process's GPU, int64 (n,); and how far they may be off, float64 (p,)."""
    ts_ns, start_ns, end_ns = (line.rows[name] for name in ("ts_ns", "gpu_start_ns", "gpu_end_ns"))
    release, is_last = line.releases
    has_release = told & is_last & (release != UNKNOWN)
    out, error = ts_ns.copy(), np.zeros(line.n_processes)
    for process in range(line.n_processes):
        mine = slice(int(line.first[process]), int(line.first[process + 1]))
        here = np.flatnonzero(told[mine]) + mine.start
        if not len(here):
            continue
        high = (start_ns[here] - ts_ns[here]).astype(np.float64)
        low = np.where(has_release[here], end_ns[here] - release[here], -_NOT_SEEN)
        offset, error[process] = _offset(ts_ns[here], low, high)
        out[here] += np.rint(offset).astype(np.int64)
    return out, error


def _offset(ts: Array, low: Array, high: Array) -> tuple[Array, float]:
    """What to add to each host time to get the GPU's, float64 (k,), and its error."""
    base = float(high.min())
    low, high = low - base, high - base  # small numbers keep their digits
    seen = low > -_NOT_SEEN / 2
    if seen.sum() >= _FEWEST:
        drift = _drift(ts[seen], low[seen], np.maximum)
        flat = np.where(seen, low - drift * (ts - ts[0]), -np.inf)
        tightest = _nearby(flat, np.maximum)
        behind = (tightest - flat)[seen]
        spread = float(np.median(behind[np.isfinite(behind)]))
        if spread <= _PROMPT_NS and (tightest <= high - drift * (ts - ts[0]) + _PROMPT_NS).mean() > 0.9:
            return tightest + drift * (ts - ts[0]) + base, spread
    drift = _drift(ts, high, np.minimum)
    tightest = _nearby(high - drift * (ts - ts[0]), np.minimum)
    return tightest + drift * (ts - ts[0]) + base, 0.0


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
