"""The steps from one schema of the hub's file to the next. A released step never changes.

Each step is idempotent: a crash between a step and its entry in schema_version repeats it.
"""

from stallscope.events.owner import GROUP_LABELS, column
from stallscope.events.verdict_fields import FIELDS
from stallscope.store.hub import schema

_STEPS: dict[int, tuple[str, ...]] = {
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
    5: (
        "ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS job VARCHAR",
        schema.create_statement(schema.JOBS),
    ),
    6: tuple(f"ALTER TABLE jobs ADD COLUMN IF NOT EXISTS {column(label)} VARCHAR" for label in GROUP_LABELS),
}
"""Statements by the version they lead to. New columns of verdicts follow from events/verdict_fields.py."""

SCHEMA_VERSION = max(*_STEPS, *(field.hub_schema for field in FIELDS))


def statements(version: int) -> list[str]:
    """The statements that lead to a version."""
    types = {column.name: column.sql_type for column in schema.VERDICTS.columns}
    added = [field.name for field in FIELDS if field.hub_schema == version > 1]
    columns = [f"ALTER TABLE verdicts ADD COLUMN IF NOT EXISTS {name} {types[name]}" for name in added]
    return [*_STEPS.get(version, ()), *columns]
