"""Many stretches of rows at once: loops over stretches cost more than the rows in them."""

import numpy as np

from stallscope.events.layout import Array


def rows_of(first: Array, end: Array) -> tuple[Array, Array]:
    """The rows of stretches first..end, one stretch after the other, and the number of each row's stretch.

    first, end: int64 (k,), end exclusive; stretches may overlap or be empty. Returns int64 (n,) twice.
    """
    size = end - first
    of_stretch = np.repeat(np.arange(len(first)), size)
    begin = first - np.cumsum(size) + size
    return np.arange(len(of_stretch)) + begin[of_stretch], of_stretch


def largest_in(value: Array, first: Array, end: Array) -> Array:
    """The row of the first largest value in each stretch first..end: int64 (k,). No stretch may be empty."""
    rows, of_stretch = rows_of(first, end)
    size = end - first
    largest = np.maximum.reduceat(value[rows], np.cumsum(size) - size)
    is_largest = np.flatnonzero(value[rows] == largest[of_stretch])
    _, first_of_stretch = np.unique(of_stretch[is_largest], return_index=True)
    return np.asarray(rows[is_largest[first_of_stretch]])
