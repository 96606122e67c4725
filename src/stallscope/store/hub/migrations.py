"""The steps from one schema of the hub's file to the next. A released step never changes.

Each step is idempotent: a crash between a step and its entry in schema_version repeats it.
"""

from stallscope.store.hub import schema

MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        "CREATE TABLE IF NOT EXISTS journal"
        " (received_us BIGINT, tenant VARCHAR, table_name VARCHAR, n_rows BIGINT, ipc BLOB)",
        "CREATE TABLE IF NOT EXISTS batches (tenant VARCHAR, batch_id VARCHAR, received_us BIGINT)",
        "CREATE TABLE IF NOT EXISTS segments (tenant VARCHAR, table_name VARCHAR, path VARCHAR, n_rows BIGINT,"
        " n_bytes BIGINT, min_ts_ns BIGINT, max_ts_ns BIGINT, sealed_us BIGINT)",
        "CREATE TABLE IF NOT EXISTS round_medians"
        " (tenant VARCHAR, cluster_id VARCHAR, comm_hash VARCHAR, seq BIGINT, median_ns BIGINT, sealed_us BIGINT)",
        *(schema.create_statement(table) for table in schema.KEPT.values()),
    ),
    2: (),  # the journal's rows are packed more tightly (packing.py); an older hub would misread them
    3: (
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS at_most_gpu_seconds DOUBLE",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS at_most_usd DOUBLE",
    ),
    4: (
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS severity VARCHAR",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS pids VARCHAR",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS victims VARCHAR",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS first_round BIGINT",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS last_round BIGINT",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS n_incidents BIGINT",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS period_steps BIGINT",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS max_late_ms DOUBLE",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS abstained_because VARCHAR",
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS advice VARCHAR",
    ),
}
"""Statements by the version they lead to."""

SCHEMA_VERSION = max(MIGRATIONS)
