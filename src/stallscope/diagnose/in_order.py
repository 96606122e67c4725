"""The rows of a table in another order, column by column: a table of millions of wide rows is not copied."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stallscope.events.layout import Array


@dataclass(frozen=True, eq=False)
class RowsInOrder:
    """A structured array seen in an order. made: columns in that order, which stand for the table's own.

    Other columns are made each time they are asked for; single rows and selections of them are copies.
    """

    table: Array
    order: Array
    made: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, which: Any) -> Array:
        """A column by its name; else the rows at an index, a mask, or several indices."""
        if isinstance(which, str):
            return self.made[which] if which in self.made else self.table[which][self.order]
        rows = self.table[self.order[which]]
        if self.made:
            rows = rows.copy()
            for name, column in self.made.items():
                rows[name] = column[which]
        return np.asarray(rows) if isinstance(rows, np.ndarray) else rows

    def column(self, name: str, where: Array) -> Array:
        """One column of some rows (indices): nothing else of them is touched."""
        return self.made[name][where] if name in self.made else self.table[name][self.order[where]]
