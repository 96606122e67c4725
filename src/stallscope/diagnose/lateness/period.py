"""Whether a delay returns every k steps."""

import numpy as np

from stallscope.events.layout import Array

_REGULAR_SHARE = 0.75
_COMPARABLE = 0.3


def period_steps(steps: Array, sizes: Array) -> int | None:
    """The distance in steps at which delays return, or None.

    steps: int64 (n,) sorted. sizes: float64 (n,), how long each delay was: small ones between large ones do not
    count. A missed return (twice the distance) does not break a period. At least three delays are needed, and a
    distance of at least two steps.
    """
    steps = np.unique(steps[sizes >= _COMPARABLE * np.median(sizes)]) if len(steps) else steps
    if len(steps) < 3:
        return None
    gaps = np.diff(steps)
    values, counts = np.unique(gaps, return_counts=True)
    usual = int(values[np.argmax(counts)])
    if usual < 2 or counts.max() < 2:
        return None
    return usual if float(np.mean(gaps % usual == 0)) >= _REGULAR_SHARE else None
