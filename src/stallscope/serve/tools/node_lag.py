"""Outlier scores among ranks: median absolute deviation, for lateness and for any number."""

import statistics
from collections.abc import Sequence

TO_SIGMA = 1.4826
"""Factor from median absolute deviation to standard deviation, for normally distributed values."""


def scores(values: Sequence[float], *, floor: float) -> list[float]:
    """Distance of each value above the median, in standard deviations estimated from the median absolute deviation.

    floor: the smallest deviation used as the unit, in the unit of the values; it prevents a division by zero for equal
    values.
    """
    if not values:
        return []
    middle = statistics.median(values)
    deviation = TO_SIGMA * statistics.median(abs(value - middle) for value in values)
    return [(value - middle) / max(deviation, floor) for value in values]
