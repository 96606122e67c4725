"""The rows of a table in another order, column by column: a table of millions of wide rows is not copied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallscope.diagnose.arrays.parallel import in_pieces
from stallscope.events.columns import Columns, is_one_value
from stallscope.events.layout import Array

_ROWS_AT_ONCE = 1 << 10  # of a table of wide rows: they fit the processor's cache
_VALUES_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class RowsInOrder:
    """A table in another order, None for its own order. replaced: columns in that order that replace the table's
    columns. kept: columns of the table that are needed repeatedly.

    Other columns are computed at each access; single rows and selections of rows are copies.
    """

    table: Array | Columns
    order: Array | None
    replaced: Mapping[str, Array]
    kept: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def at(self, which: Any) -> Any:
        """The table indices of some rows, given by an index, a mask or several indices."""
        if self.order is not None:
            return self.order[which]
        is_mask = isinstance(which, np.ndarray) and which.dtype == bool
        return np.flatnonzero(which) if is_mask else which

    def __getitem__(self, which: Any) -> Array:
        """A column by its name, or the rows at an index, a mask, or several indices."""
        if isinstance(which, str):
            known = self.replaced.get(which, self.kept.get(which))
            return taken(self.table[which], self.order) if known is None else known
        rows = _rows(self.table, self.at(which))
        if self.replaced:
            rows = rows.copy()
            for name, column in self.replaced.items():
                rows[name] = column[which]
        return np.asarray(rows) if isinstance(rows, np.ndarray) else rows

    def column(self, name: str, where: Array, element: int | None = None) -> Array:
        """A column of some rows (indices), or one element of an array field. No other column is read."""
        known = self.replaced.get(name, self.kept.get(name))
        if known is not None:
            return known[where] if element is None else known[where, element]
        if element is None:
            return self.table[name][self.at(where)]
        if isinstance(self.table, Columns):
            return self.table.element(name, element)[self.at(where)]
        return self.table[name][:, element][self.at(where)]

    def keeping(self, *names: str, for_rows: Callable[[slice, Array], None] | None = None) -> "RowsInOrder":
        """The same rows with these columns kept. for_rows: see in_order."""
        columns = in_order(self.table, self.order, names, for_rows=for_rows)
        return replace(self, kept={**self.kept, **columns})

    def replacing(self, replaced: Mapping[str, Array]) -> "RowsInOrder":
        """The same rows with columns that replace columns of the table."""
        return replace(self, replaced={**self.replaced, **replaced})


def in_order(
    table: Array | Columns,
    order: Array | None,
    names: tuple[str, ...],
    *,
    for_rows: Callable[[slice, Array], None] | None = None,
) -> dict[str, Array]:
    """Columns of a table in an order. A column with one value takes no memory.

    Wide rows are read once for all columns, a few rows at a time. for_rows: called with the slice of these rows and the
    rows; only for an array of rows.
    """
    if isinstance(table, Columns):
        return {name: _lean(taken(table[name], order)) for name in names}
    columns = {name: np.empty(len(table), table.dtype[name]) for name in names}

    def fill(here: slice) -> None:
        rows = table[here] if order is None else _rows(table, order[here])
        for name, column in columns.items():
            column[here] = rows[name]
        if for_rows is not None:
            for_rows(here, rows)

    in_pieces(len(table), fill, rows_at_once=_ROWS_AT_ONCE)
    return {name: _lean(column) for name, column in columns.items()}


def flagged(flags: Array, flag: int, *, without: int = 0) -> Array:
    """Whether each row has a flag, without another flag: bool (n,); a broadcast value if `flags` is one."""
    few = flags[:1] if is_one_value(flags) else flags
    has_flag = few & flag > 0
    return np.broadcast_to(has_flag & (few & without == 0) if without else has_flag, flags.shape)


def _rows(table: Array | Columns, which: Array) -> Array:
    """The row at an index, or a copy of the rows at several. Copied as bytes: by field it takes five times longer."""
    if isinstance(table, Columns) or not isinstance(which, np.ndarray) or not table.flags.c_contiguous:
        return table[which]
    as_bytes = table.view(np.uint8).reshape(len(table), table.dtype.itemsize)
    return np.take(as_bytes, which, axis=0).view(table.dtype).reshape(len(which))


def taken(column: Array, order: Array | None) -> Array:
    """A column (n,) in an order; the same object if the order is None."""
    if order is None:
        return column
    if is_one_value(column):
        return np.broadcast_to(column[0], (len(order), *column.shape[1:]))
    out = np.empty((len(order), *column.shape[1:]), column.dtype)

    def fill(here: slice) -> None:
        np.take(column, order[here], axis=0, out=out[here], mode="clip")  # mode "raise" would copy

    in_pieces(len(order), fill, rows_at_once=_VALUES_AT_ONCE)
    return out


def _lean(column: Array) -> Array:
    """The column, as a broadcast value if all its values are equal."""
    n, few = len(column), _ROWS_AT_ONCE
    if not n or (column[:few] != column[0]).any() or (n > few and (column != column[0]).any()):
        return column
    return np.broadcast_to(column[0].copy(), (n,))
