"""Medians over very many processes that call together, from a sample of the processes.

The median of a thousand members differs from the median of all members by a twentieth of the standard deviation of a
member (1.25 / sqrt(m) for a normal distribution). That is far below any reported lateness. The thousand members are
chosen once, so every round compares the same members.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.parallel import ROWS_AT_ONCE, in_pieces
from stallscope.events.layout import Array

SAMPLED_FROM = 1024
"""Members from which on a set is subsampled."""

_CHOSEN = 1024
_FEW = _CHOSEN // 8  # chosen members in a round below which all members are examined
_COLUMNS_AT_ONCE = 1 << 8
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are evenly spread and have no period


def spread_out(size: int, n: int) -> Array:
    """At most n of the indices 0..size, evenly spread: int64, sorted.

    They follow no number of ranks per node: each local rank is chosen equally often.
    """
    if size <= n:
        return np.arange(size)
    return np.unique((np.arange(n) * _GOLDEN % 1.0 * size).astype(np.int64))


@dataclass(frozen=True)
class Sampled:
    """The large sets of some rows. rows, cell: int64 (k,), the rows of chosen members, and their cells in consecutive
    tables. tables: by set its first group, first cell, members and columns. is_of: bool by group, whether the group
    belongs to a large set.
    """

    rows: Array
    cell: Array
    tables: tuple[tuple[int, int, int, int], ...]
    is_of: Array

    @staticmethod
    def of(
        of_set: Array, member: Array, group: Array, *, n_members: Array, n_columns: Array
    ) -> "Sampled | None":
        """The large sets of rows with this layout (see Tables.of). n_members, n_columns: int64 by set."""
        large = np.flatnonzero(n_members >= SAMPLED_FROM)
        if not len(large):
            return None
        chosen = [spread_out(size, _CHOSEN) for size in n_members[large].tolist()]
        first_group = np.cumsum(n_columns) - n_columns
        # By set and member: where the member's line begins, -1 for members that are not chosen.
        begin = np.cumsum(n_members) - n_members
        line = np.full(int(n_members.sum()), -1)
        is_of, tables, first_cell = np.zeros(int(n_columns.sum()), bool), [], 0
        for number, members in zip(large.tolist(), chosen, strict=True):
            columns, own = int(n_columns[number]), int(first_group[number])
            line[begin[number] + members] = first_cell + np.arange(len(members)) * columns - own
            tables.append((own, first_cell, len(members), columns))
            is_of[own : own + columns] = True
            first_cell += len(members) * columns
        is_chosen = np.empty(len(group), bool)
        is_member = line != -1

        def choose(here: slice) -> None:
            np.take(is_member, begin[of_set[here]] + member[here], out=is_chosen[here], mode="clip")

        in_pieces(len(group), choose, rows_at_once=ROWS_AT_ONCE)
        rows = np.flatnonzero(is_chosen)
        return Sampled(rows, line[begin[of_set[rows]] + member[rows]] + group[rows], tuple(tables), is_of)

    def medians(self, value: Array, is_in: Array | None) -> tuple[Array, Array]:
        """The median of each group of a large set: float64 (n_groups,), NaN for other groups. Also the groups with too
        few chosen members for a median: bool (n_groups,).

        value, is_in: of all rows, see Tables.beyond_others.
        """
        empty = np.iinfo(np.int64).max if value.dtype.kind == "i" else np.inf
        medians, is_few = np.full(len(self.is_of), np.nan), self.is_of.copy()
        rows, cell = self.rows, self.cell
        if is_in is not None:
            kept = is_in[rows]
            rows, cell = rows[kept], cell[kept]
        _, first_cell, n_lines, n_columns = self.tables[-1]
        cells = np.full(first_cell + n_lines * n_columns, empty, value.dtype)
        cells[cell] = value[rows]
        for first, first_cell, n_lines, n_columns in self.tables:
            table = cells[first_cell : first_cell + n_lines * n_columns].reshape(n_lines, n_columns)

            def fill(here: slice, table: Array = table, first: int = first) -> None:
                ranked = np.ascontiguousarray(table[:, here].T)
                n_filled = np.count_nonzero(ranked != empty, axis=1)
                own = slice(first + here.start, first + here.stop)
                medians[own], is_few[own] = _medians(ranked, n_filled), n_filled < _FEW

            in_pieces(n_columns, fill, rows_at_once=_COLUMNS_AT_ONCE, is_much=True)
        return medians, is_few


def _medians(ranked: Array, n_filled: Array) -> Array:
    """The median of the n_filled lowest values in each row, NaN for fewer than two: float64 (k,)."""
    medians = np.full(len(ranked), np.nan)
    for n in np.unique(n_filled[n_filled > 1]).tolist():
        at = n_filled == n
        low, high = (n - 1) // 2, n // 2
        middle = np.partition(ranked if at.all() else ranked[at], sorted({low, high}), axis=1)
        medians[at] = (middle[:, low] + middle[:, high]) / 2
    return medians
