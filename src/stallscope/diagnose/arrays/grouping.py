"""Statistics over groups of rows: numbers for equal rows, medians by group, for millions of rows at once.

Rows are numbered through tables and hashes, which need no sorting; where sorting is needed, whole numbers are
sorted, not indices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.parallel import ROWS_AT_ONCE, in_pieces
from stallscope.events.columns import is_one_value
from stallscope.events.layout import UNKNOWN, Array

_SPARSE = 4  # table entries per row up to which codes are renumbered through a table
_SMALL = 1 << 12  # fewer rows than this are sorted at once
_FEW_VALUES = 8
_KINDS = (np.uint16, np.int32, np.int64)
_HASH_BITS = 20
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads multiples (Knuth, TAOCP 6.4)


def numbered(*columns: Array) -> tuple[Array, int]:
    """Number the groups of rows that are equal in all columns, in sorted order; also returns the number of groups.

    columns: arrays (n,) of any integer type. Returns int64 (n,).
    """
    n = len(columns[0])
    if not n:
        return np.zeros(0, np.int64), 0
    most, digits = _SPARSE * n + _SMALL, _Digits([], 1)
    for column in columns:
        if is_one_value(column):
            continue
        digit = _Digit.of(column.view(np.uint8) if column.dtype == bool else column, most)
        if digits.n_codes * digit.span > most:
            code, n_codes = _dense(digits.codes(n), digits.n_codes)
            digits = _Digits([_Digit(code, np.int64(0), n_codes)], n_codes)
        if digits.n_codes * digit.span > most:
            code, n_codes = _ragged(code, n_codes, digit.above(slice(None)), span=digit.span)
            digits = _Digits([_Digit(code, np.int64(0), n_codes)], n_codes)
        else:
            digits = _Digits([*digits.each, digit], digits.n_codes * digit.span)
    code, n_codes = _dense(digits.codes(n), digits.n_codes)
    return code.astype(np.int64, copy=False), n_codes


@dataclass(frozen=True)
class _Digit:
    """A column (n,), its minimum, and the number of values from its minimum to its maximum."""

    column: Array
    low: np.integer
    span: int

    @staticmethod
    def of(column: Array, most: int) -> "_Digit":
        """The digit of a column. A column whose values span more than `most` is numbered first."""
        low, high = _ends(column)
        span = int(high) - int(low) + 1
        return _Digit(column, low, span) if span <= most else _Digit.numbered(column)

    @staticmethod
    def numbered(column: Array) -> "_Digit":
        """The digit of a column after its values are numbered."""
        number, n_values = _distinct(column)
        return _Digit(number, np.int64(0), n_values)

    def above(self, here: slice) -> Array:
        """A slice of the column minus the column's minimum: int64."""
        column = self.column[here]
        if column.dtype == np.uint64:
            return (column - self.low).astype(np.int64)
        return column.astype(np.int64) - np.int64(self.low)


@dataclass(frozen=True)
class _Digits:
    """Columns as the digits of one number, most significant first. n_codes: the number of possible codes."""

    each: list[_Digit]
    n_codes: int

    def codes(self, n: int) -> Array:
        """The code of each row, in the smallest sufficient type: (n,)."""
        if not self.each:
            return np.zeros(n, np.int64)
        first, *others = self.each
        if not others and first.low == 0 and first.column.dtype == np.int64:
            return first.column
        out = np.empty(n, next(kind for kind in _KINDS if self.n_codes <= np.iinfo(kind).max))

        def fill(here: slice) -> None:
            code = first.above(here)
            for digit in others:
                code *= digit.span
                code += digit.above(here)
            out[here] = code

        in_pieces(n, fill, rows_at_once=ROWS_AT_ONCE)
        return out


def _ends(column: Array) -> tuple[np.integer, np.integer]:
    """The minimum and the maximum."""
    ends: list[tuple[np.integer, np.integer]] = []

    def add_part(here: slice) -> None:
        ends.append((column[here].min(), column[here].max()))

    in_pieces(len(column), add_part, rows_at_once=ROWS_AT_ONCE)
    return min(low for low, _ in ends), max(high for _, high in ends)


def _ragged(code: Array, n_codes: int, values: Array, *, span: int) -> tuple[Array, int]:
    """Combine codes and values where the values of each code span less than the values of all codes."""
    low, high = np.full(n_codes, span), np.zeros(n_codes, np.int64)
    np.minimum.at(low, code, values)
    np.maximum.at(high, code, values)
    end = np.cumsum(high - low + 1)
    if end[-1] <= _SPARSE * len(code) + _SMALL:
        return values + (end - 1 - high)[code], int(end[-1])
    values, span = _distinct(values)
    return _distinct(code * span + values)


def _dense(code: Array, n_codes: int) -> tuple[Array, int]:
    """Codes 0..n_codes renumbered without gaps, in order, and the number of distinct codes."""
    if n_codes > _SPARSE * len(code) + _SMALL:
        return _distinct(code)
    if n_codes == 1:
        return code, 1
    present = np.zeros(n_codes, bool)

    def mark(here: slice) -> None:
        present[code[here]] = True

    in_pieces(len(code), mark, rows_at_once=ROWS_AT_ONCE)
    n_present = int(np.count_nonzero(present))
    if n_present == n_codes:
        return code, n_codes
    rank: Array = np.cumsum(present, dtype=np.int32 if n_codes < 1 << 31 else np.int64)
    rank -= 1
    out = np.empty(len(code), np.int64)

    def look_up(here: slice) -> None:
        out[here] = rank[code[here]]

    in_pieces(len(code), look_up, rows_at_once=ROWS_AT_ONCE)
    return out, n_present


def _distinct(column: Array) -> tuple[Array, int]:
    """The column with its values renumbered 0.. in order, and the number of distinct values. Any range of values works.

    Each value is hashed to a slot of a table. A value that is not in its slot afterwards collided with another value;
    a column with few distinct values has few collisions.
    """
    if len(column) > _SMALL:
        few = _few_distinct(column)
        if few is not None:
            return few
        owner, is_used = np.zeros(1 << _HASH_BITS, column.dtype), np.zeros(1 << _HASH_BITS, bool)
        number, is_missed = np.empty(len(column), np.int64), np.empty(len(column), bool)
        slots = np.empty(len(column), np.int32)

        def settle(here: slice) -> None:
            slot = _slots(column[here])
            slots[here] = slot
            owner[slot], is_used[slot] = column[here], True

        def compare(here: slice) -> None:
            np.not_equal(owner[slots[here]], column[here], out=is_missed[here])

        in_pieces(len(column), settle, rows_at_once=ROWS_AT_ONCE)
        in_pieces(len(column), compare, rows_at_once=ROWS_AT_ONCE)
        missed = np.flatnonzero(is_missed)
        if len(missed) <= len(column) // _SPARSE:
            collided = column[missed]
            values = np.unique(np.concatenate([owner[is_used], collided]))
            number_of_slot = np.searchsorted(values, owner)

            def look_up(here: slice) -> None:
                number[here] = number_of_slot[slots[here]]

            in_pieces(len(column), look_up, rows_at_once=ROWS_AT_ONCE)
            number[missed] = np.searchsorted(values, collided)
            return number, len(values)
    values, inverse = np.unique(column, return_inverse=True)
    return inverse.astype(np.int64, copy=False), len(values)


def _few_distinct(column: Array) -> tuple[Array, int] | None:
    """As _distinct, for a column with few distinct values; None if it has more than a sample of its rows shows."""
    values = np.unique(column[:: max(len(column) // _SMALL, 1)])
    if len(values) > _FEW_VALUES:
        return None
    number, is_other = np.empty(len(column), np.int64), np.zeros(len(column), bool)

    def look_up(here: slice) -> None:
        part = column[here]
        below = np.zeros(len(part), np.int8)
        for value in values[1:]:
            below += part >= value
        number[here] = below
        np.not_equal(values[below], part, out=is_other[here])

    in_pieces(len(column), look_up, rows_at_once=ROWS_AT_ONCE)
    return None if is_other.any() else (number, len(values))


def _slots(column: Array) -> Array:
    """The hash table slot of each value."""
    slot = column.astype(np.uint64)
    slot *= _MIX
    slot >>= np.uint64(64 - _HASH_BITS)
    return slot.view(np.int64)


def positions_in_run(*columns: Array) -> Array:
    """The position of each row in its run of consecutive rows that are equal in all columns: int64 (n,)."""
    n = len(columns[0])
    begins = np.zeros(n, bool)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(begins)
    return np.arange(n) - np.repeat(first, np.diff(first, append=n))


def order_of(group: Array, n_groups: int) -> Array:
    """The rows sorted by group; rows of the same group keep their order: int64 (n,)."""
    if not len(group) or (group[1:] >= group[:-1]).all():
        return np.arange(len(group))
    if n_groups <= 1 << 16:  # numpy sorts 16-bit numbers by radix, five times faster
        return np.argsort(group.astype(np.uint16), kind="stable")
    bits = max(len(group) - 1, 1).bit_length()
    if n_groups >> (62 - bits):
        return np.argsort(group, kind="stable")
    packed = (group << bits) | np.arange(len(group))  # several times faster than argsort
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def by_group(group: Array, value: Array, n_groups: int, statistic: Callable[[Array], Array]) -> Array:
    """A statistic of each group's values: float64 (n_groups,), NaN for empty groups.

    group: int64 (n,). value: number (n,). statistic: of a matrix (k, size) along its rows; groups of equal size share a
    matrix.
    """
    out = np.full(n_groups, np.nan)
    order, sizes = order_of(group, n_groups), np.bincount(group, minlength=n_groups)
    first = np.cumsum(sizes) - sizes
    for size in np.unique(sizes[sizes > 0]).tolist():
        groups = np.flatnonzero(sizes == size)
        out[groups] = statistic(value[order[first[groups][:, None] + np.arange(size)]])
    return out


def medians(table: Array) -> Array:
    """The median of each row of a table (k, size)."""
    return np.asarray(np.median(table, axis=1))


def known_mean(values: Array, weight: Array) -> float | None:
    """The weighted mean of the values that are not UNKNOWN, both (n,); None if none of them has a weight."""
    is_known = values != UNKNOWN
    whole = float(weight[is_known].sum())
    return float((values[is_known] * weight[is_known]).sum() / whole) if whole else None


def median_of_others(group: Array, value: Array) -> Array:
    """For each row the median of the other rows of its group; NaN where the group has no other row.

    group: int64 (n,). value: number (n,), finite. Returns float64 (n,). For many rows see round_tables.py.
    """
    n = len(value)
    if not n:
        return np.zeros(0)
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
