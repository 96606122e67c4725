"""Lateness of each rank in each sealed file, for the question `lateness`.

It reads rows also of rounds that were incomplete when they were sealed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.store.hub import views
from stallscope.store.hub.file_sums import FileSums, Split, split
from stallscope.store.hub.journal import Segment

DEFAULT_MIN_LATE_NS = 2_000_000
"""Default threshold for a late arrival: the sums for it are computed in advance."""

NAME = "sealed_lateness"
UNMATCHED = "unmatched"
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
_MAX_ROWS = 2_000_000
"""Cached sums, about 100 bytes each: enough for 30,000 files with 64 ranks, or for 200 files with 10,000 ranks."""


class SealedLateness:
    """Sums by file and threshold. Thread-safe."""

    def __init__(self, folder: Path, sql: str):
        self.by_file = FileSums(folder, sql, _SUMS, _MAX_ROWS)

    def prepare(
        self,
        db: duckdb.DuckDBPyConnection,
        segments: Sequence[Segment],
        params: Mapping[str, Any],
        *,
        is_summed: bool = True,
    ) -> tuple[Segment, ...]:
        """Create the relations sealed_lateness and unmatched; return the files for the view `collectives`.

        is_summed: use the sums of whole files, which hold the rows of all jobs.
        """
        min_late_ns = params.get("min_late_ns")
        if not is_summed or not isinstance(min_late_ns, int):
            files = Split((), tuple(segments))  # the engine reports the missing or wrong parameter
        else:
            files = split(segments, params.get("from_ns"), params.get("to_ns"))
        sums = self.by_file.sums(db, files.whole, {"min_late_ns": min_late_ns or 0})
        db.register(NAME, pa.concat_tables(sums) if sums else _SUMS.empty_table())
        unmatched = [
            segment for segment, each in zip(files.whole, sums, strict=True) if _n_unmatched(each) > 0
        ]
        for statement in views.statements(
            {_TABLE: self.by_file.paths(unmatched)}, {}, only=(_TABLE,), called={_TABLE: f"{UNMATCHED}_rows"}
        ):
            db.execute(statement)
        db.execute(
            f"CREATE OR REPLACE TEMP VIEW {UNMATCHED} AS SELECT * FROM {UNMATCHED}_rows WHERE late_ns IS NULL"
            " AND rank IS NOT NULL AND ts_ns > 0 AND op NOT IN ('send', 'recv')"
            " AND comm_hash IS NOT NULL AND seq IS NOT NULL"
        )
        return files.others


def _n_unmatched(sums: pa.Table) -> int:
    return int(pc.sum(sums["n_unmatched"]).as_py() or 0)
