"""Reads a table from the pages of a SQLite database, thousands of rows at once.

sqlite3 makes a Python object of each value, which takes several times as long as these array operations. The pages
are a copy that SQLite makes inside the reader's transaction, so they show the same rows as its queries.
File format: https://www.sqlite.org/fileformat2.html, sections 1.5 (pages), 1.6 (b-trees) and 2.1 (records).

Anything unexpected in a page makes rows() return None: the caller then asks SQLite, which reads every file that it
wrote and describes damage in its own words.
"""

import sqlite3

import numpy as np

from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.store import sqlite_columns

_PAGES_AT_ONCE = 512
"""Leaf pages per operation: their values stay in the processor's cache."""

_INTERIOR, _LEAF = 5, 13
_REAL, _MAX_INTEGER_TYPE, _EMPTY_TEXT = 7, 9, 13
_SIZES = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0, *((n - 12) // 2 for n in range(12, 128))], np.int64)
"""Bytes of a value by its serial type; longer texts have types of two bytes."""
_WITHOUT_BYTES = np.array([UNKNOWN, 0, 0, 0, 0, 0, 0, 0, 0, 1], np.int64)
"""The value of a serial type whose values take no bytes."""


def copy_of(db: sqlite3.Connection) -> "Pages | None":
    """The pages of a database as the connection's transaction shows them; None where SQLite cannot copy them."""
    serialize = getattr(db, "serialize", None)
    return Pages(np.frombuffer(serialize(name="main"), np.uint8)) if serialize else None


class Pages:
    """The pages of a database."""

    def __init__(self, data: Array):
        self.data = data
        page_bytes = int.from_bytes(data[16:18].tobytes(), "big")
        self.page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
        self.usable_bytes = self.page_bytes - int(data[20])
        self._u2 = np.ndarray(len(data) - 1, ">u2", data, strides=(1,))
        self._u4 = np.ndarray(len(data) - 3, ">u4", data, strides=(1,))
        self._i8 = np.ndarray(len(data) - 7, "<i8", data, strides=(1,))

    def rows(self, db: sqlite3.Connection, table: Table) -> Array | None:
        """All rows of a table, in order of their ids; None if a page or a value is unexpected."""
        names = [row[1] for row in db.execute(f"PRAGMA main.table_info({table.name})")]
        root = db.execute("SELECT rootpage FROM main.sqlite_master WHERE name = ?", (table.name,)).fetchone()
        if names[:1] != ["id"] or set(names[1:]) != set(sqlite_columns.column_names(table)):
            return None
        try:
            leaves = self._leaves(int(root[0]))
            n_cells = self._u2[leaves + 3].astype(np.int64)
            if n_cells.max() * len(names) > self.page_bytes:
                return None
            flat = sqlite_columns.flat_rows(table, int(n_cells.sum()))
            nullable = sqlite_columns.nullable_names(table)
            end = 0
            for start in range(0, len(leaves), _PAGES_AT_ONCE):
                group = slice(start, start + _PAGES_AT_ONCE)
                begin, end = end, end + int(n_cells[group].sum())
                if not self._decode(leaves[group], n_cells[group], names, nullable, flat[begin:end]):
                    return None
        except IndexError:  # a page or a cell beyond the end of the file
            return None
        return sqlite_columns.structured(table, flat)

    def _leaves(self, root: int) -> Array:
        """The offsets of a table's leaf pages, in order. Raises IndexError for pages that are not a b-tree."""
        level = np.array([(root - 1) * self.page_bytes])
        for _ in range(20):  # the b-tree of the largest file is less deep
            kinds = self.data[level]
            if (kinds == _LEAF).all():
                return level
            if not (kinds == _INTERIOR).all():
                break
            level = np.concatenate([self._children(int(page)) for page in level])
            if level.min() <= 0 or len(level) * self.page_bytes > len(self.data):
                break
        raise IndexError("not a b-tree")

    def _children(self, page: int) -> Array:
        slots = page + 12 + 2 * np.arange(int(self._u2[page + 3]))
        cells = page - page % self.page_bytes + self._u2[slots].astype(np.int64)
        numbers = np.append(self._u4[cells], self._u4[page + 8])
        return (numbers.astype(np.int64) - 1) * self.page_bytes

    def _decode(
        self, leaves: Array, n_cells: Array, names: list[str], nullable: frozenset[str], out: Array
    ) -> bool:
        """Write the rows of some leaf pages to `out`. Returns whether all values are as expected."""
        if not len(out):
            return True
        at = self._records(leaves, n_cells)
        if at is None or not (self.data[at] == len(names) + 1).all():
            return False
        header = np.lib.stride_tricks.sliding_window_view(self.data, len(names))[at + 1]
        types_of = np.ascontiguousarray(header.T)
        if types_of.max() >= len(_SIZES):
            return False
        ends = at + 1 + len(names)
        for name, types in zip(names[1:], types_of[1:], strict=True):
            column = out[name]
            is_text = column.dtype.kind == "S"
            if not (_are_texts(types) if is_text else _are_integers(types, name in nullable)):
                return False
            values = self._texts(types, ends, column.itemsize) if is_text else self._values(types, ends)
            column[:] = values
            if column.itemsize < 8 and not (column == values).all():
                return False
        return True

    def _records(self, leaves: Array, n_cells: Array) -> Array | None:
        """The offset of each row's record; None if a record continues on another page."""
        of_page = np.repeat(leaves, n_cells)
        first = np.cumsum(n_cells) - n_cells
        slots = of_page + 8 + 2 * (np.arange(len(of_page)) - np.repeat(first, n_cells))
        at = of_page - of_page % self.page_bytes + self._u2[slots]
        high = self.data[at].astype(np.int64)
        is_long = high > 127
        n_bytes = np.where(is_long, (high & 127) << 7 | self.data[at + is_long], high)
        at = at + 1 + is_long
        if (is_long & (self.data[at - 1] > 127)).any() or (n_bytes > self.usable_bytes - 35).any():
            return None
        is_in_id = np.ones(len(at), bool)
        for _ in range(9):
            is_in_id &= self.data[at] > 127
            at = at + is_in_id
        return at + 1

    def _values(self, types: Array, ends: Array) -> Array:
        """The values of a column. Moves `ends`, the end of the preceding column, to the end of the column."""
        is_uniform = (types == types[0]).all()
        sizes = _SIZES[types[0]] if is_uniform else _SIZES[types]
        has_bytes = sizes > 0
        if not has_bytes.any():
            return _WITHOUT_BYTES[types[:1]] if is_uniform else _WITHOUT_BYTES[types]
        ends += sizes
        shift = 64 - 8 * sizes
        values = self._i8[ends - 8].byteswap(inplace=True) << shift >> shift
        return values if has_bytes.all() else np.where(has_bytes, values, _WITHOUT_BYTES[types])

    def _texts(self, types: Array, ends: Array, n_bytes: int) -> Array:
        """As _values(), for a column of texts."""
        sizes = _SIZES[types]
        byte_index = np.arange(n_bytes)
        slots = np.minimum(ends[:, None] + byte_index, len(self.data) - 1)
        ends += sizes
        return (self.data[slots] * (byte_index < sizes[:, None])).view(f"S{n_bytes}")[:, 0]


def _are_texts(types: Array) -> bool:
    return bool((types % 2 == 1).all() and (types >= _EMPTY_TEXT).all())


def _are_integers(types: Array, may_be_null: bool) -> bool:
    return bool(types.max() <= _MAX_INTEGER_TYPE and (types != _REAL).all() and (may_be_null or types.all()))
