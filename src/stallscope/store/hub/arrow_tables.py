"""Concatenates and splits tables. Empty columns are not copied: most senders fill few of a table's columns."""

from collections.abc import Sequence
from functools import cache

import pyarrow as pa

_SHARED_NULLS = 1 << 17


def nulls(n: int, kind: pa.DataType) -> pa.Array:
    """n NULLs of a type: a view of memory that all empty columns share."""
    array = _nulls().get(kind.id)
    return array.slice(0, n) if array is not None and n <= _SHARED_NULLS else pa.nulls(n, kind)


@cache
def constant(value: str | int) -> pa.Scalar:
    """A value with its type, for Arrow's functions.

    For a plain Python value pyarrow (26, `InferArrowType`) imports the module dateutil, and where that is not installed
    the search for it costs more than most functions on a small request.
    """
    return pa.scalar(value, pa.string() if isinstance(value, str) else pa.int64())


def repeated(text: str | None, n: int) -> pa.Array:
    """A text, repeated n times."""
    return pa.repeat(pa.scalar(text, pa.string()), n)


@cache
def _nulls() -> dict[int, pa.Array]:
    """NULLs of the column types, by type id: a type object is slow as a key."""
    kinds = (pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_())
    return {kind.id: pa.nulls(_SHARED_NULLS, kind) for kind in kinds}


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables with the same columns as one table with contiguous columns; empty columns are not copied."""
    whole = pa.concat_tables(tables)
    columns = [
        nulls(len(whole), values.type)
        if values.null_count == len(whole)
        else values.chunk(0)
        if values.num_chunks == 1
        else values.combine_chunks()
        for values in whole.columns
    ]
    return pa.Table.from_arrays(columns, schema=whole.schema)
