"""The journal of a hub without a server: a DuckDB database that only this process has open.

Received rows are stored as Arrow batches (IPC, LZ4) in the table `journal` until they are sealed, not row by row:
see docs/decisions/hub-journal.md. The same transactions store the ids of the batches, the list of sealed segments,
and the small tables of the hub (schema.KEPT).
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from stallscope.errors import NewerSchema, StorageFailed
from stallscope.store.hub import schema
from stallscope.store.hub.folder_lock import locked
from stallscope.store.hub.journal import Entry, Segment, damage_of, line
from stallscope.store.hub.migrations import SCHEMA_VERSION, statements
from stallscope.store.hub.owner_retention import delete_owners
from stallscope.store.hub.packing import packed, unpacked
from stallscope.store.hub.segments import orphans

_AT_ONCE = 64
"""Entries per statement: a statement costs as much as writing 100 KB."""

_REPLAY_BYTES = 16 << 20
"""The replay of the log at a start keeps the rows in memory until a checkpoint writes them to the file. So the memory
limit is larger until then: a hub must start with every log that it has written.
"""

_AFTER_DELETION = "no more rows are accepted; stop the hub, restore a copy, and start it again"

_READ_BYTES = 8 << 20
"""Bytes of commits that are read together at a start."""

FILE_NAME = "hub.duckdb"

_OF_DAMAGE = (
    duckdb.IOException,
    duckdb.SerializationException,
    duckdb.FatalException,
    duckdb.InternalException,
)
"""Errors that the content of the file may have caused."""


class DuckJournal:
    """The open file. Only the writer's thread calls it, after open()."""

    def __init__(self, folder: Path, connection: duckdb.DuckDBPyConnection, lock: int):
        self.folder = folder
        self._db = connection
        self._lock = lock
        self._inode = _inode(folder / FILE_NAME)

    @classmethod
    def open(
        cls, folder: Path, *, memory_bytes: int = 1 << 30, threads: int = 1, may_be_lost: bool = False
    ) -> "DuckJournal":
        """Open the hub's file; create it if missing.

        may_be_lost: also where sealed files show that the file existed. Raises StorageFailed, NewerSchema.
        """
        lock = locked(folder)
        path = folder / FILE_NAME
        try:
            if path.exists() and not path.stat().st_size:
                path.unlink()  # left by a hub that ended during its first start: nothing was acknowledged
            if not may_be_lost and not path.exists() and (n_files := len(orphans(folder, ()))):
                raise OSError(
                    f"it is missing or empty, but the folder has {n_files:,} sealed files, which `stallscope hub check"
                    f" {folder} --repair` lists again"
                )
            n_replayed = _size(path.with_name(f"{FILE_NAME}.wal"))
            # Checkpoints run at quiet moments; a small threshold would stop ingest for up to a second.
            db = duckdb.connect(
                str(path),
                config={
                    "checkpoint_threshold": "4GB",
                    "memory_limit": f"{max(memory_bytes, 2 * n_replayed + _REPLAY_BYTES)}B",
                    "threads": threads,
                    "autoinstall_known_extensions": False,
                    "autoload_known_extensions": False,
                    "enable_external_access": False,
                },
            )
            db.execute("SET enable_progress_bar = false")  # it would write to the hub's output
            if n_replayed > _REPLAY_BYTES:
                db.execute("CHECKPOINT")
            with suppress(duckdb.Error):  # more is in memory: the limit of the replay stays
                db.execute(f"SET memory_limit = '{memory_bytes}B'")
        except (duckdb.Error, OSError) as error:
            os.close(lock)
            raise StorageFailed(
                f"cannot open {path}: {line(error)}; check free space and permissions, or restore a copy"
            ) from error
        _owner_only(path, path.with_name(f"{FILE_NAME}.wal"))
        journal = cls(folder, db, lock)
        try:
            _migrate(db, path)
        except BaseException:
            journal.close()
            raise
        return journal

    def close(self) -> None:
        """Close the file and release the lock."""
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A transaction: on an error nothing is stored. Raises StorageFailed."""
        with _storage(self.folder):
            self._db.begin()
            try:
                yield self._db
                self._db.commit()
            except BaseException:
                _roll_back(self._db)
                raise

    def commit(
        self,
        received_us: int,
        entries: Sequence[Entry],
        *,
        batch_ids: Iterable[tuple[str, str]],
        kept: Mapping[str, Sequence[pa.Table]] | None = None,
    ) -> None:
        """Store rows together with their (tenant, batch id); kept: rows of schema.KEPT, replaced by key.

        The rows are on disk when this returns. Raises StorageFailed; then nothing is stored.
        """
        with self._in_place(), self.transaction() as db:
            for begin in range(0, len(entries), _AT_ONCE):
                some = entries[begin : begin + _AT_ONCE]
                rows = [
                    (received_us, entry.tenant, entry.table, len(entry.rows), entry.ipc or packed(entry.rows))
                    for entry in some
                ]
                placeholders = ", ".join(["(?, ?, ?, ?, ?)"] * len(some))
                db.execute(
                    f"INSERT INTO journal VALUES {placeholders}", [value for row in rows for value in row]
                )
            tenants: dict[str, list[str]] = {}
            for tenant, batch_id in batch_ids:
                tenants.setdefault(tenant, []).append(batch_id)
            for tenant, ids in tenants.items():
                db.execute(
                    "INSERT INTO batches SELECT ?, unnest(?::VARCHAR[]), ?", [tenant, ids, received_us]
                )
            for name, pieces in (kept or {}).items():
                for rows in pieces:
                    replace(db, name, rows)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Raises StorageFailed if the file or its log was deleted or replaced: rows in it would not be found again."""
        with _storage(self.folder):
            path = self.folder / FILE_NAME
            if _inode(path) != self._inode:
                raise OSError(f"{path} was deleted or replaced while the hub ran; {_AFTER_DELETION}")
            yield
            log = path.with_name(f"{FILE_NAME}.wal")
            if _inode(log) is None and _is_open_but_deleted(log):
                raise OSError(f"{log} was deleted while the hub ran; {_AFTER_DELETION}")

    def entries(self) -> Iterator[Entry]:
        """The unsealed rows, oldest first. Raises StorageFailed.

        Some commits at a time: sorting all rows at once would need memory for all of them.
        """
        with _storage(self.folder, is_reading=True):
            sizes = self._db.execute(
                "SELECT received_us, sum(octet_length(ipc)) FROM journal GROUP BY ALL ORDER BY received_us"
            ).fetchall()
            for first_us, last_us in _commits_at_once(sizes):
                rows = self._db.execute(
                    "SELECT received_us, tenant, table_name, ipc FROM journal"
                    " WHERE received_us BETWEEN ? AND ? ORDER BY received_us",
                    [first_us, last_us],
                ).fetchall()
                for received_us, tenant, table, ipc in rows:
                    yield Entry(received_us, tenant, table, unpacked(ipc))

    def checked_entries(self) -> Iterator[tuple[str, int, str]]:
        """For each entry its key, its rows, and why it is unreadable; "" if it is readable."""
        keys = self._read("SELECT rowid, n_rows FROM journal ORDER BY received_us")
        for key, n_rows in keys:
            ((ipc,),) = self._read("SELECT ipc FROM journal WHERE rowid = ?", [key])
            yield str(key), n_rows, damage_of(ipc, n_rows)

    def remove_entry(self, key: str) -> None:
        """Remove an entry that checked_entries() named."""
        with self.transaction() as db:
            db.execute("DELETE FROM journal WHERE rowid = ?", [int(key)])

    def batch_ids(self) -> list[tuple[str, str, int]]:
        """(tenant, batch id, received_us) of remembered batches, oldest first."""
        return self._read("SELECT tenant, batch_id, received_us FROM batches ORDER BY received_us")

    def forget_batches(self, before_us: int, tenant: str = "") -> None:
        """Forget ids of batches received before this time. tenant: "" for all tenants."""
        with self.transaction() as db:
            db.execute(
                "DELETE FROM batches WHERE received_us < $1 AND ($2 = '' OR tenant = $2)", [before_us, tenant]
            )

    def segments(self) -> list[Segment]:
        """The current sealed files."""
        rows = self._read(
            "SELECT tenant, table_name, path, n_rows, n_bytes, min_ts_ns, max_ts_ns, sealed_us FROM segments"
            " ORDER BY sealed_us, path"
        )
        return [Segment(*row) for row in rows]

    def seal(self, segment: Segment, until_us: int, *, medians: pa.Table | None) -> None:
        """Replace the rows received up to until_us by a file. medians: of partly sealed rounds, if any."""
        with self.transaction() as db:
            _add(db, segment)
            db.execute(
                "DELETE FROM journal WHERE tenant = ? AND table_name = ? AND received_us <= ?",
                [segment.tenant, segment.table, until_us],
            )
            if medians is not None:
                db.execute("DELETE FROM round_medians WHERE tenant = ?", [segment.tenant])
                db.register("new_medians", medians)
                db.execute(
                    "INSERT INTO round_medians SELECT ?, cluster_id, comm_hash, seq, median_ns, ? FROM new_medians",
                    [segment.tenant, until_us],
                )
                db.unregister("new_medians")

    def replace_segments(self, gone: Sequence[Segment], new: Sequence[Segment]) -> None:
        """Replace files by other files."""
        with self.transaction() as db:
            db.execute(
                "DELETE FROM segments WHERE path IN (SELECT unnest(?::VARCHAR[]))", [[s.path for s in gone]]
            )
            for segment in new:
                _add(db, segment)

    def round_medians(self) -> dict[str, pa.Table]:
        """Medians of partly sealed rounds, by tenant."""
        with _storage(self.folder, is_reading=True):
            tenants = [
                row[0] for row in self._db.execute("SELECT DISTINCT tenant FROM round_medians").fetchall()
            ]
            return {
                tenant: self._db.sql(
                    "SELECT cluster_id, comm_hash, seq, median_ns FROM round_medians WHERE tenant = $tenant",
                    params={"tenant": tenant},
                ).to_arrow_table()
                for tenant in tenants
            }

    def kept(self, name: str) -> pa.Table:
        """All rows of a table that the hub maintains itself. By name: columns added later are last in the file."""
        table = schema.TABLES[name]
        with _storage(self.folder, is_reading=True):
            rows = self._db.sql(f"SELECT {', '.join(table.names)} FROM {name}").to_arrow_table()
        return rows.cast(schema.arrow_schema(table))

    def forget_verdicts(self, before_us: int) -> int:
        """Delete verdicts closed before this time, with their chains. Returns their number."""
        old = "state = 'closed' AND epoch_us(coalesce(closed_at, updated_at)) < ?"
        with self.transaction() as db:
            gone = db.execute(f"SELECT tenant, verdict_id FROM verdicts WHERE {old}", [before_us]).fetchall()
            if gone:
                db.execute(
                    "DELETE FROM causal_chains USING verdicts WHERE causal_chains.tenant = verdicts.tenant"
                    f" AND causal_chain_id = verdict_id AND verdicts.{old}",
                    [before_us],
                )
                db.execute(f"DELETE FROM verdicts WHERE {old}", [before_us])
        return len(gone)

    def forget_jobs(self, before_us: int) -> int:
        """Delete ended jobs whose rows last changed before this time, with their owners. Returns their number."""
        old = "ended_ns IS NOT NULL AND epoch_us(updated_at) < ?"
        with self.transaction() as db:
            ((n_gone,),) = db.execute(f"DELETE FROM jobs WHERE {old}", [before_us]).fetchall()
        return int(n_gone)

    def forget_owners(self, before_us: int) -> int:
        """Delete the owners of jobs and incidents that were over before this time. Returns the rows changed."""
        with self.transaction() as db:
            return delete_owners(db, before_us)

    def latest_us(self) -> int:
        """The newest received_us, 0 for an empty hub."""
        ((latest_us,),) = self._read(
            "SELECT greatest(COALESCE((SELECT max(received_us) FROM journal), 0),"
            " COALESCE((SELECT max(received_us) FROM batches), 0),"
            " COALESCE((SELECT max(sealed_us) FROM segments), 0))"
        )
        return int(latest_us)

    def _read(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query. Raises StorageFailed, for a damaged file."""
        with _storage(self.folder, is_reading=True):
            return self._db.execute(sql, list(params)).fetchall()

    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        return _size(self.folder / f"{FILE_NAME}.wal")

    def checkpoint(self) -> None:
        """Write the write-ahead log into the file. Raises StorageFailed."""
        with _storage(self.folder):
            self._db.execute("CHECKPOINT")


def replace(db: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    """Insert rows into a maintained table; rows with the same key are replaced."""
    key = schema.TABLES[name].key
    db.register("incoming", rows)
    try:
        same = " AND ".join(f"{name}.{column} IS NOT DISTINCT FROM incoming.{column}" for column in key)
        db.execute(f"DELETE FROM {name} USING incoming WHERE {same}")
        db.execute(f"INSERT INTO {name} BY NAME SELECT * FROM incoming")
    finally:
        db.unregister("incoming")


def _add(db: duckdb.DuckDBPyConnection, segment: Segment) -> None:
    db.execute(
        "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            segment.tenant,
            segment.table,
            segment.path,
            segment.n_rows,
            segment.n_bytes,
            segment.min_ts_ns,
            segment.max_ts_ns,
            segment.sealed_us,
        ],
    )


def _size(path: Path) -> int:
    """Bytes of a file, 0 for a missing file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _inode(path: Path) -> int | None:
    """The number of a file, None for a missing file."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _is_open_but_deleted(path: Path) -> bool:
    """Whether this process has a file open that is no longer in its folder (proc(5), /proc/pid/fd)."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed after the listing
            if str(link.readlink()) == f"{path.resolve()} (deleted)":
                return True
    return False


def _commits_at_once(sizes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First and last time of commits that are read together. sizes: time and bytes of each commit, oldest first."""
    group: list[int] = []
    n_bytes = 0
    for received_us, size in sizes:
        if group and n_bytes + size > _READ_BYTES:
            yield group[0], group[-1]
            group, n_bytes = [], 0
        group.append(received_us)
        n_bytes += size
    if group:
        yield group[0], group[-1]


def _owner_only(*paths: Path) -> None:
    """Create files that only their owner can read: they contain the data of all tenants."""
    for path in paths:
        with suppress(FileNotFoundError):
            path.chmod(0o600)


def _migrate(db: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Migrate the file to this version's schema, step by step, each in a transaction."""
    try:
        db.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER, applied_us BIGINT)")
        ((file_version,),) = db.execute("SELECT COALESCE(max(version), 0) FROM schema_version").fetchall()
        if file_version > SCHEMA_VERSION:
            raise NewerSchema(
                f"{path} was written by a newer stallscope (schema {file_version}; this version supports"
                f" {SCHEMA_VERSION}); upgrade stallscope"
            )
        for version in range(file_version + 1, SCHEMA_VERSION + 1):
            db.begin()
            for statement in statements(version):
                db.execute(statement)
            db.execute("INSERT INTO schema_version VALUES (?, ?)", [version, time.time_ns() // 1000])
            db.commit()
    except duckdb.Error as error:
        raise StorageFailed(f"cannot prepare {path}: {line(error)}; restore a copy of it") from error


def _roll_back(db: duckdb.DuckDBPyConnection) -> None:
    try:
        db.rollback()
    except duckdb.TransactionException:
        return  # a failed commit has already ended the transaction


@contextmanager
def _storage(folder: Path, *, is_reading: bool = False) -> Iterator[None]:
    try:
        yield
    except (duckdb.Error, OSError) as error:
        if is_reading:
            raise StorageFailed(
                f"cannot read {folder / FILE_NAME}: {line(error)}; {_advice(folder, error)}"
            ) from error
        raise StorageFailed(
            f"cannot write {folder}: {line(error)}; acknowledged rows are intact; check free space"
        ) from error


def _advice(folder: Path, error: Exception) -> str:
    """The remedy for a file that cannot be read."""
    if isinstance(error, (duckdb.OutOfMemoryException, duckdb.InterruptException)):
        return "the rows in it are intact; give the hub more memory, or start it again"
    if not isinstance(error, _OF_DAMAGE):
        return "check the disk, permissions and limits, and start the hub again"
    return (
        "if the file is damaged, restore a copy, or move the file aside and run"
        f" `stallscope hub check {folder} --repair`, which lists the sealed files again"
    )
