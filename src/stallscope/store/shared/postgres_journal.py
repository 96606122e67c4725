"""The journal of one slot in PostgreSQL.

Every transaction first checks the lease: a hub that lost its slot cannot commit, however late its commit arrives. It
also counts the slot's changes. If the outcome of a commit is unknown because the connection broke, the next
transaction compares the count: if the commit happened after all, memory and journal differ, and the slot must be opened
again. Rows of a commit above 1 MB are an object of the bucket, which is stored before the transaction.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from stallscope.errors import Overloaded, StorageFailed
from stallscope.store.hub import round_lateness, schema
from stallscope.store.hub.journal import AlreadyStored, Entry, Segment, damage_of
from stallscope.store.hub.owner_retention import HAS_OWNER, HELD, NO_OWNER, without_owner
from stallscope.store.hub.packing import packed, unpacked
from stallscope.store.shared.postgres import Connection, Postgres

OBJECT_BYTES = 1 << 20
"""Larger commits are objects: PostgreSQL would write their bytes twice, to its log and to the table."""

_MAX_REMEMBERED = 100_000
"""Batch ids in the writer's memory. The primary key recognises the others."""

_SEGMENT = "tenant, table_name, path, n_rows, n_bytes, min_ts_ns, max_ts_ns, sealed_us"
_NUL, _NO_NUL = "\0", "\ufffd"


class Objects(Protocol):
    """Objects of a bucket by key."""

    def is_quick(self) -> bool:
        """Whether a commit may wait for a request."""

    def put(self, key: str, content: bytes, *, is_quick: bool = False) -> None:
        """Store an object. is_quick: fails soon. Raises Overloaded, StorageFailed."""

    def get(self, key: str) -> bytes:
        """The content of an object. Raises Overloaded, StorageFailed."""


class SlotLost(Overloaded):
    """The slot belongs to another hub now, or must be opened again."""


@dataclass(frozen=True)
class Lease:
    """The right to change a slot. epoch: number of its owners so far."""

    slot: int
    owner: str
    epoch: int


class PostgresJournal:
    """The journal of a slot, for the owner of its lease."""

    def __init__(self, postgres: Postgres, lease: Lease, objects: Objects, *, lost: Callable[[], None]):
        """lost: called when the slot belongs to another hub, or must be opened again."""
        self.lease = lease
        self._postgres, self._objects, self._lost = postgres, objects, lost
        self._is_lost = False
        self._n_objects = 0
        with postgres.transaction() as db:
            self._check_lease(db)
            ((self._n_changes,),) = db.execute(
                "SELECT n FROM slot_changes WHERE slot = %s FOR UPDATE", [lease.slot]
            ).fetchall()

    def close(self) -> None:
        """Do nothing: the connections belong to the process."""

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A change of the slot. Raises SlotLost, Overloaded, StorageFailed."""
        if self._is_lost:
            raise SlotLost("the cluster moves to another hub; send again", 1.0)
        with self._postgres.transaction() as db:
            self._check_lease(db)
            changed = db.execute(
                "UPDATE slot_changes SET n = n + 1 WHERE slot = %s AND n = %s",
                [self.lease.slot, self._n_changes],
            )
            if changed.rowcount != 1:
                self._lose()
                raise SlotLost("the hub opens the cluster's data again; send again", 1.0)
            yield db
        self._n_changes += 1

    def _check_lease(self, db: Connection) -> None:
        """Share the lease's row until the end of the transaction: renewals pass it, a takeover waits for it."""
        lease = self.lease
        row = db.execute(
            "SELECT 1 FROM leases WHERE slot = %s AND owner = %s AND epoch = %s FOR KEY SHARE",
            [lease.slot, lease.owner, lease.epoch],
        ).fetchone()
        if row is None:
            self._lose()
            raise SlotLost("the cluster belongs to another hub now; send again", 1.0)

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._lost()

    def commit(
        self,
        received_us: int,
        entries: Sequence[Entry],
        *,
        batch_ids: Iterable[tuple[str, str]],
        kept: Mapping[str, Sequence[pa.Table]] | None = None,
    ) -> None:
        """Store rows together with their (tenant, batch id); kept: rows of schema.KEPT, replaced by key.

        The rows are on disk when this returns. Raises AlreadyStored, SlotLost, Overloaded, StorageFailed.
        """
        blobs = [bytes(entry.ipc or packed(entry.rows)) for entry in entries]
        key = self._stored_object(received_us, blobs)
        ids = list(batch_ids)
        with self.transaction() as db:
            if ids:
                self._insert_ids(db, ids, received_us)
            if entries:
                _insert_rows(db, self.lease.slot, received_us, entries, blobs, key)
            for name, pieces in (kept or {}).items():
                for rows in pieces:
                    self._replace(db, name, rows)

    def _stored_object(self, received_us: int, blobs: Sequence[bytes]) -> str | None:
        """The key of the object with the rows; None if they go into PostgreSQL: few rows, or a slow bucket."""
        if sum(map(len, blobs)) <= OBJECT_BYTES or not self._objects.is_quick():
            return None
        self._n_objects += 1
        lease = self.lease
        key = f"journal/{lease.slot}-{lease.epoch}-{received_us}-{self._n_objects}.ipc"
        try:
            self._objects.put(key, b"".join(blobs), is_quick=True)
        except Overloaded:
            return None
        return key

    def _insert_ids(self, db: Connection, ids: Sequence[tuple[str, str]], received_us: int) -> None:
        """Raises AlreadyStored if another batch has one of the ids; a concurrent commit is waited for."""
        tenants = [tenant for tenant, _ in ids]
        texts = [_text(batch_id) for _, batch_id in ids]
        new = db.execute(
            "INSERT INTO batches SELECT t, b, %s, %s FROM unnest(%s::text[], %s::text[]) AS ids (t, b)"
            " ON CONFLICT DO NOTHING RETURNING tenant, batch_id",
            [self.lease.slot, received_us, tenants, texts],
        ).fetchall()
        missing = set(zip(tenants, texts, strict=True)) - set(new)
        if not missing:
            return
        stored: dict[tuple[str, str], int] = {}
        for (tenant, batch_id), text in zip(ids, texts, strict=True):
            if (tenant, text) in missing:
                row = db.execute(
                    "SELECT received_us FROM batches WHERE tenant = %s AND batch_id = %s", [tenant, text]
                ).fetchone()
                stored[tenant, batch_id] = row[0] if row else received_us
        raise AlreadyStored(stored)

    def _replace(self, db: Connection, name: str, rows: pa.Table) -> None:
        table = schema.TABLES[name]
        columns = rows.column_names
        latest = {tuple(row[k] for k in table.key): row for row in rows.to_pylist()}
        others = [column for column in columns if column not in table.key]
        update = ", ".join(f"{column} = excluded.{column}" for column in others)
        statement = (
            f"INSERT INTO {name} (slot, {', '.join(columns)}) VALUES ({', '.join(['%s'] * (len(columns) + 1))})"
            f" ON CONFLICT (slot, {', '.join(table.key)}) DO UPDATE SET {update}"
        )
        with db.cursor() as cursor:
            cursor.executemany(
                statement,
                [[self.lease.slot, *(_text(row[column]) for column in columns)] for row in latest.values()],
            )

    def _rows(self, sql: str, *params: object) -> list[tuple[Any, ...]]:
        with self._postgres.transaction() as db:
            return db.execute(sql, params).fetchall()

    def entries(self) -> Iterator[Entry]:
        """The unsealed rows, oldest first."""
        for _, received_us, tenant, table, _, ipc in self._stored():
            yield Entry(received_us, tenant, table, unpacked(ipc))

    def _stored(self) -> Iterator[tuple[int, int, str, str, int, bytes]]:
        """(id, received_us, tenant, table, rows, packed rows) of each entry, oldest first."""
        objects = RecentObjects(self._objects)
        ids = [
            row[0]
            for row in self._rows(
                "SELECT id FROM journal WHERE slot = %s ORDER BY received_us, id", self.lease.slot
            )
        ]
        for begin in range(0, len(ids), 64):
            for key, received_us, tenant, table, n_rows, ipc, path, at, n_bytes in self._rows(
                "SELECT id, received_us, tenant, table_name, n_rows, ipc, object, at, n_bytes FROM journal"
                " WHERE id = ANY(%s) ORDER BY received_us, id",
                ids[begin : begin + 64],
            ):
                yield (
                    key,
                    received_us,
                    tenant,
                    table,
                    n_rows,
                    ipc if path is None else objects.part(path, at, n_bytes),
                )

    def checked_entries(self) -> Iterator[tuple[str, int, str]]:
        """For each entry its key, its rows, and why it is unreadable; "" if it is readable."""
        for key, _, _, _, n_rows, ipc in self._stored():
            yield str(key), n_rows, damage_of(ipc, n_rows)

    def remove_entry(self, key: str) -> None:
        """Remove an entry that checked_entries() named."""
        with self.transaction() as db:
            db.execute("DELETE FROM journal WHERE slot = %s AND id = %s", [self.lease.slot, int(key)])

    def batch_ids(self) -> list[tuple[str, str, int]]:
        """The newest batches, oldest first: enough to answer most repetitions without a transaction."""
        rows = self._rows(
            "SELECT tenant, batch_id, received_us FROM batches WHERE slot = %s ORDER BY received_us DESC LIMIT %s",
            self.lease.slot,
            _MAX_REMEMBERED,
        )
        return [(tenant, batch_id, received_us) for tenant, batch_id, received_us in reversed(rows)]

    def forget_batches(self, before_us: int, tenant: str = "") -> None:
        """Forget ids of batches received before this time. tenant: "" for all tenants."""
        with self.transaction() as db:
            db.execute(
                "DELETE FROM batches WHERE slot = %s AND received_us < %s AND (%s = '' OR tenant = %s)",
                [self.lease.slot, before_us, tenant, tenant],
            )

    def segments(self) -> list[Segment]:
        """The current sealed files."""
        rows = self._rows(
            f"SELECT {_SEGMENT} FROM segments WHERE slot = %s ORDER BY sealed_us, path", self.lease.slot
        )
        return [Segment(*row) for row in rows]

    def seal(self, segment: Segment, until_us: int, *, medians: pa.Table | None) -> None:
        """Replace the rows received up to until_us by a file. medians: of partly sealed rounds, if any."""
        slot = self.lease.slot
        with self.transaction() as db:
            self._add(db, segment)
            sealed = db.execute(
                "DELETE FROM journal WHERE slot = %s AND tenant = %s AND table_name = %s AND received_us <= %s"
                " RETURNING object",
                [slot, segment.tenant, segment.table, until_us],
            ).fetchall()
            paths = sorted({path for (path,) in sealed if path is not None})
            if paths:
                db.execute(
                    "INSERT INTO dropped (path, slot) SELECT p, %s FROM unnest(%s::text[]) AS paths (p)"
                    " WHERE NOT EXISTS (SELECT 1 FROM journal WHERE slot = %s AND object = p) ON CONFLICT DO NOTHING",
                    [slot, paths, slot],
                )
            if medians is not None:
                db.execute(
                    "DELETE FROM round_medians WHERE slot = %s AND tenant = %s", [slot, segment.tenant]
                )
                if len(medians):
                    db.execute(
                        "INSERT INTO round_medians VALUES (%s, %s, %s)",
                        [slot, segment.tenant, bytes(packed(medians))],
                    )

    def replace_segments(self, gone: Sequence[Segment], new: Sequence[Segment]) -> None:
        """Replace files by other files. The objects of replaced files are removed later."""
        slot, paths = self.lease.slot, [segment.path for segment in gone]
        with self.transaction() as db:
            db.execute("DELETE FROM segments WHERE slot = %s AND path = ANY(%s)", [slot, paths])
            db.execute(
                "INSERT INTO dropped (path, slot) SELECT unnest(%s::text[]), %s ON CONFLICT DO NOTHING",
                [paths, slot],
            )
            for segment in new:
                self._add(db, segment)

    def _add(self, db: Connection, segment: Segment) -> None:
        db.execute(
            f"INSERT INTO segments (slot, {_SEGMENT}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            [
                self.lease.slot,
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

    def round_medians(self) -> dict[str, pa.Table]:
        """Medians of partly sealed rounds, by tenant."""
        rows = self._rows("SELECT tenant, ipc FROM round_medians WHERE slot = %s", self.lease.slot)
        wanted = round_lateness.MEDIANS
        return {tenant: unpacked(ipc).select(wanted.names).cast(wanted) for tenant, ipc in rows}

    def kept(self, name: str) -> pa.Table:
        """All rows of a table that the hub maintains itself."""
        columns = schema.TABLES[name].names
        rows = self._rows(f"SELECT {', '.join(columns)} FROM {name} WHERE slot = %s", self.lease.slot)
        return kept_table(name, rows)

    def forget_verdicts(self, before_us: int) -> int:
        """Delete verdicts closed before this time, with their chains. Returns their number."""
        slot = self.lease.slot
        with self.transaction() as db:
            gone = db.execute(
                "DELETE FROM verdicts WHERE slot = %s AND state = 'closed'"
                " AND coalesce(closed_at, updated_at) < to_timestamp(%s) RETURNING tenant, verdict_id",
                [slot, before_us / 1e6],
            ).fetchall()
            for tenant, verdict_id in gone:
                db.execute(
                    "DELETE FROM causal_chains WHERE slot = %s AND tenant = %s AND causal_chain_id = %s",
                    [slot, tenant, verdict_id],
                )
        return len(gone)

    def forget_jobs(self, before_us: int) -> int:
        """Delete ended jobs whose rows last changed before this time, with their owners. Returns their number."""
        with self.transaction() as db:
            gone = db.execute(
                "DELETE FROM jobs WHERE slot = %s AND ended_ns IS NOT NULL AND updated_at < to_timestamp(%s)",
                [self.lease.slot, before_us / 1e6],
            )
            return gone.rowcount

    def forget_owners(self, before_us: int) -> int:
        """Delete the owners of jobs and incidents that were over before this time. Returns the rows changed."""
        slot, before_s = self.lease.slot, before_us / 1e6
        with self.transaction() as db:
            jobs = db.execute(
                f"UPDATE jobs SET {NO_OWNER} WHERE slot = %s AND ended_ns IS NOT NULL"
                f" AND updated_at < to_timestamp(%s) AND {HAS_OWNER}",
                [slot, before_s],
            )
            old = db.execute(
                "SELECT tenant, verdict_id, kind, summary, verdict FROM verdicts WHERE slot = %s AND state = 'closed'"
                f" AND coalesce(closed_at, updated_at) < to_timestamp(%s) AND {HAS_OWNER}",
                [slot, before_s],
            ).fetchall()
            for tenant, verdict_id, kind, summary, text in old:
                summary = HELD if kind == "idle" else summary
                db.execute(
                    f"UPDATE verdicts SET {NO_OWNER}, summary = %s, verdict = %s"
                    " WHERE slot = %s AND tenant = %s AND verdict_id = %s",
                    [summary, without_owner(kind, text), slot, tenant, verdict_id],
                )
                if kind == "idle":
                    db.execute(
                        "UPDATE causal_chains SET summary = %s, explanation = %s"
                        " WHERE slot = %s AND tenant = %s AND causal_chain_id = %s",
                        [HELD, json.dumps({}), slot, tenant, verdict_id],
                    )
            return jobs.rowcount + len(old)

    def latest_us(self) -> int:
        """The newest received_us, 0 for an empty slot."""
        slot = self.lease.slot
        ((latest_us,),) = self._rows(
            "SELECT greatest((SELECT max(received_us) FROM journal WHERE slot = %s),"
            " (SELECT max(received_us) FROM batches WHERE slot = %s),"
            " (SELECT max(sealed_us) FROM segments WHERE slot = %s), 0)",
            slot,
            slot,
            slot,
        )
        return int(latest_us)

    def wal_bytes(self) -> int:
        """0: PostgreSQL maintains its log itself."""
        return 0

    def checkpoint(self) -> None:
        """Do nothing, see wal_bytes()."""


@dataclass
class RecentObjects:
    """Parts of objects; the last object is kept, because the parts of a commit are read one after the other."""

    objects: Objects
    path: str = ""
    content: bytes = b""

    def part(self, path: str, at: int, n_bytes: int) -> bytes:
        """Bytes of an object. Raises StorageFailed if it is shorter."""
        if path != self.path:
            self.path, self.content = path, self.objects.get(path)
        if len(self.content) < at + n_bytes:
            raise StorageFailed(f"the object {path} is damaged: it has only {len(self.content):,} bytes")
        return self.content[at : at + n_bytes]


def kept_table(name: str, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Rows of PostgreSQL as rows of a maintained table."""
    wanted = schema.arrow_schema(schema.TABLES[name])
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(wanted)
    return pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, wanted, strict=True)], schema=wanted
    )


def _insert_rows(
    db: Connection,
    slot: int,
    received_us: int,
    entries: Sequence[Entry],
    blobs: Sequence[bytes],
    key: str | None,
) -> None:
    at = [0]
    for blob in blobs:
        at.append(at[-1] + len(blob))
    content: list[bytes | None] = [None] * len(blobs) if key else list(blobs)
    db.execute(
        "INSERT INTO journal (slot, received_us, object, tenant, table_name, n_rows, ipc, at, n_bytes)"
        " SELECT %s, %s, %s, * FROM unnest(%s::text[], %s::text[], %s::bigint[], %b::bytea[], %s::bigint[],"
        " %s::bigint[])",
        [
            slot,
            received_us,
            key,
            [entry.tenant for entry in entries],
            [entry.table for entry in entries],
            [len(entry.rows) for entry in entries],
            content,
            at[:-1],
            [len(blob) for blob in blobs],
        ],
    )


def _text(value: Any) -> Any:
    """PostgreSQL's texts have no NUL."""
    return value.replace(_NUL, _NO_NUL) if isinstance(value, str) and _NUL in value else value
