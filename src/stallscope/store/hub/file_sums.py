"""Sums over each sealed file of collectives: computed once per file, because a file never changes.

A question uses the sums of every file that is entirely in its window, and reads rows only of the files at the window's
edges and of the hot rows.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.store.hub import views
from stallscope.store.hub.journal import Segment

_FILES = "sealed_files"
_TABLE = "collectives"


@dataclass(frozen=True)
class Split:
    """Sealed files of one query: files entirely in its window, and the other files."""

    whole: tuple[Segment, ...]
    others: tuple[Segment, ...]


@dataclass
class FileSums:
    """The answers of a question by file and parameters; the least recently used are dropped first. Thread-safe.

    sql: a question over `sealed_files`, with the column `path`. schema: its other columns. max_rows: kept in memory.
    """

    folder: Path
    sql: str
    schema: pa.Schema
    max_rows: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: "OrderedDict[tuple[str, tuple[int, ...]], pa.Table]" = field(default_factory=OrderedDict)
    _n_rows: int = 0

    def sums(
        self,
        db: duckdb.DuckDBPyConnection,
        segments: Sequence[Segment],
        params: Mapping[str, int] | None = None,
    ) -> list[pa.Table]:
        """The sums of each file; unknown sums are computed with db, all in one pass."""
        params = params or {}
        values = tuple(params.values())
        with self._lock:
            known = {path: self._known.get((path, values)) for path in (s.path for s in segments)}
            for path, sums in known.items():
                if sums is not None:
                    self._known.move_to_end((path, values))
        new = [segment for segment in segments if known[segment.path] is None]
        fresh = self._computed(db, new, params) if new else {}
        self._keep(fresh, values)
        return [known[s.path] if known[s.path] is not None else fresh[s.path] for s in segments]

    def missing(self, segments: Sequence[Segment], params: Mapping[str, int] | None = None) -> list[Segment]:
        """Files without known sums, newest first; none once the memory for sums is used up."""
        values = tuple((params or {}).values())
        with self._lock:
            if self._n_rows >= self.max_rows // 2:
                return []
            return [s for s in reversed(segments) if (s.path, values) not in self._known]

    def forget(self, segments: Sequence[Segment]) -> None:
        """Drop the sums of removed files."""
        gone = {segment.path for segment in segments}
        with self._lock:
            for key in [key for key in self._known if key[0] in gone]:
                self._n_rows -= len(self._known.pop(key))

    def paths(self, segments: Sequence[Segment]) -> list[str]:
        """The paths of files."""
        return [str(self.folder / segment.path) for segment in segments]

    def _keep(self, fresh: Mapping[str, pa.Table], values: tuple[int, ...]) -> None:
        with self._lock:
            for path, sums in fresh.items():
                if (path, values) not in self._known:
                    self._n_rows += len(sums)
                self._known[path, values] = sums
            while self._n_rows > self.max_rows:
                self._n_rows -= len(self._known.popitem(last=False)[1])

    def _computed(
        self, db: duckdb.DuckDBPyConnection, segments: Sequence[Segment], params: Mapping[str, int]
    ) -> dict[str, pa.Table]:
        paths = self.paths(segments)
        listed = ", ".join(views.quoted(path) for path in paths)
        db.execute(
            f"CREATE OR REPLACE TEMP VIEW {_FILES} AS"
            f" SELECT * RENAME (filename AS path) FROM read_parquet([{listed}], filename = true)"
        )
        sums = db.sql(self.sql, params=dict(params)).to_arrow_table()
        return {
            segment.path: sums.filter(pc.equal(sums["path"], path))
            .select(self.schema.names)
            .cast(self.schema)
            for segment, path in zip(segments, paths, strict=True)
        }


def split(segments: Sequence[Segment], from_ns: int | None, to_ns: int | None) -> Split:
    """Files entirely in a window, and files with rows inside and outside of it. Files outside are left out."""
    whole, others = [], []
    for segment in segments:
        first_ns, last_ns = segment.min_ts_ns, segment.max_ts_ns
        if first_ns is None or last_ns is None:
            continue  # rows without a time
        if (from_ns is None or first_ns >= from_ns) and (to_ns is None or last_ns < to_ns):
            whole.append(segment)
        elif (from_ns is None or last_ns >= from_ns) and (to_ns is None or first_ns < to_ns):
            others.append(segment)
    return Split(tuple(whole), tuple(others))
