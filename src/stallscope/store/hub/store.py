"""The hub's store for other packages: append batches, run named questions, get a tenant's files and hot rows."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import BadInput, Overloaded, StorageFailed
from stallscope.store.hub import schema
from stallscope.store.hub.batches import Batch, BatchMember, Receipt, completed
from stallscope.store.hub.compactor import Compactor, CompactorTotals
from stallscope.store.hub.damage import UNREADABLE, Damage, Position
from stallscope.store.hub.duck_journal import DuckJournal
from stallscope.store.hub.hot import HotRows, Snapshot
from stallscope.store.hub.job_filter import JobFilter
from stallscope.store.hub.journal import Journal, Segment, line
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.nodes import Nodes
from stallscope.store.hub.questions import Questions, question_text
from stallscope.store.hub.row_bounds import ALL_ROWS, NO_BOUNDS, RowBounds, selected
from stallscope.store.hub.segment_files import FolderFiles, SegmentFiles
from stallscope.store.hub.unexamined import Unexamined
from stallscope.store.hub.writer import Counters, Listener, Writer

_LOG = logging.getLogger(__name__)
_CHECK_EVERY_S = 60.0

__all__ = ["Batch", "HubStore", "Limits", "Receipt", "Snapshot"]


class HubStore:
    """An open store. Thread-safe; must be closed with close()."""

    def __init__(
        self,
        journal: Journal,
        limits: Limits,
        *,
        files: SegmentFiles,
        questions: Questions,
        position: Position | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ):
        """position: notes the last commit, for a journal that may lose its tail. clock_ns: the time of commits."""
        self.folder = files.folder
        self._journal, self._files, self._limits = journal, files, limits
        self._owned = ExitStack()
        self._is_closed = False
        self._hot = HotRows()
        self.damage = Damage(self.folder)
        self.unexamined = Unexamined()
        self._checked_s: dict[str, float] = {}
        self._position, self._questions = position, questions
        self._load()
        self._writer = Writer(
            journal,
            self._hot,
            nodes=Nodes(journal.kept("nodes")),
            limits=limits,
            committed=self._note,
            clock_ns=clock_ns,
        )
        self._compactor = Compactor(
            journal,
            files,
            self._hot,
            self._writer,
            questions.lateness.by_file,
            questions.ledgers.by_file,
            limits,
            self.set_aside_damaged,
        )
        self._compactor.start()

    @classmethod
    def open(cls, folder: Path, limits: Limits | None = None) -> "HubStore":
        """Open the store in a folder; create it if missing. Raises StorageFailed (in use, unwritable), NewerSchema."""
        folder, limits = folder.absolute(), limits or Limits()
        with ExitStack() as stack:
            journal = stack.enter_context(
                closing(DuckJournal.open(folder, memory_bytes=limits.journal_memory_bytes))
            )
            position = stack.enter_context(closing(Position(folder)))
            questions = stack.enter_context(closing(Questions(folder, limits)))
            store = cls(journal, limits, files=FolderFiles(folder), questions=questions, position=position)
            store._owned = stack.pop_all()
        return store

    def _load(self) -> None:
        """Load the content; damaged files are set aside, the others are served."""
        known = self._journal.segments()
        if self._position is not None:
            self.damage.check_position(self._journal.latest_us())
        of_table: dict[tuple[str, str], list[Segment]] = {}
        for segment in known:
            if reason := self._files.reason_unreadable(segment):
                self.damage.set_aside(segment, reason)
            else:
                of_table.setdefault((segment.tenant, segment.table), []).append(segment)
        for (tenant, table), new in of_table.items():
            self._hot.replaced(tenant, table, (), new=tuple(new))
        now_us = time.time_ns() // 1000
        for entry in self._journal.entries():
            rows = completed(entry.table, entry.rows, entry.tenant, received_us=entry.received_us)
            age_s = max(0.0, (now_us - entry.received_us) / 1e6)
            self._hot.add(entry.tenant, entry.table, rows, received_us=entry.received_us, age_s=age_s)
        self.damage.note_unlisted(self._files.opened(known, latest_us=self._journal.latest_us()))

    def _note(self, received_us: int) -> None:
        if self._position is not None:
            self._position.note(received_us)

    def append(self, batch: Batch) -> "Future[Receipt]":
        """Store a batch, all or nothing; the future resolves once it is on disk.

        Raises BadInput for rows that do not match their table, Overloaded if the queue is full.
        """
        return self._writer.submit(batch)

    def append_together(self, batch: Batch, members: Sequence[BatchMember]) -> None:
        """Store the rows of several requests, each all or nothing; the future of each resolves once they are on disk.

        Raises the errors of append(); then nothing is stored.
        """
        self._writer.submit_together(batch, members)

    def announced(self) -> AbstractContextManager[None]:
        """Announces an append() inside the with block: small waiting batches are committed together with it."""
        return self._writer.announced()

    def ask(
        self, question: str, *, tenant: str, params: Mapping[str, object], job: JobFilter | None = None
    ) -> pa.Table:
        """The answer to a named question (a file in store/sql/hub/), over the tenant's current data.

        job: over the rows of this job only.

        Raises NotFound for an unknown question, BadInput for missing or wrong parameters.
        """
        sql = question_text(question)
        bounds = self._questions.bounds(sql, params=params, job=job)
        snapshot = self.snapshot(tenant, tables=bounds.keys(), bounds=bounds)
        try:
            return self._questions.answer(sql, snapshot, params=params, job=job)
        except duckdb.Error as error:
            if any(snapshot.segments.values()) and self.set_aside_damaged(tenant):
                raise StorageFailed(f"a sealed file is damaged ({line(error)}); repeat the query") from error
            raise BadInput(f"question {question}: {line(error)}") from error

    def set_aside_damaged(self, tenant: str) -> int:
        """Read the tenant's sealed files after a failure, and set aside the damaged files. Returns their number.

        Runs at most once a minute, because it reads all rows.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s.get(tenant, -_CHECK_EVERY_S) < _CHECK_EVERY_S:
            return 0
        self._checked_s[tenant] = now_s
        n_bad = 0
        for table, sealed in self._hot.segments(tenant).items():
            for segment in sealed:
                if reason := self._files.reason_unreadable_inside(segment):
                    self.damage.set_aside(segment, reason)
                    self._hot.replaced(tenant, table, (segment,), new=())
                    n_bad += 1
        return n_bad

    def snapshot(
        self,
        tenant: str,
        *,
        tables: Collection[str] = schema.TABLES.keys(),
        bounds: Mapping[str, RowBounds] = NO_BOUNDS,
    ) -> Snapshot:
        """The tenant's sealed files and hot rows of these tables at one moment: no row duplicated or missing.

        bounds: without files that have no rows within the bounds of their table.
        """
        result = self._hot.snapshot(tenant, tables)
        kept = {name: self._writer.kept(name, tenant) for name in schema.KEPT if name in tables}
        segments = {
            name: selected(each, bounds.get(name, ALL_ROWS)) for name, each in result.segments.items()
        }
        return Snapshot(segments, {**result.hot, **kept})

    def tenants(self) -> list[str]:
        """The tenants with any data."""
        return self._hot.tenants()

    def check_room(self) -> None:
        """Raises Overloaded while the store accepts no more rows."""
        self._writer.check_room()

    @property
    def hot_bytes(self) -> int:
        """Bytes of unsealed rows in memory."""
        return self._hot.n_bytes

    def tail(self, tenant: str, table: str, *, since_us: int) -> pa.Table:
        """Rows of a table committed since then (us since 1970), sealed and hot, in commit order.

        Without the files that cannot be fetched now.
        """
        import pyarrow.parquet as pq

        data = self._hot.snapshot(tenant, (table,))
        since = pa.scalar(since_us, pa.timestamp("us", "UTC"))
        wanted = schema.arrow_schema(schema.TABLES[table])
        pieces = []
        for segment in data.segments.get(table, ()):
            if segment.sealed_us < since_us:
                continue
            try:
                self._files.fetch([segment])
            except (Overloaded, StorageFailed) as error:  # new rows are accepted and examined nevertheless
                _LOG.warning("%s: %d stored rows are not read again", error, segment.n_rows)
                continue
            path, filters = self.folder / segment.path, [("received_at", ">=", since)]
            try:
                pieces.append(pq.read_table(path, filters=filters, partitioning=None, schema=wanted))
            except UNREADABLE:
                self.set_aside_damaged(tenant)  # the other files are still useful
        hot = data.hot.get(table, wanted.empty_table())
        hot = hot.filter(pc.greater_equal(hot["received_at"], since))
        return pa.concat_tables([*(piece.cast(wanted) for piece in pieces), hot]).sort_by("received_at")

    def tail_rows(self, tenant: str, table: str, *, since_us: int) -> int:
        """Upper bound on the number of rows that tail() would return; reads no rows."""
        sealed = self._hot.segments(tenant).get(table, ())
        n_sealed = sum(segment.n_rows for segment in sealed if segment.sealed_us >= since_us)
        return n_sealed + self._hot.n_rows_since(tenant, table, since_us)

    @property
    def latest_us(self) -> int:
        """The time of the newest commit."""
        return self._writer.latest_us

    def has_too_many_batch_ids(self) -> bool:
        """Whether ids of batches beyond the limit wait for the housekeeping to forget them."""
        return self._writer.has_too_many_ids()

    def subscribe(self, listener: Listener) -> None:
        """Call the listener with each committed batch, in the writer's thread; it must not block."""
        self._writer.subscribe(listener)

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self._writer.counters

    @property
    def kept(self) -> CompactorTotals:
        """Totals of the maintenance since the start."""
        return self._compactor.numbers

    def seal_all(self) -> None:
        """Seal every hot row now, so that all data is in files."""
        self._compactor.seal_all()

    def end_maintenance(self) -> None:
        """Seal and merge no more; rows are accepted until close()."""
        self._compactor.close()

    def queued(self) -> tuple[int, int]:
        """Rows and bytes that wait for a commit."""
        return self._writer.queued()

    def close(self) -> None:
        """Commit the waiting rows and close the file; safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._compactor.close()
        self._writer.close()
        self._owned.close()
