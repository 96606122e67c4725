"""Who stands out among ranks: median absolute deviation, for lateness and for any number."""

import statistics
from collections.abc import Sequence

TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for normal values."""


def scores(values: Sequence[float], *, floor: float) -> list[float]:
    """How many standard deviations each value lies above the median of all, by their median absolute deviation.

    floor: the smallest deviation that counts as one, in the unit of the values; it keeps equal values from
    dividing by zero.
    """
    if not values:
        return []
    middle = statistics.median(values)
    deviation = TO_SIGMA * statistics.median(abs(value - middle) for value in values)
    return [(value - middle) / max(deviation, floor) for value in values]
