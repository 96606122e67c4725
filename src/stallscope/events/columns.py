"""A table stored column by column, for traces too large to be stored as rows.

It is indexed like an array of rows: a name selects a column; an index, a mask or several indices select rows. A
field without a stored column has one value in all rows: unknown, or zero. A column that holds the same
value in all rows also takes no memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stallscope.events.layout import Array, Table, dtype, empty


@dataclass(frozen=True, eq=False)  # arrays do not compare to a bool: equality is identity
class Columns:
    """n rows of a table. held: columns (n,) by field; a field that is an array of k has a tuple of k columns.

    Raises ValueError for a field that the table does not have.
    """

    table: Table
    n: int
    held: Mapping[str, Array | tuple[Array, ...]]

    def __len__(self) -> int:
        return self.n

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an array of the same rows."""
        return dtype(self.table)

    def __getitem__(self, which: Any) -> Array:
        """A column by its name, or a copy of the rows at an index, a mask, or several indices."""
        if isinstance(which, str):
            column = self.held.get(which)
            return np.stack(column, axis=1) if isinstance(column, tuple) else self._column(which, column)
        if isinstance(which, (int, np.integer)):
            return np.asarray(self[np.array([which])])[0]
        rows = np.arange(self.n)[which] if isinstance(which, slice) or which.dtype == bool else which
        out = empty(self.table, len(rows))
        for name, column in self.held.items():
            if isinstance(column, tuple):
                for i, part in enumerate(column):
                    out[name][:, i] = part[rows]
            else:
                out[name] = column[rows]
        return out

    def element(self, name: str, i: int) -> Array:
        """The i-th element of an array field, as a column."""
        column = self.held.get(name)
        return column[i] if isinstance(column, tuple) else self._column(name, column)[:, i]

    def _column(self, name: str, column: Array | None) -> Array:
        if column is not None:
            return column
        value = empty(self.table, 1)[name][0]
        return np.broadcast_to(value, (self.n, *np.shape(value)))


def is_one_value(column: Array) -> bool:
    """Whether the layout shows a column as one value repeated n times, so that it need not be scanned."""
    return len(column) > 0 and column.strides[0] == 0
