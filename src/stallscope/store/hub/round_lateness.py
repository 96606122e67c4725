"""Lateness of each rank, set when its rows are sealed: arrival minus the median arrival of its round.

A round is computed when all its ranks are hot. If only some of its rows are sealed now, the median is stored (in the
journal, in the same transaction) for the rows that are sealed later. Lateness is by the senders' clocks: clock offsets
between machines are not corrected here.
"""

from collections.abc import Sequence

import duckdb
import pyarrow as pa

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


def with_lateness(
    db: duckdb.DuckDBPyConnection, now: Sequence[pa.Table], later: Sequence[pa.Table], *, known: pa.Table
) -> tuple[str, pa.Table]:
    """A query over the rows sealed now, with late_ns; and the medians needed by rows sealed later.

    now, later: hot rows of `collectives`. known: medians of rounds that were partly sealed before. Registers
    relations with db.
    """
    db.register("now_rows", pa.concat_tables(now))
    db.register("later_rows", pa.concat_tables(later) if later else pa.concat_tables(now).slice(0, 0))
    db.register("known_medians", known)
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
    select = (
        "SELECT now_rows.* REPLACE (now_rows.ts_ns - medians.median_ns AS late_ns) FROM now_rows LEFT JOIN medians"
        " ON medians.comm_hash = now_rows.comm_hash AND medians.seq = now_rows.seq"
        " AND medians.cluster_id = coalesce(now_rows.cluster_id, '') AND now_rows.op NOT IN ('send', 'recv')"
    )
    return select, needed.cast(MEDIANS)
