"""Rows as Parquet, for whatever reads that."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from stallscope.errors import BadInput


def parquet_bytes(columns: Mapping[str, Sequence[object]]) -> bytes:
    """One Parquet file (zstd) of columns of equal length; the same rows give the same bytes.

    A column is of the type that fits its values; of text where they are of several. Raises BadInput when pyarrow is
    not installed.
    """
    pa = arrow()
    import pyarrow.parquet as pq

    table = pa.table({name: _column(pa, values) for name, values in columns.items()})
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def arrow() -> Any:
    """pyarrow. Raises BadInput with what to do when it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise BadInput(
            "Parquet needs pyarrow: pip install 'stallscope[import]', or choose --format csv"
        ) from None
    return pyarrow


def _column(pa: Any, values: Sequence[object]) -> Any:
    known = {type(value) for value in values if value is not None}
    if not known or known == {int}:
        return pa.array(values, pa.int64())
    if known <= {int, float}:
        return pa.array([value if value is None else float(str(value)) for value in values], pa.float64())
    if len(known) == 1:
        return pa.array(values)
    return pa.array([value if value is None else str(value) for value in values], pa.string())
