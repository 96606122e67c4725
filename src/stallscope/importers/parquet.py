"""Reading Parquet files from outside: the wanted columns, checked, as numpy arrays."""

from pathlib import Path
from typing import Any

from stallscope.errors import BadInput, BadTrace

MOST_ROWS = 50_000_000
"""A file of a few bytes can claim any number of rows; nobody reads one this long by importing it."""


def column_names(path: Path) -> set[str]:
    """The columns of a Parquet file, from its footer; empty when it is none, or pyarrow is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with path.open("rb") as stream:
            return set(pq.read_schema(stream).names) if stream.read(4) == b"PAR1" else set()
    except ImportError:
        return set()
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError):
        return set()


def table(path: Path, wanted: tuple[str, ...], *, most_rows: int = MOST_ROWS) -> dict[str, Any]:
    """The wanted columns of a Parquet file as numpy arrays; text columns as arrays of str.

    Raises BadTrace when the file is damaged or too long, or a column is missing, BadInput when pyarrow is not
    installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise BadInput(f"reading {path.name} needs pyarrow: pip install 'stallscope[import]'") from error
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in wanted if name not in file.schema_arrow.names]
            if missing:
                raise BadTrace(
                    f"{path} has no column {', '.join(missing)}: is it a recording of the documented kind?"
                )
            if file.metadata.num_rows > most_rows:
                raise BadTrace(
                    f"{path} has {file.metadata.num_rows:,} rows, at most {most_rows:,} can be read"
                )
            found = file.read(columns=list(wanted))
            return {name: _numpy(found.column(name)) for name in wanted}
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadTrace(f"{path} is no readable Parquet file ({reason[:200]}): copy it again") from error


def _numpy(column: Any) -> Any:
    combined = column.combine_chunks()
    if hasattr(combined, "dictionary_decode"):
        combined = combined.dictionary_decode()
    return combined.to_numpy(zero_copy_only=False)
