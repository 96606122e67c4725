"""Rows as Parquet and CSV files."""

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stallscope.errors import BadInput, remedy_for_extra

_BATCH_ROWS = 50_000


def parquet_bytes(columns: Mapping[str, Sequence[object]]) -> bytes:
    """One Parquet file (zstd) of columns of equal length; the same rows give the same bytes.

    A column has the type that fits its values, or text for values of several types. Raises BadInput when pyarrow is
    not installed.
    """
    pa = arrow()
    import pyarrow.parquet as pq

    table = pa.table({name: _column(pa, values) for name, values in columns.items()})
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def arrow() -> Any:
    """pyarrow. Raises BadInput with the remedy when pyarrow is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise BadInput(
            f"Parquet needs pyarrow: {remedy_for_extra('import')}, or choose --format csv"
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


def write_table(path: Path, columns: Mapping[str, str], rows: Iterable[tuple[object, ...]]) -> int:
    """Rows as a CSV or Parquet file, by the name's suffix. Returns the number of rows. Raises BadInput without pyarrow.

    columns: SQL type by name, INTEGER or TEXT. Memory use does not grow with the rows.
    """
    batches = _batches(rows)
    return (_write_parquet if path.suffix == ".parquet" else _write_csv)(path, columns, batches)


def _batches(rows: Iterable[tuple[object, ...]]) -> Iterator[list[tuple[object, ...]]]:
    source = iter(rows)
    while batch := list(itertools.islice(source, _BATCH_ROWS)):
        yield batch


def _write_csv(path: Path, columns: Mapping[str, str], batches: Iterator[list[tuple[object, ...]]]) -> int:
    n_rows = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for batch in batches:
            writer.writerows(batch)
            n_rows += len(batch)
    return n_rows


def _write_parquet(
    path: Path, columns: Mapping[str, str], batches: Iterator[list[tuple[object, ...]]]
) -> int:
    pa = arrow()
    import pyarrow.parquet as pq

    schema = pa.schema(
        [(name, pa.string() if kind == "TEXT" else pa.int64()) for name, kind in columns.items()]
    )
    n_rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            arrays = [
                pa.array(values, kind)
                for values, kind in zip(zip(*batch, strict=True), schema.types, strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=schema))
            n_rows += len(batch)
    return n_rows
