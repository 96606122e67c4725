"""Reading Parquet files from outside: the wanted columns, checked, as numpy arrays."""

from pathlib import Path
from typing import Any

from stallscope.errors import BadInput, BadTrace


def table(path: Path, wanted: tuple[str, ...]) -> dict[str, Any]:
    """The wanted columns of a Parquet file as numpy arrays; text columns as arrays of str.

    Raises BadTrace when the file is damaged or a column is missing, BadInput when pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise BadInput(f"reading {path.name} needs pyarrow: pip install 'stallscope[import]'") from error
    try:
        found = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadTrace(f"{path} is no readable Parquet file ({reason}): copy it again") from error
    missing = [name for name in wanted if name not in found.column_names]
    if missing:
        raise BadTrace(
            f"{path} has no column {', '.join(missing)}: is it a recording of the documented kind?"
        )
    return {name: _numpy(found.column(name)) for name in wanted}


def _numpy(column: Any) -> Any:
    combined = column.combine_chunks()
    if hasattr(combined, "dictionary_decode"):
        combined = combined.dictionary_decode()
    return combined.to_numpy(zero_copy_only=False)
