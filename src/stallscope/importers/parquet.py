"""Reads Parquet files of other tools: the wanted columns, checked, as numpy arrays."""

import sys
from pathlib import Path
from typing import Any

from stallscope.errors import BadInput, BadTrace, remedy_for_extra

MAX_ROWS = 50_000_000
"""The most rows: a file of a few bytes can claim any number, and no recording is this long."""

MAX_BYTES = 1 << 30
"""The most bytes of a column when unpacked, which a small file can exceed as well."""


def column_names(path: Path) -> set[str]:
    """The columns of a Parquet file, from its footer; empty for other files, or without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with path.open("rb") as stream:
            return set(pq.read_schema(stream).names) if stream.read(4) == b"PAR1" else set()
    except ImportError:
        return set()
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError):
        return set()


def table(path: Path, wanted: tuple[str, ...], *, max_rows: int = MAX_ROWS) -> dict[str, Any]:
    """The wanted columns of a Parquet file as numpy arrays; text columns as arrays of str.

    Raises BadTrace when the file is damaged or too long, or a column is missing, BadInput when pyarrow is not
    installed.
    """
    return {name: _numpy(column) for name, column in _columns(path, wanted, (), max_rows).items()}


def coded(path: Path, name: str, *, max_rows: int = MAX_ROWS, max_bytes: int = 256) -> tuple[Any, list[str]]:
    """A column of few distinct words: int64 (n,), the number of each row's word, and the words.

    The words are not repeated for every row, however long they are. Raises as table(), and BadTrace for a word
    that is longer than max_bytes, missing, or not text.
    """
    column = _columns(path, (name,), (name,), max_rows)[name]
    if not hasattr(column.type, "value_type"):
        raise BadTrace(f"{path}: column {name} does not contain text")
    combined = column.unify_dictionaries().combine_chunks()
    words = combined.dictionary.to_pylist() if _longest(combined.dictionary) <= max_bytes else None
    if words is None or combined.null_count or not all(isinstance(word, str) for word in words):
        raise BadTrace(
            f"{path}: column {name} contains values that are not text of at most {max_bytes} bytes"
        )
    return combined.indices.to_numpy(zero_copy_only=False).astype("int64"), words


def _columns(path: Path, wanted: tuple[str, ...], as_codes: tuple[str, ...], max_rows: int) -> dict[str, Any]:
    """The wanted columns in pyarrow's types. pyarrow does not check text, so invalid UTF-8 is searched for."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise BadInput(f"reading {path.name} needs pyarrow: {remedy_for_extra('import')}") from error
    try:
        with pq.ParquetFile(path, read_dictionary=list(as_codes)) as file:
            _check(file, path, wanted, max_rows)
            trace = file.read(columns=list(wanted))
            trace.validate(full=True)
            return {name: trace.column(name) for name in wanted}
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadTrace(f"{path} is not a readable Parquet file ({reason[:200]}): copy it again") from error


def _check(file: Any, path: Path, wanted: tuple[str, ...], max_rows: int) -> None:
    """Raises BadTrace for a file that lacks columns or would take much memory, before any row is read."""
    missing = [name for name in wanted if name not in file.schema_arrow.names]
    if missing:
        raise BadTrace(f"{path} has no column {', '.join(missing)}: check that it is a recording")
    metadata = file.metadata
    if metadata.num_rows > max_rows:
        raise BadTrace(f"{path} has {metadata.num_rows:,} rows; at most {max_rows:,} rows can be read")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    for name in wanted:
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == name)
        if size > MAX_BYTES:
            raise BadTrace(
                f"{path}: column {name} has {size:,} bytes unpacked; at most {MAX_BYTES:,} bytes can be read"
            )


def _longest(words: Any) -> int:
    """Bytes of the longest word of an array; the largest int for values other than text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return int(pc.max(pc.binary_length(words)).as_py() or 0)
    except pa.ArrowException:
        return sys.maxsize


def _numpy(column: Any) -> Any:
    combined = column.combine_chunks()
    if hasattr(combined, "dictionary_decode"):
        combined = combined.dictionary_decode()
    return combined.to_numpy(zero_copy_only=False)
