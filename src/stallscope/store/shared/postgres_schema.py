"""The tables in PostgreSQL, and the steps from one version to the next.

Steps only add tables and columns, so that hubs of two neighbouring versions run side by side. Hubs that start at the
same time migrate one after the other, under an advisory lock.
"""

import secrets

import psycopg

from stallscope.errors import BadInput, NewerSchema, StorageFailed
from stallscope.store.hub import migrations, schema
from stallscope.store.hub.journal import line
from stallscope.store.shared.postgres import SCHEMA, Connection, Postgres
from stallscope.store.shared.slots import N_SLOTS

_LOCK = 0x5354414C  # "STAL"
_TYPES = {
    "text": "text",
    "int32": "integer",
    "int64": "bigint",
    "double": "double precision",
    "bool": "boolean",
    "time": "timestamptz",
}

_STEPS: dict[int, tuple[str, ...]] = {
    1: (
        "CREATE TABLE IF NOT EXISTS hubs (name text PRIMARY KEY, peer text NOT NULL, certificate text NOT NULL,"
        " ingest text NOT NULL, version text NOT NULL, seen timestamptz NOT NULL, is_leaving boolean NOT NULL,"
        " state text NOT NULL)",
        "CREATE TABLE IF NOT EXISTS leases (slot integer PRIMARY KEY, owner text, epoch bigint NOT NULL DEFAULT 0,"
        " expires timestamptz NOT NULL DEFAULT 'epoch')",
        "CREATE TABLE IF NOT EXISTS slot_changes (slot integer PRIMARY KEY, n bigint NOT NULL DEFAULT 0)",
        "CREATE TABLE IF NOT EXISTS journal (id bigserial PRIMARY KEY, slot integer NOT NULL,"
        " received_us bigint NOT NULL, tenant text NOT NULL, table_name text NOT NULL, n_rows bigint NOT NULL,"
        " ipc bytea, object text, at bigint NOT NULL, n_bytes bigint NOT NULL)",
        "ALTER TABLE journal ALTER ipc SET STORAGE EXTERNAL",  # the rows are compressed already
        "CREATE INDEX IF NOT EXISTS journal_of_slot ON journal (slot, received_us)",
        "CREATE INDEX IF NOT EXISTS journal_of_tenant ON journal (tenant, table_name)",
        "CREATE TABLE IF NOT EXISTS batches (tenant text, batch_id text, slot integer NOT NULL,"
        " received_us bigint NOT NULL, PRIMARY KEY (tenant, batch_id))",
        "CREATE INDEX IF NOT EXISTS batches_of_slot ON batches (slot, received_us)",
        "CREATE TABLE IF NOT EXISTS segments (path text PRIMARY KEY, slot integer NOT NULL, tenant text NOT NULL,"
        " table_name text NOT NULL, n_rows bigint NOT NULL, n_bytes bigint NOT NULL, min_ts_ns bigint,"
        " max_ts_ns bigint, sealed_us bigint NOT NULL)",
        "CREATE INDEX IF NOT EXISTS segments_of_slot ON segments (slot)",
        "CREATE INDEX IF NOT EXISTS segments_of_tenant ON segments (tenant, table_name)",
        "CREATE TABLE IF NOT EXISTS dropped (path text PRIMARY KEY, slot integer NOT NULL,"
        " dropped_at timestamptz NOT NULL DEFAULT clock_timestamp())",
        "CREATE TABLE IF NOT EXISTS round_medians (slot integer, tenant text, ipc bytea NOT NULL,"
        " PRIMARY KEY (slot, tenant))",
        "CREATE TABLE IF NOT EXISTS files (name text PRIMARY KEY, content bytea, version bigint NOT NULL)",
        "CREATE TABLE IF NOT EXISTS secrets (name text PRIMARY KEY, value text NOT NULL)",
    ),
    2: (
        "CREATE TABLE IF NOT EXISTS published (folder text PRIMARY KEY,"
        " published_at timestamptz NOT NULL DEFAULT clock_timestamp())",
        "ALTER TABLE dropped ADD COLUMN IF NOT EXISTS released_at timestamptz",
    ),
}
"""Statements by the version they lead to. A released step never changes."""

SHARED_SCHEMA_VERSION = max(_STEPS)


def prepare(postgres: Postgres) -> None:
    """Create or migrate the tables. Raises NewerSchema if a newer hub has migrated them, BadInput, StorageFailed."""
    try:
        with postgres.connection() as db, db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            _create_schema(db)
            _check_version(db, postgres.address)
            _migrate(db)
    except psycopg.errors.InsufficientPrivilege as error:
        raise BadInput(
            f"the user of --shared may not create the tables at {postgres.address} ({line(error)}); as the owner of the"
            f" database: CREATE SCHEMA {SCHEMA} AUTHORIZATION the_user"
        ) from None
    except psycopg.Error as error:
        raise StorageFailed(f"cannot prepare the tables at {postgres.address}: {line(error)}") from error


def secret(postgres: Postgres) -> str:
    """The secret that the hubs of this database share."""
    with postgres.transaction() as db:
        row = db.execute("SELECT value FROM secrets WHERE name = 'hubs'").fetchone()
        assert row is not None, "prepare() stores it"
        return str(row[0])


def _create_schema(db: Connection) -> None:
    ((is_there,),) = db.execute("SELECT to_regnamespace(%s) IS NOT NULL", [SCHEMA]).fetchall()
    if not is_there:
        db.execute(f"CREATE SCHEMA {SCHEMA}")


def _check_version(db: Connection, address: str) -> None:
    db.execute("CREATE TABLE IF NOT EXISTS schema_version (name text PRIMARY KEY, version integer NOT NULL)")
    stored: dict[str, int] = dict(db.execute("SELECT name, version FROM schema_version").fetchall())
    for name, known in _versions().items():
        if stored.get(name, 0) > known:
            raise NewerSchema(
                f"the tables at {address} belong to a newer stallscope ({name} {stored[name]}; this version supports"
                f" {known}); upgrade stallscope"
            )


def _versions() -> dict[str, int]:
    """The versions of the tables that only this store has, and of the tables that every hub has."""
    return {"shared": SHARED_SCHEMA_VERSION, "tables": migrations.SCHEMA_VERSION}


def _migrate(db: Connection) -> None:
    stored: dict[str, int] = dict(db.execute("SELECT name, version FROM schema_version").fetchall())
    if stored == _versions():
        return
    for version in range(stored.get("shared", 0) + 1, SHARED_SCHEMA_VERSION + 1):
        for statement in _STEPS[version]:
            db.execute(statement)
    for table in schema.KEPT.values():
        for statement in _kept_statements(table):
            db.execute(statement)
    for name in ("leases", "slot_changes"):
        db.execute(
            f"INSERT INTO {name} (slot) SELECT generate_series(0, %s) ON CONFLICT DO NOTHING", [N_SLOTS - 1]
        )
    db.execute("INSERT INTO secrets VALUES ('hubs', %s) ON CONFLICT DO NOTHING", [secrets.token_urlsafe(32)])
    for name, version in _versions().items():
        db.execute(
            "INSERT INTO schema_version VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET version = excluded.version",
            [name, version],
        )


def _kept_statements(table: schema.HubTable) -> list[str]:
    """A table that the hub maintains itself, with every column of this version."""
    key = ", ".join(table.key)
    columns = ", ".join(f"{column.name} {_TYPES[column.kind]}" for column in table.columns)
    added = ", ".join(
        f"ADD COLUMN IF NOT EXISTS {column.name} {_TYPES[column.kind]}" for column in table.columns
    )
    return [
        f"CREATE TABLE IF NOT EXISTS {table.name} (slot integer NOT NULL, {columns}, PRIMARY KEY (slot, {key}))",
        f"ALTER TABLE {table.name} {added}",
        f"CREATE INDEX IF NOT EXISTS {table.name}_of_tenant ON {table.name} (tenant)",
    ]
