"""A tenant's data over all slots at one moment: one read-only transaction of PostgreSQL, without asking another hub."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from stallscope.store.hub import schema
from stallscope.store.hub.batches import completed
from stallscope.store.hub.hot import Snapshot
from stallscope.store.hub.journal import Segment
from stallscope.store.hub.packing import unpacked
from stallscope.store.hub.row_bounds import ALL_ROWS, NO_BOUNDS, RowBounds
from stallscope.store.shared.postgres import Connection, Postgres
from stallscope.store.shared.postgres_journal import Objects, RecentObjects, kept_table
from stallscope.store.shared.slots import slot_of

_MAX_CACHED_BYTES = 256 << 20
_FETCHED_AT_ONCE = 256


class Snapshots:
    """Reads snapshots; unsealed rows that were read before come from memory. Thread-safe."""

    def __init__(self, postgres: Postgres, objects: Objects, *, max_bytes: int = _MAX_CACHED_BYTES):
        self._postgres, self._objects, self._max_bytes = postgres, objects, max_bytes
        self._lock = threading.Lock()
        self._cached: OrderedDict[int, pa.Table] = OrderedDict()
        self._n_bytes = 0

    def snapshot(
        self, tenant: str, tables: Collection[str], bounds: Mapping[str, RowBounds] = NO_BOUNDS
    ) -> Snapshot:
        """The tenant's sealed files and other rows of these tables. Raises Overloaded, StorageFailed.

        bounds: without slots and files that have no rows within the bounds of their table.
        """
        sent, kept = (sorted(known.keys() & set(tables)) for known in (schema.SENT, schema.KEPT))
        with self._postgres.transaction(is_snapshot=True) as db:
            segments = _segments(db, tenant, sent, bounds)
            rows, unread = self._journal_rows(db, tenant, sent, bounds)
            hot = {name: _kept(db, tenant, name) for name in kept}
        if unread:  # objects of the bucket are read after the transaction
            rows |= self._from_objects(tenant, unread)
        by_table: dict[str, list[pa.Table]] = {}
        for _, (table, piece) in sorted(rows.items()):
            by_table.setdefault(table, []).append(piece)
        return Snapshot(segments, {**{t: pa.concat_tables(p) for t, p in by_table.items()}, **hot})

    def tenants(self) -> list[str]:
        """The tenants with any data."""
        with self._postgres.transaction(is_snapshot=True) as db:
            rows = db.execute(
                "SELECT tenant FROM journal UNION SELECT tenant FROM segments UNION SELECT tenant FROM verdicts"
                " UNION SELECT tenant FROM nodes ORDER BY tenant"
            ).fetchall()
        return [tenant for (tenant,) in rows]

    def _journal_rows(
        self, db: Connection, tenant: str, tables: Sequence[str], bounds: Mapping[str, RowBounds]
    ) -> tuple[dict[tuple[int, int], tuple[str, pa.Table]], list[tuple[Any, ...]]]:
        """By (received_us, id) the rows of each entry, and the entries whose rows are in the bucket."""
        listed = [
            entry
            for chosen, of_chosen in _by_bounds(tables, bounds)
            for entry in db.execute(
                "SELECT id, received_us, table_name, object, at, n_bytes FROM journal"
                " WHERE tenant = %s AND table_name = ANY(%s) AND (%s::int[] IS NULL OR slot = ANY(%s))",
                [tenant, chosen, *2 * [_slots(tenant, of_chosen)]],
            ).fetchall()
        ]
        rows: dict[tuple[int, int], tuple[str, pa.Table]] = {}
        missing: list[int] = []
        unread: list[tuple[Any, ...]] = []
        for entry in listed:
            key, received_us, table, path = entry[:4]
            known = self._known(key)
            if known is not None:
                rows[received_us, key] = table, known
            elif path is None:
                missing.append(key)
            else:
                unread.append(entry)
        for begin in range(0, len(missing), _FETCHED_AT_ONCE):
            for key, received_us, table, ipc in db.execute(
                "SELECT id, received_us, table_name, ipc FROM journal WHERE id = ANY(%s)",
                [missing[begin : begin + _FETCHED_AT_ONCE]],
                binary=True,
            ).fetchall():
                rows[received_us, key] = table, self._kept_in_memory(tenant, key, received_us, table, ipc)
        return rows, unread

    def _from_objects(
        self, tenant: str, unread: Sequence[tuple[Any, ...]]
    ) -> dict[tuple[int, int], tuple[str, pa.Table]]:
        """An object stays for minutes after its rows were sealed, so it is there."""
        objects = RecentObjects(self._objects)
        return {
            (received_us, key): (
                table,
                self._kept_in_memory(tenant, key, received_us, table, objects.part(path, at, n_bytes)),
            )
            for key, received_us, table, path, at, n_bytes in sorted(unread, key=lambda entry: entry[3:5])
        }

    def _known(self, key: int) -> pa.Table | None:
        with self._lock:
            rows = self._cached.get(key)
            if rows is not None:
                self._cached.move_to_end(key)
            return rows

    def _kept_in_memory(self, tenant: str, key: int, received_us: int, table: str, ipc: bytes) -> pa.Table:
        rows = completed(table, unpacked(ipc), tenant, received_us=received_us)
        with self._lock:
            if key not in self._cached:
                self._cached[key] = rows
                self._n_bytes += rows.nbytes
            while self._n_bytes > self._max_bytes and len(self._cached) > 1:
                self._n_bytes -= self._cached.popitem(last=False)[1].nbytes
        return rows


def _segments(
    db: Connection, tenant: str, tables: Sequence[str], bounds: Mapping[str, RowBounds]
) -> dict[str, tuple[Segment, ...]]:
    out: dict[str, list[Segment]] = {}
    for chosen, of_chosen in _by_bounds(tables, bounds):
        for row in db.execute(
            "SELECT tenant, table_name, path, n_rows, n_bytes, min_ts_ns, max_ts_ns, sealed_us FROM segments"
            " WHERE tenant = %s AND table_name = ANY(%s) AND (%s::int[] IS NULL OR slot = ANY(%s))"
            " AND coalesce(max_ts_ns >= %s AND min_ts_ns <= %s, true) ORDER BY sealed_us, path",
            [tenant, chosen, *2 * [_slots(tenant, of_chosen)], of_chosen.from_ns, of_chosen.to_ns],
        ).fetchall():
            segment = Segment(*row)
            out.setdefault(segment.table, []).append(segment)
    return {table: tuple(segments) for table, segments in out.items()}


def _by_bounds(
    tables: Sequence[str], bounds: Mapping[str, RowBounds]
) -> Iterator[tuple[list[str], RowBounds]]:
    """Tables with the same bounds, for one query each."""
    of = {table: bounds.get(table, ALL_ROWS) for table in tables}
    for each in dict.fromkeys(of.values()):
        yield [table for table in tables if of[table] == each], each


def _slots(tenant: str, bounds: RowBounds) -> list[int] | None:
    """The slots with the rows; None for all."""
    return None if bounds.clusters is None else sorted({slot_of(tenant, name) for name in bounds.clusters})


def _kept(db: Connection, tenant: str, name: str) -> pa.Table:
    columns = schema.TABLES[name].names
    rows = db.execute(f"SELECT {', '.join(columns)} FROM {name} WHERE tenant = %s", [tenant]).fetchall()
    return kept_table(name, rows)
