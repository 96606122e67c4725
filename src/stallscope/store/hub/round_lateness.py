"""Lateness of each rank, set when its rows are sealed: arrival minus the median arrival of its round.

A round is computed when all its ranks are hot. If only some of its rows are sealed now, the median is stored (in the
journal, in the same transaction) for the rows that are sealed later. Lateness is by the senders' clocks: clock offsets
between machines are not corrected here.
"""

from collections.abc import Sequence

import duckdb
import numpy as np
import pyarrow as pa

from stallscope.events.layout import Array

_KEY = "coalesce(cluster_id, '') AS cluster_id, comm_hash, seq"
_MATCHED = "comm_hash IS NOT NULL AND seq IS NOT NULL AND op NOT IN ('send', 'recv') AND ts_ns IS NOT NULL"

MEDIANS = pa.schema(
    [
        ("cluster_id", pa.string()),
        ("comm_hash", pa.string()),
        ("seq", pa.int64()),
        ("median_ns", pa.int64()),
    ]
)


_COLUMNS = ["cluster_id", "comm_hash", "seq", "op", "ts_ns", "nranks"]


def lateness(
    db: duckdb.DuckDBPyConnection, now: pa.Table, later: Sequence[pa.Table], *, known: pa.Table
) -> tuple[pa.Array, pa.Table]:
    """The late_ns of each row sealed now, NULL where unknown; and the medians needed by rows sealed later.

    now, later: hot rows of `collectives`. known: medians of rounds that were partly sealed before.
    """
    now = now.select(_COLUMNS)
    try:
        db.register("now_rows", now.append_column("row", pa.array(np.arange(len(now)))))
        db.register(
            "later_rows",
            pa.concat_tables([rows.select(_COLUMNS) for rows in later]) if later else now.slice(0, 0),
        )
        db.register("known_medians", known)
        return _computed(db, len(now))
    finally:
        for name in ("now_rows", "later_rows", "known_medians"):
            db.unregister(name)


def _computed(db: duckdb.DuckDBPyConnection, n_rows: int) -> tuple[pa.Array, pa.Table]:
    both = f"SELECT {_KEY}, ts_ns, nranks FROM now_rows WHERE {_MATCHED}"
    both += f" UNION ALL SELECT {_KEY}, ts_ns, nranks FROM later_rows WHERE {_MATCHED}"
    db.execute(
        "CREATE OR REPLACE TEMP TABLE medians AS SELECT * FROM"
        " (SELECT cluster_id, comm_hash, seq, quantile_disc(ts_ns, 0.5) AS median_ns"
        f" FROM ({both}) GROUP BY ALL HAVING count(*) = max(nranks) AND count(*) > 1) AS complete"
        " ANTI JOIN known_medians USING (cluster_id, comm_hash, seq)"
        " UNION ALL SELECT * FROM known_medians"
    ).fetchall()
    # A round that begins after the border is computed when it is sealed.
    needed = db.sql(
        f"WITH now_keys AS (SELECT DISTINCT {_KEY} FROM now_rows WHERE {_MATCHED} UNION"
        " SELECT cluster_id, comm_hash, seq FROM known_medians),"
        f" later_keys AS (SELECT DISTINCT {_KEY} FROM later_rows WHERE {_MATCHED})"
        " SELECT medians.* FROM medians SEMI JOIN now_keys USING (cluster_id, comm_hash, seq)"
        " SEMI JOIN later_keys USING (cluster_id, comm_hash, seq)"
    ).to_arrow_table()
    of_row = db.sql(
        "SELECT now_rows.row, now_rows.ts_ns - medians.median_ns AS late_ns FROM now_rows JOIN medians"
        " ON medians.comm_hash = now_rows.comm_hash AND medians.seq = now_rows.seq"
        " AND medians.cluster_id = coalesce(now_rows.cluster_id, '') AND now_rows.op NOT IN ('send', 'recv')"
    ).fetchnumpy()
    late_ns: Array = np.zeros(n_rows, np.int64)
    is_unknown = np.ones(n_rows, bool)
    is_known = ~np.ma.getmaskarray(of_row["late_ns"])
    rows = np.asarray(of_row["row"])[is_known]
    late_ns[rows], is_unknown[rows] = np.asarray(of_row["late_ns"])[is_known], False
    return pa.array(late_ns, mask=is_unknown), needed.cast(MEDIANS)
