"""Small tables that the hub maintains itself (schema.KEPT), in memory for queries: rows are replaced by key."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stallscope.store.hub import schema

_BETWEEN = "\x1f"


def with_latest(name: str, rows: pa.Table, pieces: Sequence[pa.Table]) -> pa.Table:
    """The rows of a maintained table after an update, in order: rows with the same key are replaced.

    rows, pieces: all columns of the table.
    """
    for piece in pieces:
        is_old = pc.is_in(_keys(name, rows), _keys(name, piece))
        rows = pa.concat_tables([rows.filter(pc.invert(is_old)), piece])
    return rows


def _keys(name: str, rows: pa.Table) -> Any:
    """One text per row that identifies it by its key."""
    columns = [pc.fill_null(rows[column], "") for column in schema.TABLES[name].key]
    return pc.binary_join_element_wise(*columns, _BETWEEN).combine_chunks()
