"""Statistics over groups of rows: the median of the others, and the like, for millions of rows at once."""

import numpy as np

from stallscope.events.layout import Array


def numbered(*columns: Array) -> tuple[Array, int]:
    """Group numbers 0.. of rows that are equal in all columns, in sorted order; and how many groups there are.

    columns: arrays (n,) of any integer type. Returns int64 (n,).
    """
    code = np.zeros(len(columns[0]), np.int64)
    n_groups = 1 if len(code) else 0
    for column in columns:
        if not len(column):
            continue
        values, inverse = np.unique(column, return_inverse=True)
        code = code * len(values) + inverse
        values, code = np.unique(code, return_inverse=True)
        n_groups = len(values)
    return code.astype(np.int64), n_groups


def median_of_others(group: Array, value: Array) -> Array:
    """For each row the median of the other rows of its group; NaN where there is none.

    group: int64 (n,). value: number (n,), finite. Returns float64 (n,).
    """
    n = len(value)
    out = np.full(n, np.nan)
    if not n:
        return out
    order = np.lexsort((value, group))
    grouped, ranked = group[order], value[order].astype(np.float64)
    starts = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]]))
    sizes = np.diff(np.concatenate([starts, [n]]))
    start, size = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    position = np.arange(n) - start
    others = size - 1
    low, high = (others - 1) // 2, others // 2
    low = np.maximum(low, 0)
    low, high = low + (low >= position), high + (high >= position)
    last = np.maximum(size - 1, 0)
    middle = (ranked[start + np.minimum(low, last)] + ranked[start + np.minimum(high, last)]) / 2
    out[order] = np.where(others > 0, middle, np.nan)
    return out


def robust_deviation(values: Array) -> float:
    """Standard deviation estimated by the median absolute deviation (x 1.4826, exact for a normal law); 0 if empty."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0
    return float(1.4826 * np.median(np.abs(finite - np.median(finite))))
