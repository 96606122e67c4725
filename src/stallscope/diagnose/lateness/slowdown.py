"""The whole job becomes slower at some moment: no rank arrives late, so no rank differs from the others.

A lasting change of the step time, found by a robust change-point test: the median over the ranks of each step, cut
where the two parts lie closest to their medians. The change counts if it exceeds the differences between blocks of
steps within each part, and if no block before it was as slow. Evaluations, checkpoints and recurring phases do not
count. The time ledger shows which part of the step grew. Accuracy of the moment: a few steps if noise is small.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians
from stallscope.diagnose.arrays.subsample import spread_out
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import CATEGORY_NAMES, N_CATEGORIES

_MAX_PROCESSES = 64  # ranks whose ledgers are examined: all ranks changed
_STEPS_AHEAD = 64  # steps per sum if hosts run ahead: single steps show only the hosts
_BLOCK_STEPS, _FEWEST_BLOCKS, _MAX_BLOCKS = 5, 4, 40
_MAX_ODD_SHARE = 0.05  # share of the blocks before that may be as slow as the later blocks, and vice versa
_SPREADS = 4.0  # robust deviations of blocks that a change must exceed
_COARSE_CUTS = 128  # cuts tried in a first pass; the second pass tries all cuts near the best
_FEWEST_BEFORE = 6  # steps before an early change, of which each must be faster than each later step
_OUTLIERS = 0.05  # share of the steps at either end that does not count in a mean
_GREW_SHARE = 0.1  # of the growth, from which a part of the step is listed


@dataclass(frozen=True)
class Slowdown:
    """Steps take after_ns instead of before_ns (medians).

    growth_ns: of the mean step, without outliers; steps of several kinds grow by several amounts.
    host_share: share of the growth that is host time of the ranks themselves. at_ns: the moment on the clock of the
    first process; step: its number. n_steps: steps since. grew_ns: by ledger category, the parts of a step that grew.
    """

    before_ns: float
    after_ns: float
    growth_ns: float
    host_share: float
    at_ns: int
    step: int
    n_steps: int
    grew_ns: Mapping[str, float] = field(default_factory=dict)


def slowdown(timeline: Timeline, table: Cells, limits: Thresholds) -> Slowdown | None:
    """The lasting change of the step time, if there is one; the median over the ranks is examined."""
    steps = np.unique(table.step)
    if len(steps) < 2 * limits.slowdown_steps:
        return None
    duration = _per_step(table, timeline.interval_ns, steps)
    runs_ahead = not _per_step(table, timeline.wait_ns, steps)[: limits.run_ahead_steps].any()
    together = _STEPS_AHEAD if runs_ahead else 1
    n = len(steps) // together
    least = limits.slowdown_steps if together == 1 else _FEWEST_BLOCKS
    if n < 2 * least:
        return None
    summed = duration[: n * together].reshape(n, together).sum(axis=1)
    if together > 1:
        summed[:1] = np.median(summed)  # the launch queue fills
    cut = _change(summed, least)
    if not _is_lasting(summed, cut, limits):
        if together > 1:
            return None
        cut = _change(summed, _FEWEST_BEFORE)
        if cut >= least or not _is_lasting(summed, cut, limits):
            return None
        if summed[:cut].max() >= summed[cut:].min():
            return None
    best = cut * together
    before, after = (float(np.median(part)) / together for part in (summed[:cut], summed[cut:]))
    if after - before < limits.min_late_ns and after < limits.slowdown_factor * before:
        return None
    growth = (_trimmed_mean(summed[cut:]) - _trimmed_mean(summed[:cut])) / together
    host = _per_step(table, timeline.host_ns, steps)
    grown = float(np.median(host[best:]) - np.median(host[:best]))
    first = table.first_row[table.step == steps[best]][0]
    return Slowdown(
        before_ns=before,
        after_ns=after,
        growth_ns=growth,
        host_share=min(max(grown / (after - before), 0.0), 1.0),
        at_ns=int(timeline.ts_ns[first]),
        step=int(steps[best]),
        n_steps=len(steps) - best,
        grew_ns=_grown_ns(timeline, table, steps, best, min_ns=_GREW_SHARE * (after - before)),
    )


def _trimmed_mean(values: Array) -> float:
    """The mean without the lowest and the highest values: checkpoints, evaluations."""
    low, high = np.quantile(values, (_OUTLIERS, 1 - _OUTLIERS))
    return float(values[(values >= low) & (values <= high)].mean())


def _is_lasting(values: Array, cut: int, limits: Thresholds) -> bool:
    """Whether the values after the cut are larger by more than the variation of blocks, and for the first time."""
    parts = values[:cut], values[cut:]
    size = max(min(_BLOCK_STEPS, min(map(len, parts)) // _FEWEST_BLOCKS), len(values) // _MAX_BLOCKS, 1)
    before, after = (_block_medians(part, size) for part in parts)
    low, high = float(np.median(before)), float(np.median(after))
    if min(len(before), len(after)) < 2 or high < (1 + limits.change_share) * low:
        return False
    middle = (low + high) / 2
    odd = (before >= middle).mean(), (after <= middle).mean()
    deviations = np.concatenate([before - low, after - high])
    spread = 1.4826 * float(np.median(np.abs(deviations)))
    return max(odd) <= _MAX_ODD_SHARE and high - low >= _SPREADS * spread


def _block_medians(values: Array, size: int) -> Array:
    """Medians of blocks of successive values; the last block may be larger."""
    n = max(len(values) // size, 1)
    return np.array([np.median(part) for part in np.array_split(values, n)])


def _grown_ns(timeline: Timeline, table: Cells, steps: Array, cut: int, *, min_ns: float) -> dict[str, float]:
    """By ledger category, the growth of the median rank's time per step after the cut; the largest first."""
    examined = np.unique(table.process)
    examined = examined[spread_out(len(examined), _MAX_PROCESSES)]
    here = np.flatnonzero(np.isin(table.process, examined) & (table.first_row > 0))
    first, last = table.first_row[here], table.end_row[here] - 1
    here_step = np.searchsorted(steps, table.step[here])
    grown = {}
    for k in range(N_CATEGORIES):
        spent = timeline.rows.column("ledger_ns", last, k).astype(np.float64)
        spent -= timeline.rows.column("ledger_ns", first - 1, k)
        each = by_group(here_step, spent, len(steps), medians)
        before, after = (np.nanmedian(part) if len(part) else np.nan for part in (each[:cut], each[cut:]))
        if after - before >= min_ns:
            grown[CATEGORY_NAMES[k]] = float(after - before)
    return dict(sorted(grown.items(), key=lambda item: -item[1]))


def _per_step(table: Cells, value: Array, steps: Array) -> Array:
    """Median over the processes of a value's sum in each step: float64 (steps,)."""
    return by_group(np.searchsorted(steps, table.step), table.sums(value), len(steps), medians)


def _change(values: Array, n_least: int) -> int:
    """The cut of a sequence at which the values lie closest to the medians of the two parts."""
    ranked = np.log(np.maximum(values, 1.0))
    cuts = np.arange(n_least, len(values) - n_least + 1)

    def apart(cut: int) -> float:
        return sum(float(np.abs(part - np.median(part)).sum()) for part in (ranked[:cut], ranked[cut:]))

    stride = max(len(cuts) // _COARSE_CUTS, 1)
    best = min(cuts[::stride].tolist(), key=apart)
    return min(cuts[np.abs(cuts - best) <= stride].tolist(), key=apart)
