"""The time ledger of each process in each sealed file, for the question `rank_ledgers`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from stallscope.events.names import CATEGORY_NAMES
from stallscope.store.hub.file_sums import FileSums, Split, split
from stallscope.store.hub.journal import Segment

NAME = "sealed_ledgers"
_SUMS = pa.schema(
    [
        ("cluster_id", pa.string()),
        ("node_id", pa.string()),
        ("pid", pa.int64()),
        ("rank", pa.int32()),
        *((name, pa.int64()) for name in ("n_rounds", "first_ns", "last_ns")),
        *((f"{end}_{name}_ns", pa.int64()) for name in CATEGORY_NAMES for end in ("least", "most")),
    ]
)
_MAX_ROWS = 500_000
"""Cached sums, about 350 bytes each."""


class SealedLedgers:
    """Sums by file. Thread-safe."""

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
        """Create the relation sealed_ledgers; return the files for the view `collectives`.

        is_summed: use the sums of whole files, which hold the rows of all jobs.
        """
        files = split(segments, params.get("from_ns"), params.get("to_ns"))
        files = files if is_summed else Split((), tuple(segments))
        sums = self.by_file.sums(db, files.whole)
        db.register(NAME, pa.concat_tables(sums) if sums else _SUMS.empty_table())
        return files.others
