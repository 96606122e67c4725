"""Rows laid out as tables, one for each set of processes that call together: a line per member, a column per round.

Rows ordered by process make each line of a table contiguous, and statistics over the members of every round need
neither sorting nor indices. Sets of equal size form one array. Very large sets are subsampled (see subsample).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import median_of_others
from stallscope.diagnose.arrays.parallel import ROWS_AT_ONCE, in_pieces
from stallscope.diagnose.arrays.row_order import taken
from stallscope.diagnose.arrays.subsample import Sampled
from stallscope.events.layout import Array

_SPARSE = 4  # cells per row up to which sets of one size are laid out as tables
_SORTED = 32  # members up to which sorting is faster than partitioning
_AT_ONCE = 1 << 18  # cells processed at once: they fit the processor's cache


@dataclass(frozen=True)
class Block:
    """Tables of one size: cells first.. of the layout, as (n_sets, n_members, n_columns)."""

    first: int
    n_sets: int
    n_members: int
    n_columns: int

    @property
    def n_cells(self) -> int:
        return self.n_sets * self.n_members * self.n_columns

    def of(self, cells: Array) -> Array:
        """The slice of this block in an array over all cells, reshaped."""
        part = cells[self.first : self.first + self.n_cells]
        return part.reshape(self.n_sets, self.n_members, self.n_columns)


@dataclass(frozen=True)
class Tables:
    """The cell of each row. group, cell: int64 (n,), the row's group and its index among all cells. blocks: see Block.

    irregular: int64, rows whose groups do not fit a table: a member occurs twice, or most cells would be empty.
    first_cell, line_cells, first_group: int64 by set, the first cell of its table, the cells of a line, and the
    number of its first group. sampled: the sets that are large enough to be subsampled, None without any.
    """

    group: Array
    cell: Array
    blocks: tuple[Block, ...]
    irregular: Array
    first_cell: Array
    line_cells: Array
    first_group: Array
    sampled: Sampled | None = None

    @staticmethod
    def of(of_set: Array, member: Array, group: Array, *, is_laid_out: bool = True) -> "Tables":
        """The layout of some rows, which are sorted by process.

        of_set: int64 (n,), number of the set of processes that call together. member: int64 (n,), the process's index
        in it. group: int64 (n,), number of the round, from 0, in order of the sets. is_laid_out: False where only
        medians are needed; then cell is empty if all sets are sampled.
        """
        n = len(group)
        if not n:
            none = np.zeros(0, np.int64)
            return Tables(group, none, (), none, none, none, none)
        n_sets, n_groups = int(of_set.max()) + 1, int(group.max()) + 1
        set_of_group = np.zeros(n_groups, np.int64)
        set_of_group[group] = of_set
        n_columns = np.bincount(set_of_group, minlength=n_sets)
        last_row = np.zeros(n_sets, np.int64)
        last_row[of_set] = np.arange(n)  # the last assignment wins: the row of the last member
        n_members = member[last_row] + 1
        blocks, start, stride, is_sparse = _blocks(
            n_columns, n_members, np.bincount(of_set, minlength=n_sets)
        )
        first_group = np.cumsum(n_columns) - n_columns  # groups are numbered through all sets
        n_members[is_sparse] = 0
        sampled = Sampled.of(of_set, member, group, n_members=n_members, n_columns=n_columns)
        if sampled and sampled.is_of.all() and not is_laid_out:
            none = np.zeros(0, np.int64)
            return Tables(group, none, (), none, none, none, first_group, sampled)
        first_cell, start = start, start - first_group
        cell = np.empty(n, np.int64)

        def fill(here: slice) -> None:
            np.multiply(member[here], stride[of_set[here]], out=cell[here])
            cell[here] += group[here]
            cell[here] += start[of_set[here]]

        in_pieces(n, fill, rows_at_once=ROWS_AT_ONCE)
        is_odd = is_sparse[of_set] if is_sparse.any() else None
        irregular = _irregular(group, cell, blocks, is_odd)
        return Tables(group, cell, blocks, irregular, first_cell, stride, first_group, sampled)

    @property
    def n_cells(self) -> int:
        """The cells of all blocks."""
        return sum(block.n_cells for block in self.blocks)

    def beyond_others(
        self, value: Array, is_in: Array | None = None, *, held_against: Array | None = None
    ) -> Array:
        """For each row its value minus the median of the other rows of its group: float64 (n,), NaN without other rows.

        value: int64 or float64 (n,), finite. is_in: bool (n,), the rows that count, by default all; other rows are NaN.
        held_against: (n,), the value of which the median is taken, by default `value`.
        """
        others, is_by_group = self._medians(value if held_against is None else held_against, is_in)
        out = np.empty(len(value)) if is_by_group else others

        def subtract(here: slice) -> None:
            if is_by_group:
                np.take(others, self.group[here], out=out[here], mode="clip")
            np.subtract(value[here], out[here], out=out[here])
            if is_in is not None:
                out[here][~is_in[here]] = np.nan

        in_pieces(len(out), subtract, rows_at_once=ROWS_AT_ONCE)
        return out

    def median_of_others(self, value: Array, rows: Array) -> Array:
        """For some rows the median of the other rows of their group: float64 (k,), NaN without other rows.

        value: int64 or float64 (n,), finite. rows: int64 (k,).
        """
        others, is_by_group = self._medians(value, None)
        return others[self.group[rows] if is_by_group else rows]

    def _medians(self, value: Array, is_in: Array | None) -> tuple[Array, bool]:
        """The median of the others, and whether it is by group, float64 (n_groups,), or by row, float64 (n,).

        By group, all rows of a group share a median.
        """
        if self.sampled is None:
            return self._by_row(value, is_in), False
        medians, is_few = self.sampled.medians(value, is_in)
        if self.sampled.is_of.all() and not is_few.any():
            return medians, True
        out = medians[self.group]
        rows = np.flatnonzero((is_few | ~self.sampled.is_of)[self.group])
        if is_in is not None:
            rows = rows[is_in[rows]]
        if len(rows) <= len(out) // _SPARSE or not len(self.cell):
            out[rows] = median_of_others(self.group[rows], value[rows])
        else:
            out[rows] = self._by_row(value, is_in)[rows]
        return out, False

    def _by_row(self, value: Array, is_in: Array | None) -> Array:
        """The median of the others of each row, from all members of each set: float64 (n,)."""
        empty = np.iinfo(np.int64).max if value.dtype.kind == "i" else np.inf
        cells = np.full(self.n_cells, empty, value.dtype)
        if is_in is None:
            cells[self.cell] = value
        else:
            cells[self.cell[is_in]] = value[is_in]
        out = np.empty(len(cells))
        parts = [part for block in self.blocks for part in _parts(block.of(cells), block.of(out))]

        def fill(here: slice) -> None:
            for part, target in parts[here]:
                _median_of_others(part, target, empty)

        in_pieces(len(parts), fill, rows_at_once=1, is_much=len(cells) > _AT_ONCE)
        medians = taken(out, self.cell)
        rows = self.irregular if is_in is None else self.irregular[is_in[self.irregular]]
        if len(rows):
            medians[rows] = median_of_others(self.group[rows], value[rows])
        return medians


def _blocks(
    n_columns: Array, n_members: Array, n_rows: Array
) -> tuple[tuple[Block, ...], Array, Array, Array]:
    """Blocks for sets of the given numbers of columns and members; by set its first cell, the cells of a line, and
    whether it is left out because most cells would be empty.
    """
    start, stride = np.zeros(len(n_columns), np.int64), np.zeros(len(n_columns), np.int64)
    is_sparse = np.zeros(len(n_columns), bool)
    # Sets of a similar number of columns share a block: sets of one program differ by the few lost rounds only.
    width = np.frexp(n_columns.astype(np.float64))[1]
    blocks: list[Block] = []
    first = 0
    for members, bits in np.unique(np.stack([n_members, width]), axis=1).T.tolist():
        sets = np.flatnonzero((n_members == members) & (width == bits) & (n_rows > 0))
        columns = int(n_columns[sets].max(initial=0))
        if not len(sets):
            continue
        if len(sets) * members * columns > _SPARSE * int(n_rows[sets].sum()):
            is_sparse[sets] = True
            continue
        blocks.append(Block(first, len(sets), members, columns))
        start[sets] = first + np.arange(len(sets)) * members * columns
        stride[sets] = columns
        first += blocks[-1].n_cells
    return tuple(blocks), start, stride, is_sparse


def _irregular(group: Array, cell: Array, blocks: tuple[Block, ...], is_odd: Array | None) -> Array:
    """Rows of sparse sets, whose cell becomes 0, and rows of groups in which two rows share a cell."""
    n_cells = sum(block.n_cells for block in blocks)
    if is_odd is not None:
        cell[is_odd] = 0
    is_taken = np.zeros(max(n_cells, 1), bool)

    def take(here: slice) -> None:
        is_taken[cell[here]] = True

    in_pieces(len(cell), take, rows_at_once=ROWS_AT_ONCE)
    if is_odd is None and np.count_nonzero(is_taken) == len(cell):
        return np.zeros(0, np.int64)
    odd = np.zeros(len(cell), bool) if is_odd is None else is_odd.copy()
    owner = np.zeros(max(n_cells, 1), np.int64)
    regular = np.flatnonzero(~odd)
    owner[cell[regular]] = regular
    twice = np.unique(group[regular[owner[cell[regular]] != regular]])
    if len(twice):
        is_twice = np.zeros(int(group.max()) + 1, bool)
        is_twice[twice] = True
        odd |= is_twice[group]
    return np.flatnonzero(odd)


def _parts(cells: Array, out: Array) -> Iterator[tuple[Array, Array]]:
    """Both arrays (n_sets, n_members, n_columns) cut at the same sets or columns into pieces that fit the cache."""
    n_sets, n_members, n_columns = cells.shape
    sets = max(_AT_ONCE // (n_members * n_columns), 1)
    columns = n_columns if sets > 1 else max(_AT_ONCE // n_members, 8)
    for i in range(0, n_sets, sets):
        for j in range(0, n_columns, columns):
            here = np.s_[i : i + sets, :, j : j + columns]
            yield cells[here], out[here]


def _median_of_others(cells: Array, out: Array, empty: float) -> None:
    """Fill out (sets, members, columns) with the median of each column's other cells. empty: the value of empty cells.

    With an even number of cells, the others' median is one of the middle two: the upper one for the lower half, and
    the lower one for the upper half. With an odd number it is the mean of two of the middle three.
    """
    n_sets, size, n_columns = cells.shape
    ranked = np.ascontiguousarray(cells.transpose(0, 2, 1)).reshape(-1, size)
    n_filled = np.count_nonzero(ranked != empty, axis=1)
    low, high = np.full((2, len(ranked)), empty, cells.dtype)
    of_low, of_middle, of_high = np.full((3, len(ranked)), np.nan)
    for n in np.unique(n_filled[n_filled > 1]).tolist():
        at = n_filled == n
        below, middle, above = _middle(ranked if at.all() else ranked[at], n)
        low[at], high[at] = below, middle
        of_low[at] = _mean(middle, above) if n % 2 else above
        of_middle[at] = _mean(below, above)
        of_high[at] = _mean(below, middle)
    low, high, of_low, of_middle, of_high = (
        each.reshape(n_sets, 1, n_columns) for each in (low, high, of_low, of_middle, of_high)
    )
    np.copyto(out, of_high)
    np.copyto(out, of_low, where=cells <= low)
    if (n_filled % 2).any():
        np.copyto(out, of_middle, where=(cells > low) & (cells <= high))


def _middle(ranked: Array, n: int) -> tuple[Array, Array, Array]:
    """The middle three of the n lowest in each row; for an even n the lower middle value twice: (k,) each."""
    half = (n - 1) // 2
    indices = (half - 1, half, half + 1) if n % 2 else (half, half, half + 1)
    if ranked.shape[1] <= _SORTED:
        ranked = np.sort(ranked, axis=1)
    else:
        ranked = np.partition(ranked, sorted(set(indices)), axis=1)
    below, middle, above = (ranked[:, index] for index in indices)
    return below, middle, above


def _mean(low: Array, high: Array) -> Array:
    return np.asarray((low + high) / 2)
