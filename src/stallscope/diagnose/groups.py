"""Statistics over groups of rows: the median of the others, and the like, for millions of rows at once."""

import numpy as np

from stallscope.events.layout import Array

_TABLE = 1 << 27  # codes up to here are renumbered through a table, which needs no sorting
_SPARSE = 64  # and up to so many times as many as there are rows: clearing the table costs more than sorting else
_DENSE = 4  # a table of groups x members may have this many cells per row


def numbered(*columns: Array) -> tuple[Array, int]:
    """Group numbers 0.. of rows that are equal in all columns, in sorted order; and how many groups there are.

    columns: arrays (n,) of any integer type. Returns int64 (n,).
    """
    code = np.zeros(len(columns[0]), np.int64)
    if not len(code):
        return code, 0
    n_groups = 1
    for column in columns:
        values, n_values = _dense(column)
        code, n_groups = _dense(code * n_values + values)
    return code, n_groups


def _dense(column: Array) -> tuple[Array, int]:
    """The column with its values renumbered 0.. in order, and how many there are."""
    if column.dtype == bool:
        column = column.view(np.uint8)
    low, high = column.min(), column.max()
    span = int(high) - int(low) + 1
    if span == 1:
        return np.zeros(len(column), np.int64), 1
    if span > min(_TABLE, _SPARSE * len(column)):
        values, inverse = np.unique(column, return_inverse=True)
        return inverse.astype(np.int64), len(values)
    code = (column - low).astype(np.int64)
    present = np.zeros(span, bool)
    present[code] = True
    if present.all():
        return code, span
    place = np.cumsum(present) - 1
    return place[code], int(place[-1]) + 1


def order_of(group: Array, n_groups: int) -> Array:
    """The rows in order of their group, those of one group in their own order: int64 (n,)."""
    small = group.astype(np.uint16) if n_groups <= 1 << 16 else group  # 16 bits are sorted in linear time
    return np.argsort(small, kind="stable")


def median_of_others(group: Array, value: Array, member: Array | None = None) -> Array:
    """For each row the median of the other rows of its group; NaN where there is none.

    group: int64 (n,). value: number (n,), finite. member: int64 (n,), small numbers that differ within a group
    (the process, say): with them large groups need no sorting. Returns float64 (n,).
    """
    if not len(value):
        return np.zeros(0)
    if member is not None:
        n_groups, n_members = int(group.max()) + 1, int(member.max()) + 1
        if n_groups * n_members <= _DENSE * len(value):
            return _by_table(group, value, member, shape=(n_groups, n_members))
    return _by_sorting(group, value)


def _by_table(group: Array, value: Array, member: Array, *, shape: tuple[int, int]) -> Array:
    table = np.full(shape, np.inf)
    table[group, member] = value
    sizes = np.bincount(group, minlength=shape[0])
    if np.isfinite(table).sum() < len(value):  # a member twice in a group
        return _by_sorting(group, value)
    out = np.full(len(value), np.nan)
    for size in np.unique(sizes[sizes > 1]):
        rows = np.flatnonzero(sizes == size)
        low, high = (size - 2) // 2, (size - 1) // 2
        places = sorted({low, low + 1, high, high + 1})
        places = [place for place in places if place < shape[1]]
        part = np.partition(table[rows], places, axis=1)
        of_row = np.searchsorted(rows, group)
        mine = sizes[group] == size
        found, values = of_row[mine], value[mine]
        lower, lower_next = part[:, low][found], part[:, low + 1][found]
        upper, upper_next = part[:, high][found], part[:, min(high + 1, shape[1] - 1)][found]
        a = np.where(values <= lower, lower_next, lower)
        b = np.where(values <= upper, upper_next, upper)
        out[mine] = (a + b) / 2
    return out


def _by_sorting(group: Array, value: Array) -> Array:
    n = len(value)
    order = np.lexsort((value, group))
    grouped, ranked = group[order], value[order].astype(np.float64)
    starts = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]]))
    sizes = np.diff(np.concatenate([starts, [n]]))
    start, size = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    position = np.arange(n) - start
    others = size - 1
    low, high = np.maximum((others - 1) // 2, 0), others // 2
    low, high = low + (low >= position), high + (high >= position)
    last = np.maximum(size - 1, 0)
    middle = (ranked[start + np.minimum(low, last)] + ranked[start + np.minimum(high, last)]) / 2
    out = np.full(n, np.nan)
    out[order] = np.where(others > 0, middle, np.nan)
    return out
