"""Lateness of each rank in each sealed file: computed once per file, because a file never changes.

The question `lateness` uses these sums for every file that is entirely in its window. It reads rows only of the files
at the window's edges, of rounds that were incomplete when they were sealed, and of the hot rows.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.store.hub import views
from stallscope.store.hub.journal import Segment

USUAL_MIN_LATE_NS = 2_000_000
"""Default threshold for a late arrival: the sums for it are computed in advance."""

NAME = "sealed_lateness"
UNMATCHED = "unmatched"
_FILES = "sealed_files"
_TABLE = "collectives"
_SUMS = pa.schema(
    [
        ("cluster_id", pa.string()),
        ("node_id", pa.string()),
        ("rank", pa.int32()),
        ("n_rounds", pa.int64()),
        ("late_ns", pa.decimal128(38, 0)),
        ("max_late_ns", pa.int64()),
        ("n_late", pa.int64()),
        ("n_unmatched", pa.int64()),
    ]
)
_MOST_ROWS = 2_000_000
"""Cached sums, about 100 bytes each: enough for 30,000 files with 64 ranks, or for 200 files with 10,000 ranks."""


@dataclass(frozen=True)
class Split:
    """Sealed files of one query: files entirely in its window, and the other files."""

    whole: tuple[Segment, ...]
    others: tuple[Segment, ...]


@dataclass
class SealedLateness:
    """Sums by file and threshold; the least recently used are dropped first. Thread-safe."""

    folder: Path
    sql: str
    most_rows: int = _MOST_ROWS
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: "OrderedDict[tuple[str, int], pa.Table]" = field(default_factory=OrderedDict)
    _n_rows: int = 0

    def prepare(
        self, db: duckdb.DuckDBPyConnection, segments: Sequence[Segment], params: Mapping[str, Any]
    ) -> tuple[Segment, ...]:
        """Create the relations sealed_lateness and unmatched; return the files for the view `collectives`."""
        min_late_ns = params.get("min_late_ns")
        if not isinstance(min_late_ns, int):
            files = Split((), tuple(segments))  # the engine reports the missing or wrong parameter
        else:
            files = split(segments, params.get("from_ns"), params.get("to_ns"))
        sums = self.sums(db, files.whole, min_late_ns or 0)
        db.register(NAME, pa.concat_tables(sums) if sums else _SUMS.empty_table())
        unmatched = [
            segment for segment, each in zip(files.whole, sums, strict=True) if _n_unmatched(each) > 0
        ]
        for statement in views.statements(
            {_TABLE: self._paths(unmatched)}, {}, only=(_TABLE,), called={_TABLE: f"{UNMATCHED}_rows"}
        ):
            db.execute(statement)
        db.execute(
            f"CREATE OR REPLACE TEMP VIEW {UNMATCHED} AS SELECT * FROM {UNMATCHED}_rows WHERE late_ns IS NULL"
            " AND rank IS NOT NULL AND ts_ns > 0 AND op NOT IN ('send', 'recv')"
            " AND comm_hash IS NOT NULL AND seq IS NOT NULL"
        )
        return files.others

    def sums(
        self, db: duckdb.DuckDBPyConnection, segments: Sequence[Segment], min_late_ns: int
    ) -> list[pa.Table]:
        """The sums of each file; unknown sums are computed with db, all in one pass."""
        with self._lock:
            known = {path: self._known.get((path, min_late_ns)) for path in (s.path for s in segments)}
            for path, sums in known.items():
                if sums is not None:
                    self._known.move_to_end((path, min_late_ns))
        new = [segment for segment in segments if known[segment.path] is None]
        fresh = self._computed(db, new, min_late_ns) if new else {}
        self._keep(fresh, min_late_ns)
        return [known[s.path] if known[s.path] is not None else fresh[s.path] for s in segments]

    def missing(self, segments: Sequence[Segment], min_late_ns: int) -> list[Segment]:
        """Files without known sums, newest first; none once the memory for sums is used up."""
        with self._lock:
            if self._n_rows >= self.most_rows // 2:
                return []
            return [s for s in reversed(segments) if (s.path, min_late_ns) not in self._known]

    def forget(self, segments: Sequence[Segment]) -> None:
        """Drop the sums of removed files."""
        gone = {segment.path for segment in segments}
        with self._lock:
            for key in [key for key in self._known if key[0] in gone]:
                self._n_rows -= len(self._known.pop(key))

    def _keep(self, fresh: Mapping[str, pa.Table], min_late_ns: int) -> None:
        with self._lock:
            for path, sums in fresh.items():
                if (path, min_late_ns) not in self._known:
                    self._n_rows += len(sums)
                self._known[path, min_late_ns] = sums
            while self._n_rows > self.most_rows:
                self._n_rows -= len(self._known.popitem(last=False)[1])

    def _computed(
        self, db: duckdb.DuckDBPyConnection, segments: Sequence[Segment], min_late_ns: int
    ) -> dict[str, pa.Table]:
        paths = self._paths(segments)
        listed = ", ".join(views.quoted(path) for path in paths)
        db.execute(
            f"CREATE OR REPLACE TEMP VIEW {_FILES} AS"
            f" SELECT * RENAME (filename AS path) FROM read_parquet([{listed}], filename = true)"
        )
        sums = db.sql(self.sql, params={"min_late_ns": min_late_ns}).to_arrow_table()
        return {
            segment.path: sums.filter(pc.equal(sums["path"], path)).select(_SUMS.names).cast(_SUMS)
            for segment, path in zip(segments, paths, strict=True)
        }

    def _paths(self, segments: Sequence[Segment]) -> list[str]:
        return [str(self.folder / segment.path) for segment in segments]


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


def _n_unmatched(sums: pa.Table) -> int:
    return int(pc.sum(sums["n_unmatched"]).as_py() or 0)
