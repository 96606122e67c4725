"""The store of a hub that shares its data with other hubs: writes to slots, reads over all slots.

Rows of a slot of this hub go to its store; rows of another slot go to the hub that owns it. Answers come from one
snapshot of PostgreSQL, so every hub gives the same answers, and no hub asks another.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from stallscope.errors import BadInput, Busy, Overloaded, StallscopeError, StorageFailed
from stallscope.store.hub import schema
from stallscope.store.hub.batches import Batch, BatchMember, Receipt, separated
from stallscope.store.hub.compactor import CompactorTotals
from stallscope.store.hub.damage import Damage
from stallscope.store.hub.duck_journal import FILE_NAME
from stallscope.store.hub.folder_lock import locked
from stallscope.store.hub.hot import Snapshot
from stallscope.store.hub.job_filter import JobFilter
from stallscope.store.hub.journal import Segment, line
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.memory_size import process_memory
from stallscope.store.hub.questions import Questions, question_text
from stallscope.store.hub.row_bounds import NO_BOUNDS, RowBounds
from stallscope.store.hub.store import HubStore
from stallscope.store.hub.totals import total
from stallscope.store.hub.unexamined import Unexamined
from stallscope.store.hub.writer import Counters, Listener
from stallscope.store.shared import bucket_owner, peer_port, postgres_schema, sweep
from stallscope.store.shared.bucket import Bucket, ObjectMissing
from stallscope.store.shared.leases import Leases, Member, MemberState
from stallscope.store.shared.membership import Membership
from stallscope.store.shared.postgres import LEASE_CONNECTIONS, Postgres
from stallscope.store.shared.postgres_journal import Lease, PostgresJournal
from stallscope.store.shared.segment_cache import SegmentCache, SlotFiles
from stallscope.store.shared.slots import by_slot
from stallscope.store.shared.tenant_snapshots import Snapshots

_LOG = logging.getLogger(__name__)
_SWEEP_S = 30.0
_UNLISTED_EVERY = 2880
"""Sweeps between two listings of the bucket: once a day."""
_SQL_FETCH_S, _QUESTION_FETCH_S = 7.0, 30.0
"""Most time to fetch files before an answer: SQL has a time limit of 10 s, clients of tools wait longer."""
_PROBE_S = 2.0
"""Between two requests that ask whether the bucket is back."""
_FIRST_UNLISTED = 120
"""An hour after the start, so that a hub that is restarted every day also lists the bucket."""
_SLOT_SHARE = 4
"""A slot may use this part of the memory for unsealed rows; the limit of the process covers all slots."""


class Closable(Protocol):
    """A part of a hub that works on one slot's store."""

    def close(self) -> None:
        """Stop."""


@dataclass
class _Slot:
    store: HubStore
    work: Closable
    ended: Callable[["_Slot"], None]
    is_quiet: bool = False

    def quiesce(self) -> None:
        if not self.is_quiet:
            self.is_quiet = True
            self.work.close()
            self.store.end_maintenance()

    def close(self) -> None:
        try:
            self.quiesce()
        finally:
            self.store.close()
            self.ended(self)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Where the shared data is, and how this hub takes part. peer_listen, ingest: HOST:PORT, see leases.Member."""

    postgres: str
    bucket: str
    cache: Path
    name: str
    version: str
    peer_listen: str
    peer_host: str
    ingest: str = ""
    lease_s: float = 10.0
    max_cache_bytes: int = 100_000_000_000


class SharedStore:
    """An open store. Thread-safe; must be closed with close()."""

    def __init__(
        self,
        sharing: Sharing,
        limits: Limits,
        *,
        work: Callable[[HubStore], Closable],
    ):
        """work: starts what works on a slot's store, its diagnosis; closed before the store.

        Raises BadInput, StorageFailed, NewerSchema.
        """
        self._limits = limits
        self._work = work
        self._listeners: list[Listener] = []
        self._is_closed = False
        self.unexamined = Unexamined()
        self.n_forwarded = 0
        self._totals_lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._ended_counters, self._ended_kept = Counters(), CompactorTotals()
        with ExitStack() as stack:  # closed here only if a step fails
            self._connect(sharing, limits, stack)
            stack.pop_all()
        self.membership.start()
        self._ended = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="bucket-sweep", daemon=True)
        self._sweeper.start()
        self._prober = threading.Thread(target=self._probe_bucket, name="bucket-probe", daemon=True)
        self._prober.start()

    def _connect(self, sharing: Sharing, limits: Limits, stack: ExitStack) -> None:
        """Connect to PostgreSQL and the bucket, and open the port for other hubs."""
        self.folder = sharing.cache.absolute()
        if (self.folder / FILE_NAME).exists():
            raise BadInput(
                f"{self.folder} has the data of a single hub, but with --shared the folder is only a cache, whose files"
                " are deleted; choose another path with --db"
            )
        self._lock = locked(self.folder)
        stack.callback(os.close, self._lock)
        connected = partial(
            Postgres, sharing.postgres, name=sharing.name, stopped_s=max(0.5, sharing.lease_s / 2)
        )
        self.postgres = stack.enter_context(closing(connected()))
        self._for_leases = stack.enter_context(closing(connected(max_connections=LEASE_CONNECTIONS)))
        self.bucket = Bucket(sharing.bucket)
        self.postgres.checked()
        self.bucket.checked()
        postgres_schema.prepare(self.postgres)
        bucket_owner.claim(self.postgres, self.bucket)
        self._cache = stack.enter_context(
            closing(SegmentCache(self.folder, self.bucket, max_bytes=sharing.max_cache_bytes))
        )
        self.damage = Damage(self.folder, needs_restart=False)
        self._questions = stack.enter_context(closing(Questions(self.folder, limits)))
        self._snapshots = Snapshots(self.postgres, self.bucket)
        secret = postgres_schema.secret(self.postgres)
        self._peers = peer_port.Peers(secret)
        cert, key = peer_port.certificate()
        try:
            self._server, port = peer_port.server(
                self._of_peer, sharing.peer_listen, secret=secret, cert=cert, key=key
            )
        except OSError as error:
            raise BadInput(
                f"--peer: cannot listen at {sharing.peer_listen}; choose another address"
            ) from error
        self._server.start()
        stack.callback(lambda: self._server.stop(None).wait())
        member = Member(
            name=sharing.name,
            peer=f"{sharing.peer_host}:{port}",
            certificate=cert.decode(),
            ingest=sharing.ingest,
            version=sharing.version,
        )
        self._leases = Leases(self._for_leases, member, lease_s=sharing.lease_s)
        self.membership = Membership(
            self._for_leases,
            self._leases,
            opened=self._opened,
            with_data=self._with_data,
            state=self._state,
            learned=self._learn,
        )

    # slots of this hub

    def _opened(self, lease: Lease, lost: Callable[[], None]) -> _Slot:
        limits = replace(
            self._limits,
            max_bytes=sys.maxsize,  # the files are in the bucket, not on this disk: only their age limits them
            max_hot_bytes=self._limits.max_hot_bytes // _SLOT_SHARE,
            sealer_memory_bytes=self._limits.sealer_memory_bytes // _SLOT_SHARE,
        )
        store = HubStore(
            PostgresJournal(self.postgres, lease, self.bucket, lost=lost),
            limits,
            files=SlotFiles(self._cache, slot=lease.slot, epoch=lease.epoch),
            questions=self._questions,
            clock_ns=lambda: time.time_ns() - self._leases.clock_ahead_ns,
        )
        try:
            store.unexamined, store.damage = self.unexamined, self.damage
            for listener in self._listeners:
                store.subscribe(listener)
            slot = _Slot(store, self._work(store), self._slot_ended)
            with self._totals_lock:
                self._slots.append(slot)
            return slot
        except BaseException:
            store.close()
            raise

    def _slot_ended(self, slot: _Slot) -> None:
        with self._totals_lock:
            self._slots.remove(slot)
            self._ended_counters = _counters([self._ended_counters, slot.store.counters])
            self._ended_kept = total([self._ended_kept, slot.store.kept])

    def _with_data(self, slots: list[int]) -> set[int]:
        tables = ("journal", "segments", *schema.KEPT)
        exists = " OR ".join(f"EXISTS (SELECT 1 FROM {name} t WHERE t.slot = s.slot)" for name in tables)
        with self.postgres.transaction() as db:
            rows = db.execute(f"SELECT slot FROM unnest(%s::int[]) AS s (slot) WHERE {exists}", [slots])
            return {slot for (slot,) in rows.fetchall()}

    def _state(self) -> dict[str, Any]:
        """For other hubs and `hub status`: queues, rows that were not examined here, and the state of the bucket."""
        lags = {slot: each.store.queued()[0] for slot, each in self.membership.open_slots()}
        return {
            "queue_rows": lags,
            "unexamined": self.unexamined.known(),
            "bucket_away_s": round(self.bucket.away_s(), 1),
        }

    def _learn(self, others: list[MemberState]) -> None:
        self._peers.cancel_moved(self.membership.owner_name)
        self.unexamined.learn([tuple(each) for other in others for each in other.state.get("unexamined", [])])

    # writing

    def append(self, batch: Batch) -> "Future[Receipt]":
        """Store a batch at the owners of its clusters. Raises BadInput, Overloaded.

        Each cluster's rows are stored all or nothing; a batch of several clusters is repeated whole after a failure,
        and parts that are stored already are recognised by its id.
        """
        parts = by_slot(batch)
        futures = [self._append_part(slot, part) for slot, part in parts.items()]
        return futures[0] if len(futures) == 1 else _all_of(futures, batch.n_rows)

    def _append_part(self, slot: int, part: Batch) -> "Future[Receipt]":
        store = self.membership.store(slot)
        if store is not None:
            return store.append(part)
        owner = self.membership.owner(slot)
        if owner is None or owner.name == self.membership.member.name:
            raise Overloaded("the cluster moves to another hub; send again", 1.0)
        self.n_forwarded += 1
        return self._peers.send(owner, slot, part)

    def _of_peer(self, slot: int, part: Batch) -> "Future[Receipt]":
        store = self.membership.store(slot)
        if store is None:
            raise Overloaded("the cluster moves to another hub; send again", 0.5)
        return store.append(replace(part, tables=_known(part.tables)))

    def ingest_of(self, tenant: str, cluster: str) -> str:
        """Where agents of a cluster should send: HOST:PORT of its owner, empty if it is this hub or unknown."""
        from stallscope.store.shared.slots import slot_of

        owner = self.membership.owner(slot_of(tenant, cluster))
        return "" if owner is None or owner.name == self.membership.member.name else owner.ingest

    def append_together(self, batch: Batch, members: Sequence[BatchMember]) -> None:
        """Store the rows of several requests; the future of each resolves once its rows are stored."""
        for part, member in separated(batch, members):
            try:
                self.append(part).add_done_callback(partial(_pass_on, member.stored))
            except StallscopeError as error:
                member.stored.set_exception(error)

    def announced(self) -> AbstractContextManager[None]:
        """Nothing: the slot of the rows is not known yet."""
        return nullcontext()

    def check_room(self) -> None:
        """Raises Overloaded while this hub accepts no rows."""
        if not self.membership.is_connected():
            raise Overloaded("PostgreSQL does not answer; retry later", 2.0)
        if process_memory().is_above(self._limits.max_memory_bytes):
            raise Overloaded(
                "the hub has reached its memory limit; send again later", self._limits.retry_after_s
            )

    def subscribe(self, listener: Listener) -> None:
        """Call the listener with each batch that this hub commits, in the thread of a writer."""
        self._listeners.append(listener)
        for store in self.membership.stores():
            store.subscribe(listener)

    # reading

    def ask(
        self, question: str, *, tenant: str, params: Mapping[str, object], job: JobFilter | None = None
    ) -> pa.Table:
        """The answer to a named question over the tenant's current data. Raises NotFound, BadInput, StorageFailed."""
        sql = question_text(question)
        bounds = self._questions.bounds(sql, params=params, job=job)
        snapshot = self._fetched(tenant, bounds.keys(), bounds, within_s=_QUESTION_FETCH_S)
        try:
            return self._questions.answer(sql, snapshot, params=params, job=job)
        except duckdb.Error as error:
            if any(snapshot.segments.values()) and self._set_aside(snapshot):
                raise StorageFailed(f"a sealed file is damaged ({line(error)}); repeat the query") from error
            raise BadInput(f"question {question}: {line(error)}") from error

    def snapshot(
        self,
        tenant: str,
        *,
        tables: Collection[str] = schema.TABLES.keys(),
        bounds: Mapping[str, RowBounds] = NO_BOUNDS,
    ) -> Snapshot:
        """The tenant's data of these tables at one moment; its files are in the folder.

        bounds: without slots and files that have no rows within the bounds of their table.
        Raises StorageFailed, Overloaded, Busy.
        """
        return self._fetched(tenant, tables, bounds, within_s=_SQL_FETCH_S)

    def _fetched(
        self, tenant: str, tables: Collection[str], bounds: Mapping[str, RowBounds], *, within_s: float
    ) -> Snapshot:
        until_s = time.monotonic() + within_s
        snapshot = self._listed(tenant, tables, bounds)
        try:
            try:
                self._cache.fetch_for_query(_files(snapshot), until_s=until_s)
            except ObjectMissing:
                self._set_missing_aside(_files(snapshot), until_s=until_s)
                snapshot = self._listed(tenant, tables, bounds)
                self._cache.fetch_for_query(_files(snapshot), until_s=until_s)
        except Overloaded as error:
            raise Busy("the bucket does not answer; repeat the query later") from error
        return snapshot

    def _listed(
        self, tenant: str, tables: Collection[str], bounds: Mapping[str, RowBounds] = NO_BOUNDS
    ) -> Snapshot:
        """The tenant's data of these tables within the bounds, without the files that are set aside."""
        snapshot = self._snapshots.snapshot(tenant, tables, bounds)
        bad = {each.segment.path for each in self.damage.unreadable(tenant)}
        segments = {
            table: tuple(segment for segment in each if segment.path not in bad)
            for table, each in snapshot.segments.items()
        }
        return replace(snapshot, segments=segments) if bad else snapshot

    def _set_missing_aside(self, segments: Sequence[Segment], *, until_s: float) -> None:
        for segment in segments:
            try:
                self._cache.fetch_for_query([segment], until_s=until_s)
            except ObjectMissing as error:
                self.damage.set_aside(segment, str(error))

    def set_aside_damaged(self, tenant: str) -> int:
        """Check the tenant's sealed files after a failure. Returns the number of damaged files."""
        return self._set_aside(self._listed(tenant, schema.SENT.keys()))

    def _set_aside(self, snapshot: Snapshot) -> int:
        """Set the damaged and missing files of a snapshot aside. Returns their number. Raises StorageFailed."""
        n_bad = 0
        for segment in _files(snapshot):
            if reason := self._cache.reason_unreadable_inside(segment):
                self.damage.set_aside(segment, reason)
                n_bad += 1
        return n_bad

    def tenants(self) -> list[str]:
        """The tenants with any data."""
        return self._snapshots.tenants()

    def tail(self, tenant: str, table: str, *, since_us: int) -> pa.Table:
        """Rows of a table that were committed since then to the slots of this hub."""
        empty = schema.arrow_schema(schema.TABLES[table]).empty_table()
        pieces = [store.tail(tenant, table, since_us=since_us) for store in self.membership.stores()]
        return pa.concat_tables([empty, *pieces]).sort_by("received_at")

    def tail_rows(self, tenant: str, table: str, *, since_us: int) -> int:
        """Upper bound on the number of rows that tail() would return."""
        return sum(store.tail_rows(tenant, table, since_us=since_us) for store in self.membership.stores())

    # numbers

    def queued(self) -> tuple[int, int]:
        """Rows and bytes that wait for a commit."""
        each = [store.queued() for store in self.membership.stores()]
        return sum(rows for rows, _ in each), sum(n_bytes for _, n_bytes in each)

    @property
    def hot_bytes(self) -> int:
        """Bytes of unsealed rows in memory."""
        return sum(store.hot_bytes for store in self.membership.stores())

    @property
    def counters(self) -> Counters:
        """Totals since the start, of all slots that this hub has had."""
        with self._totals_lock:
            return _counters([self._ended_counters, *(slot.store.counters for slot in self._slots)])

    @property
    def kept(self) -> CompactorTotals:
        """Totals of the maintenance since the start, of all slots that this hub has had."""
        with self._totals_lock:
            return total([self._ended_kept, *(slot.store.kept for slot in self._slots)])

    def numbers(self) -> dict[str, float]:
        """Gauges and counters of the shared store, for /metrics."""
        return {
            "n_slots": len(self.membership.owned_slots()),
            "n_open_slots": len(self.membership.stores()),
            "n_hubs": sum(each.is_alive for each in self.membership.members()),
            "n_postgres_away": float(self.membership.away_s() > 0),
            "n_bucket_away": float(self.bucket.is_away()),
            "clock_ahead_seconds": self.clock_ahead_s(),
            "forwarded_batches": self.n_forwarded,
            "fetched_segments": self._cache.n_fetched,
        }

    def clock_ahead_s(self) -> float:
        """How far the clock of this machine is ahead of the clock of PostgreSQL."""
        return self._leases.clock_ahead_ns / 1e9

    def away(self) -> dict[str, float]:
        """How long PostgreSQL and the bucket have not answered, in s; 0 while they answer."""
        return {
            "postgres_away_s": round(self.membership.away_s(), 1),
            "bucket_away_s": round(self.bucket.away_s(), 1),
        }

    # the end

    def drain(self) -> None:
        """Hand all slots over, while this hub still forwards the batches that it receives."""
        self.membership.drain()

    def close(self) -> None:
        """Commit the waiting rows, and leave the cluster; safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ended.set()
        self.membership.close()
        self._server.stop(2.0).wait()
        self._sweeper.join()
        self._prober.join()
        self._peers.close()
        self._questions.close()
        self._cache.close()
        self._for_leases.close()
        self.postgres.close()
        os.close(self._lock)

    def _probe_bucket(self) -> None:
        while not self._ended.wait(_PROBE_S):
            self.bucket.probe()

    def _sweep(self) -> None:
        n = 0
        while not self._ended.wait(_SWEEP_S):
            n += 1
            with suppress(StallscopeError):
                self._peers.keep({each.member.name for each in self.membership.members() if each.is_alive})
                slots = self.membership.owned_slots()
                sweep.remove_dropped(self.postgres, self.bucket, slots, grace_s=2 * self._limits.grace_s)
                self._cache.trim()
                self._check_damaged()
                if 0 in slots and n % _UNLISTED_EVERY == _FIRST_UNLISTED:  # one hub of all
                    n_removed = sweep.remove_unlisted(self.postgres, self.bucket)
                    _LOG.info("the bucket: %d unlisted objects removed", n_removed)

    def _check_damaged(self) -> None:
        """Serve files again that were restored, and forget files that no list names any more."""
        for bad in self.damage.unreadable():
            with self.postgres.transaction() as db:
                is_listed = db.execute(
                    "SELECT 1 FROM segments WHERE path = %s", [bad.segment.path]
                ).fetchone()
            if not is_listed or not self._cache.reason_unreadable_inside(bad.segment):
                self.damage.restored(bad.segment)


def _known(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Rows of another hub, which may be newer, with the columns of this version.

    Raises Overloaded for values of unknown columns: the sender keeps them until this hub is upgraded.
    """
    out = {}
    for name, rows in tables.items():
        names = schema.TABLES[name].names if name in schema.TABLES else []
        unknown = [column for column in rows.column_names if column not in names]
        if not names or any(rows[column].null_count < len(rows) for column in unknown):
            raise Overloaded("the hub that owns the cluster is of an older version; send again later", 10.0)
        out[name] = rows.drop_columns(unknown) if unknown else rows
    return out


def _files(snapshot: Snapshot) -> list[Segment]:
    return [segment for each in snapshot.segments.values() for segment in each]


def _counters(parts: Sequence[Counters]) -> Counters:
    return replace(total(parts), longest_hold_s=max(part.longest_hold_s for part in parts))


def _pass_on(to: "Future[Receipt]", done: "Future[Receipt]") -> None:
    """Resolve a future as another future."""
    if error := done.exception():
        to.set_exception(error)
    else:
        to.set_result(done.result())


def _all_of(futures: list["Future[Receipt]"], n_rows: int) -> "Future[Receipt]":
    """Resolves when all parts are stored; fails if any part fails."""
    result: Future[Receipt] = Future()
    lock, left = threading.Lock(), [len(futures)]

    def settled(done: "Future[Receipt]") -> None:
        with lock:
            left[0] -= 1
            if result.done():
                return
            if error := done.exception():
                result.set_exception(error)
            elif not left[0]:
                receipts = [each.result() for each in futures]
                result.set_result(
                    Receipt(
                        n_rows,
                        all(each.is_duplicate for each in receipts),
                        max(each.received_us for each in receipts),
                    )
                )

    for each in futures:
        each.add_done_callback(settled)
    return result
