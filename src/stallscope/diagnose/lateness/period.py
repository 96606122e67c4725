"""The period of a delay that returns every k steps."""

import numpy as np

from stallscope.events.layout import Array

_REGULAR_SHARE = 0.75  # of the distances that must be multiples of the period
_COMPARABLE = 0.3  # share of the median delay below which a delay does not count


def period_steps(steps: Array, sizes: Array) -> int | None:
    """The distance in steps at which delays return, or None.

    steps: int64 (n,) sorted. sizes: float64 (n,), the length of each delay; small delays between large delays do not
    count. A missed return (twice the distance) does not break a period. At least three delays are needed, and a
    distance of at least two steps.
    """
    steps = np.unique(steps[sizes >= _COMPARABLE * np.median(sizes)]) if len(steps) else steps
    if len(steps) < 3:
        return None
    gaps = np.diff(steps)
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[np.argmax(counts)])
    if period < 2 or counts.max() < 2:
        return None
    return period if float(np.mean(gaps % period == 0)) >= _REGULAR_SHARE else None
