"""All ranks alike become slower at some moment: nobody arrives late, so no rank stands out.

The host's own time tells two cases apart: it grew on every rank (something they share), or it did not and only
the waits grew (the device or the fabric; the rank is unknown from the host's side).
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array


@dataclass(frozen=True)
class Slowdown:
    """Steps take after_ns where they took before_ns. host_share: share of the growth that is
    host time of the ranks themselves. at_ns: when, on the first process's clock.
    """

    before_ns: float
    after_ns: float
    host_share: float
    at_ns: int
    n_steps: int


def slowdown(line: Timeline, table: Cells, limits: Thresholds) -> Slowdown | None:
    """The lasting change of the step time, if there is one; the median over the ranks is looked at."""
    steps = np.unique(table.step)
    n_least = limits.slowdown_steps
    if len(steps) < 2 * n_least:
        return None
    duration, host = (
        _per_step(table, line.interval_ns, steps),
        _per_step(table, line.host_ns, steps),
    )
    best = _change(duration, n_least)
    before, after = float(np.median(duration[:best])), float(np.median(duration[best:]))
    low, high = np.quantile(duration[best:], 0.2), np.quantile(duration[:best], 0.8)
    if after < limits.slowdown_factor * before or low <= high or after - before < limits.min_late_ns:
        return None
    if best < limits.run_ahead_steps and not _per_step(table, line.wait_ns, steps)[:best].any():
        return None
    grown = float(np.median(host[best:]) - np.median(host[:best]))
    first = table.first_row[table.step == steps[best]][0]
    return Slowdown(
        before_ns=before,
        after_ns=after,
        host_share=min(max(grown / (after - before), 0.0), 1.0),
        at_ns=int(line.ts_ns[first]),
        n_steps=len(steps) - best,
    )


def _per_step(table: Cells, value: Array, steps: Array) -> Array:
    """Median over the processes of a value's sum in each step: float64 (steps,)."""
    return by_group(np.searchsorted(steps, table.step), table.sums(value), len(steps), medians)


def _change(values: Array, n_least: int) -> int:
    """Where to cut a sequence so that the values lie closest to the medians of the two parts."""
    ranked = np.log(np.maximum(values, 1.0))

    def apart(cut: int) -> float:
        return sum(float(np.abs(part - np.median(part)).sum()) for part in (ranked[:cut], ranked[cut:]))

    return min(range(n_least, len(values) - n_least + 1), key=apart)
