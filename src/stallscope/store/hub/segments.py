"""Sealed segments: Parquet files, one folder per tenant and table, each file either complete or absent."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import StorageFailed
from stallscope.store.hub import schema, views
from stallscope.store.hub.journal import Segment, line

FOLDER = "segments"
_PART = ".part"
_NAME = re.compile(r"^(\d+)-\d+(-[0-9a-f]+)?\.parquet$")  # earlier versions wrote names without the columns
_FORM = "PARQUET_VERSION V2, COMPRESSION zstd, COMPRESSION_LEVEL 1"
"""Running sums and times as differences (DELTA_BINARY_PACKED): smaller, and faster to write and read, than plain values
with zstd level 3."""

_LAST_NS = pa.scalar((1 << 63) - 1, pa.int64())
_ROW_GROUP = 65_536
"""Rows per row group, the unit that queries skip by time: a few minutes of a large job."""


class Sealer:
    """Writes segments with a separate engine. For one thread at a time."""

    def __init__(self, folder: Path, *, prefix: str = "", memory_bytes: int = 1 << 30):
        """prefix: of the name of each file."""
        self.folder, self._prefix, self._number = folder, prefix, 0
        self.max_sorted_bytes = memory_bytes // 3
        self._db = duckdb.connect(
            config={
                "memory_limit": f"{memory_bytes}B",
                "threads": 1,
                "temp_directory": str(folder / "spill"),
                "preserve_insertion_order": False,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        self._db.execute("SET enable_progress_bar = false")  # it would write to the hub's output

    def close(self) -> None:
        """Release the engine's memory."""
        self._db.close()

    @property
    def db(self) -> duckdb.DuckDBPyConnection:
        """The engine: relations registered with it can be sealed."""
        return self._db

    def sealed_table(self, tenant: str, table: str, rows: pa.Table, *, sealed_us: int) -> Segment:
        """Write rows as a new segment, ordered by time. Raises StorageFailed.

        Rows of at most max_sorted_bytes are sorted here: the engine sorts a table of dozens of columns as slowly as it
        writes it, but within its memory limit.
        """
        is_small = rows.nbytes <= self.max_sorted_bytes
        self._db.register("rows_to_seal", _in_order_of_time(rows) if is_small else rows)
        try:
            select = "SELECT * FROM rows_to_seal"
            return self.sealed(tenant, table, select=select, sealed_us=sealed_us, is_in_order=is_small)
        finally:
            self._db.unregister("rows_to_seal")

    def sealed(
        self, tenant: str, table: str, *, select: str, sealed_us: int, is_in_order: bool = False
    ) -> Segment:
        """Write the rows of a query as a new segment, ordered by time, and sync it to disk. Raises StorageFailed.

        select: a query with the table's columns, over relations registered with `db`. is_in_order: it scans rows in
        order of time; the engine's only thread writes them as it reads them.
        """
        order = "" if is_in_order else " ORDER BY ts_ns"
        columns = ", ".join(schema.TABLES[table].names)
        path = self._fresh_path(tenant, table, sealed_us)
        part = path.with_suffix(_PART)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db.execute(
                f"COPY (SELECT {columns} FROM ({select}){order}) TO {views.quoted(str(part))}"
                f" (FORMAT parquet, {_FORM}, ROW_GROUP_SIZE {_ROW_GROUP})"
            ).fetchall()
            _synced(part)
            part.rename(path)
            for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
                _synced(folder)
            ((n_rows, min_ts_ns, max_ts_ns),) = self._db.execute(
                f"SELECT count(*), min(ts_ns), max(ts_ns) FROM read_parquet({views.quoted(str(path))})"
            ).fetchall()
        except (duckdb.Error, OSError) as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise StorageFailed(f"cannot write {path}: {line(error)}; check free space") from error
        relative_path = str(path.relative_to(self.folder))
        return Segment(
            tenant, table, relative_path, n_rows, path.stat().st_size, min_ts_ns, max_ts_ns, sealed_us
        )

    def merged(self, segments: Sequence[Segment]) -> Segment:
        """Merge the rows of several segments of the same tenant and table into one. Raises StorageFailed."""
        first = segments[0]
        latest_us = max(segment.sealed_us for segment in segments)
        select = views.sealed_rows(first.table, [str(self.folder / segment.path) for segment in segments])
        return self.sealed(first.tenant, first.table, select=select, sealed_us=latest_us)

    def _fresh_path(self, tenant: str, table: str, sealed_us: int) -> Path:
        """A name that no file has or had: a file that was removed here may still be in a bucket."""
        folder = self.folder / FOLDER / quote(tenant, safe="") / table
        columns = views.fingerprint(table)
        while (path := folder / f"{self._prefix}{sealed_us}-{self._number}-{columns}.parquet").exists():
            self._number += 1
        self._number += 1
        return path


def _in_order_of_time(rows: pa.Table) -> pa.Table:
    """The rows by ts_ns, rows without a time last; equal times keep their order."""
    ts_ns = np.asarray(pc.fill_null(rows["ts_ns"], _LAST_NS))
    if (ts_ns[1:] >= ts_ns[:-1]).all():
        return rows
    return rows.take(pa.array(np.argsort(ts_ns, kind="stable")))


def remove_orphans(folder: Path, known: Sequence[Segment], *, latest_us: int) -> list[Path]:
    """Remove unlisted files: from a seal or a merge that a crash interrupted, or replaced files.

    latest_us: the newest commit in the journal. Returns the files that remain: a file that was sealed after it, or is
    not named like a sealed file, is not in the list because the list is older than the file.
    """
    lost = []
    for path in orphans(folder, known):
        if path.suffix == _PART or ((sealed_us := sealed_at_us(path)) is not None and sealed_us <= latest_us):
            path.unlink(missing_ok=True)
        else:
            lost.append(path)
    return lost


def sealed_at_us(path: Path) -> int | None:
    """The newest commit in a sealed file, by its name; None for a foreign file."""
    match = _NAME.search(path.name)
    return int(match[1]) if match else None


def found_again(folder: Path, path: Path) -> Segment | None:
    """The entry for the list of a file that it lacks; None for a file that is not a readable segment."""
    parts = path.relative_to(folder / FOLDER).parts
    sealed_us = sealed_at_us(path)
    if len(parts) != 3 or parts[1] not in schema.TABLES or sealed_us is None:
        return None
    try:
        with duckdb.connect() as db:
            ((n_rows, min_ts_ns, max_ts_ns),) = db.execute(
                f"SELECT count(*), min(ts_ns), max(ts_ns) FROM read_parquet({views.quoted(str(path))})"
            ).fetchall()
    except duckdb.Error:
        return None
    return Segment(
        unquote(parts[0]),
        parts[1],
        str(path.relative_to(folder)),
        n_rows,
        path.stat().st_size,
        min_ts_ns,
        max_ts_ns,
        sealed_us,
    )


def orphans(folder: Path, known: Sequence[Segment]) -> list[Path]:
    """Segment files that no list contains."""
    wanted = {folder / segment.path for segment in known}
    return [
        path
        for path in (folder / FOLDER).rglob("*")
        if path.suffix in (".parquet", _PART) and path not in wanted
    ]


def _synced(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
