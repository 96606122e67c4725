"""The rows of a table in another order, column by column: a table of millions of wide rows is not copied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallscope.diagnose.arrays.parallel import in_pieces
from stallscope.events.columns import Columns, is_one_value
from stallscope.events.layout import Array

_ROWS_AT_ONCE = 1 << 10  # of a table of wide rows: what fits the processor's cache
_VALUES_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class RowsInOrder:
    """A table seen in an order, None for that in which it stands. made: columns in that order, which stand for the
    table's own. kept: columns that are needed again and again, the table's own.

    Other columns are made each time they are asked for; single rows and selections of them are copies.
    """

    table: Array | Columns
    order: Array | None
    made: Mapping[str, Array]
    kept: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def at(self, which: Any) -> Any:
        """Where some rows, given by an index, a mask or several indices, stand in the table."""
        if self.order is not None:
            return self.order[which]
        is_mask = isinstance(which, np.ndarray) and which.dtype == bool
        return np.flatnonzero(which) if is_mask else which

    def __getitem__(self, which: Any) -> Array:
        """A column by its name; else the rows at an index, a mask, or several indices."""
        if isinstance(which, str):
            known = self.made.get(which, self.kept.get(which))
            return taken(self.table[which], self.order) if known is None else known
        rows = _rows(self.table, self.at(which))
        if self.made:
            rows = rows.copy()
            for name, column in self.made.items():
                rows[name] = column[which]
        return np.asarray(rows) if isinstance(rows, np.ndarray) else rows

    def column(self, name: str, where: Array, place: int | None = None) -> Array:
        """One column of some rows (indices), or one place of a field that is an array: nothing else is touched."""
        known = self.made.get(name, self.kept.get(name))
        if known is not None:
            return known[where] if place is None else known[where, place]
        if place is None:
            return self.table[name][self.at(where)]
        if isinstance(self.table, Columns):
            return self.table.place(name, place)[self.at(where)]
        return self.table[name][:, place][self.at(where)]

    def keeping(self, *names: str, beside: Callable[[slice, Array], None] | None = None) -> "RowsInOrder":
        """The same rows with these columns kept. beside: see in_order."""
        found = in_order(self.table, self.order, names, beside=beside)
        return replace(self, kept={**self.kept, **found})

    def standing_for(self, made: Mapping[str, Array]) -> "RowsInOrder":
        """The same rows with columns that stand for the table's own."""
        return replace(self, made={**self.made, **made})


def in_order(
    table: Array | Columns,
    order: Array | None,
    names: tuple[str, ...],
    *,
    beside: Callable[[slice, Array], None] | None = None,
) -> dict[str, Array]:
    """Columns of a table in an order. One that is the same everywhere takes no memory.

    Wide rows are read once for all columns, a few rows at a time. beside: called with these rows and where they stand;
    only for an array of rows.
    """
    if isinstance(table, Columns):
        return {name: _lean(taken(table[name], order)) for name in names}
    found = {name: np.empty(len(table), table.dtype[name]) for name in names}

    def fill(here: slice) -> None:
        rows = table[here] if order is None else _rows(table, order[here])
        for name, column in found.items():
            column[here] = rows[name]
        if beside is not None:
            beside(here, rows)

    in_pieces(len(table), fill, rows_at_once=_ROWS_AT_ONCE)
    return {name: _lean(column) for name, column in found.items()}


def flagged(flags: Array, flag: int) -> Array:
    """Whether each row has a flag: bool (n,); one value seen n times where the flags are."""
    few = flags[:1] if is_one_value(flags) else flags
    return np.broadcast_to(few & flag > 0, flags.shape)


def _rows(table: Array | Columns, which: Array) -> Array:
    """The row at an index, or a copy of those at some. Copied as bytes: field by field takes five times as long."""
    if isinstance(table, Columns) or not isinstance(which, np.ndarray) or not table.flags.c_contiguous:
        return table[which]
    as_bytes = table.view(np.uint8).reshape(len(table), table.dtype.itemsize)
    return np.take(as_bytes, which, axis=0).view(table.dtype).reshape(len(which))


def taken(column: Array, order: Array | None) -> Array:
    """A column (n,) in an order; the very column where that is its own."""
    if order is None:
        return column
    if is_one_value(column):
        return np.broadcast_to(column[0], (len(order), *column.shape[1:]))
    out = np.empty((len(order), *column.shape[1:]), column.dtype)

    def fill(here: slice) -> None:
        np.take(column, order[here], axis=0, out=out[here], mode="clip")  # checked would be copied

    in_pieces(len(order), fill, rows_at_once=_VALUES_AT_ONCE)
    return out


def _lean(column: Array) -> Array:
    """The column, as one value seen n times where it is."""
    n, few = len(column), _ROWS_AT_ONCE
    if not n or (column[:few] != column[0]).any() or (n > few and (column != column[0]).any()):
        return column
    return np.broadcast_to(column[0].copy(), (n,))
