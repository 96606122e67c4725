"""Delta tables over the sealed files in the bucket, which Spark, Trino, ClickHouse, DuckDB and Polars read in place.

Each tenant has one Delta table per table with sealed files, at segments/TENANT/TABLE: a log next to the files, which
names the files that PostgreSQL lists. No file is copied. A replaced or expired file leaves the Delta table first, and
its object is deleted minutes later (sweep.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from stallscope.errors import Overloaded, StorageFailed
from stallscope.store.hub import schema
from stallscope.store.hub.journal import Segment, line
from stallscope.store.hub.segments import FOLDER
from stallscope.store.shared.bucket import Bucket
from stallscope.store.shared.postgres import Postgres, errors

_LOCK = 0x5354414D
_APP = "stallscope"
_CONFIGURATION = {
    "delta.checkpointInterval": "20",  # a reader reads the log from the last checkpoint on
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 30 days",  # a VACUUM by mistake deletes no new file
}
_AT_ONCE = 20_000
"""Files in one commit: a commit is one object, which a reader reads whole."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A Delta table after a run. n_added, n_removed: files in this run; n_files: all."""

    tenant: str
    table: str
    address: str
    version: int
    n_added: int
    n_removed: int
    n_files: int


@dataclass(frozen=True)
class _Listed:
    """The list of files at one moment. files: by folder; dropped: listed no more, and not yet released."""

    at_us: int
    files: Mapping[str, Sequence[Segment]]
    dropped: Sequence[str]


def publish(postgres: Postgres, bucket: Bucket) -> list[PublishedTable]:
    """Bring the Delta tables of all tenants up to date, while hubs run. Raises Overloaded, StorageFailed.

    Without a change it writes nothing. After an interruption the next run completes it.
    """
    with _alone(postgres):
        _hold_objects(postgres)
        listed = _listed(postgres)
        tables = [
            _updated(bucket, folder, files, at_us=listed.at_us)
            for folder, files in sorted(listed.files.items())
        ]
        _release_objects(postgres, sorted(listed.files), listed.dropped)
    return tables


@contextmanager
def _alone(postgres: Postgres) -> Iterator[None]:
    """One run at a time. A run that lost its lock is stopped by the transaction numbers of the Delta tables."""
    with postgres.connection() as db, errors():
        ((is_free,),) = db.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK]).fetchall()
        if not is_free:
            raise Overloaded("another `hub publish` of these hubs is running; wait for its end", 60.0)
        try:
            yield
        finally:
            db.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])


def _hold_objects(postgres: Postgres) -> None:
    """From here on, objects of these folders are deleted only after they left the Delta tables."""
    with postgres.transaction() as db:
        db.execute(
            "INSERT INTO published (folder) SELECT DISTINCT regexp_replace(path, '/[^/]*$', '') FROM segments"
            " ON CONFLICT DO NOTHING"
        )


def _listed(postgres: Postgres) -> _Listed:
    with postgres.transaction(is_snapshot=True) as db:
        ((at_us,),) = db.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::bigint").fetchall()
        files: dict[str, list[Segment]] = {
            folder: [] for (folder,) in db.execute("SELECT folder FROM published").fetchall()
        }
        for row in db.execute(
            "SELECT tenant, table_name, path, n_rows, n_bytes, min_ts_ns, max_ts_ns, sealed_us FROM segments"
        ):
            segment = Segment(*row)
            folder = segment.path.rpartition("/")[0]
            if folder in files:  # a later file is for the next run
                files[folder].append(segment)
        dropped = [
            path
            for (path,) in db.execute(
                "SELECT path FROM dropped WHERE released_at IS NULL AND starts_with(path, %s)", [f"{FOLDER}/"]
            ).fetchall()
        ]
    return _Listed(at_us, files, dropped)


def _release_objects(postgres: Postgres, folders: Sequence[str], dropped: Sequence[str]) -> None:
    """The Delta tables no longer name the dropped files: sweep.py deletes them after a while."""
    with postgres.transaction() as db:
        db.execute(
            "UPDATE published SET published_at = clock_timestamp() WHERE folder = ANY(%s)", [list(folders)]
        )
        db.execute(
            "UPDATE dropped SET released_at = clock_timestamp() WHERE path = ANY(%s) AND released_at IS NULL",
            [list(dropped)],
        )


def _updated(bucket: Bucket, folder: str, files: Sequence[Segment], *, at_us: int) -> PublishedTable:
    """One Delta table, changed so that it names exactly these files."""
    _, tenant, name = folder.split("/")
    wanted = {segment.path.rpartition("/")[2]: segment for segment in files}
    columns = Schema.from_arrow(schema.arrow_schema(schema.TABLES[name]))
    address = bucket.address(folder)
    try:
        delta = _opened(address, columns, bucket.options_of_object_store())
        known = _files(delta)
        new = [segment for file, segment in sorted(wanted.items()) if file not in known]
        gone = {file: n_bytes for file, n_bytes in known.items() if file not in wanted}
        actions: list[AddAction | RemoveAction] = [*_removals(gone, at_us), *map(_addition, new)]
        # Removals are first: a merged file and the files that it replaces are in one commit, unless there are many.
        for begin in range(0, len(actions), _AT_ONCE):
            _commit(delta, actions[begin : begin + _AT_ONCE], columns, number=at_us + begin // _AT_ONCE)
            delta.update_incremental()
        version = delta.version()
    except (DeltaError, OSError) as error:
        raise StorageFailed(f"cannot publish {address}: {line(error)}; run it again") from error
    return PublishedTable(
        tenant=tenant,
        table=name,
        address=address,
        version=version,
        n_added=len(new),
        n_removed=len(gone),
        n_files=len(wanted),
    )


def _opened(address: str, columns: Schema, options: Mapping[str, str]) -> DeltaTable:
    """The Delta table, created if missing, with every column of this version."""
    if not DeltaTable.is_deltatable(address, storage_options=dict(options)):
        return DeltaTable.create(
            address,
            columns,
            mode="ignore",
            configuration=_CONFIGURATION,
            storage_options=dict(options),
        )
    delta = DeltaTable(address, storage_options=dict(options))
    known = {field.name for field in delta.schema().fields}
    if missing := [field for field in columns.fields if field.name not in known]:
        delta.alter.add_columns(missing)
        delta.update_incremental()
    return delta


def _files(delta: DeltaTable) -> dict[str, int]:
    """The files that the table names, with their sizes."""
    actions = pa.table(delta.get_add_actions(flatten=True))
    return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))


def _commit(
    delta: DeltaTable, actions: list[AddAction | RemoveAction], columns: Schema, *, number: int
) -> None:
    """One commit. A run with an older list is refused by the number of a newer run."""
    latest = delta.transaction_version(_APP)
    if latest is not None and latest >= number:
        raise Overloaded("another `hub publish` has published a newer list of files", 60.0)
    delta.create_write_transaction(
        actions,
        "append",
        columns,
        commit_properties=CommitProperties(app_transactions=[Transaction(_APP, number)]),
    )


def _addition(segment: Segment) -> AddAction:
    stats: dict[str, object] = {"numRecords": segment.n_rows}
    if segment.min_ts_ns is not None and segment.max_ts_ns is not None:
        stats |= {"minValues": {"ts_ns": segment.min_ts_ns}, "maxValues": {"ts_ns": segment.max_ts_ns}}
    return AddAction(
        path=segment.path.rpartition("/")[2],
        size=segment.n_bytes,
        partition_values={},
        modification_time=segment.sealed_us // 1000,
        data_change=True,
        stats=json.dumps(stats),
    )


def _removals(gone: Mapping[str, int], at_us: int) -> list[RemoveAction]:
    return [RemoveAction(file, True, at_us // 1000, n_bytes, {}) for file, n_bytes in sorted(gone.items())]
