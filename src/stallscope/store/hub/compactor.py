"""The maintenance thread: it seals hot rows, merges small files, deletes expired files, and requests checkpoints.

Files are written here, in parallel to ingest; the writer's thread only runs the short transaction that replaces hot
rows or files by a file. A failure (a full disk) is counted, logged, and retried in the next round.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

from stallscope.errors import StallscopeError, StorageFailed
from stallscope.store.hub import round_lateness
from stallscope.store.hub.file_sums import FileSums
from stallscope.store.hub.hot import CommittedRows, HotRows
from stallscope.store.hub.journal import Journal, Segment
from stallscope.store.hub.lateness import DEFAULT_MIN_LATE_NS
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.memory_size import process_memory
from stallscope.store.hub.owner_retention import OWNER_TABLES
from stallscope.store.hub.segment_files import SegmentFiles
from stallscope.store.hub.segments import Sealer
from stallscope.store.hub.writer import Writer

_LOG = logging.getLogger(__name__)
_EXPIRE_EVERY_S = 30.0
_MERGE_AT_LEAST = 8
_SUMS_A_ROUND = 4
_FILE = 2
"""Largest number of rows in a sealed file, as a multiple of the rows that trigger a seal."""
_QUIET_WAL_BYTES = 4 << 20


@dataclass
class CompactorTotals:
    """Totals since the start, for /metrics."""

    sealed_segments: int = 0
    sealed_rows: int = 0
    merged_segments: int = 0
    expired_segments: int = 0
    expired_verdicts: int = 0
    checkpoints: int = 0
    housekeeping_failures: int = 0


@dataclass
class Compactor:
    """Maintenance of one store. start() starts the thread; every step can also be called directly."""

    journal: Journal
    files: SegmentFiles
    hot: HotRows
    writer: Writer
    lateness: FileSums
    ledgers: FileSums
    limits: Limits
    set_aside_damaged: Callable[[str], int]
    numbers: CompactorTotals = field(default_factory=CompactorTotals)

    def __post_init__(self) -> None:
        self._sealer = Sealer(
            self.files.folder, prefix=self.files.prefix, memory_bytes=self.limits.sealer_memory_bytes
        )
        self._retired: list[tuple[float, Segment]] = []
        self._medians = self.journal.round_medians()
        self._ended = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._expired_s = 0.0
        self._thread = threading.Thread(target=self._run, name="hub-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._sealer.close()

    def _run(self) -> None:
        while not self._ended.wait(self.limits.maintenance_s):
            process_memory().return_early(self.limits.max_memory_bytes)
            try:
                self.round()
            except StallscopeError as error:
                self.numbers.housekeeping_failures += 1
                _LOG.error("store maintenance: %s", error)
            except Exception:  # noqa: BLE001 (maintenance continues; the failure is counted and logged)
                self.numbers.housekeeping_failures += 1
                _LOG.exception("store maintenance failed; it will be retried")

    def round(self) -> None:
        """Run all steps that are due."""
        with self._one_at_a_time:
            if not self.files.is_away():
                self._seal_what_is_due()
                self._merge_small()
            self._sum_files()
            if time.monotonic() - self._expired_s > _EXPIRE_EVERY_S or self.writer.has_too_many_ids():
                self._expired_s = time.monotonic()
                self.expire()
            self._remove_retired()
            self._checkpoint_if_due()

    def seal_all(self) -> None:
        """Seal every hot row now."""
        with self._one_at_a_time:
            for (tenant, table), (n_rows, _) in self.hot.sizes().items():
                while n_rows > 0 and (n_sealed := self._seal(tenant, table, settle_s=None)):
                    n_rows -= n_sealed

    def _seal_what_is_due(self) -> None:
        limits = self.limits
        for (tenant, table), (n_rows, age_s) in self.hot.sizes().items():
            is_old = age_s > limits.seal_after_s
            n_left = n_rows
            while n_left >= limits.seal_rows or (is_old and n_left > 0):
                if not (n_sealed := self._seal(tenant, table, settle_s=limits.settle_s)):
                    break
                n_left -= n_sealed
        while self._are_too_many_hot():
            largest = max(self.hot.sizes().items(), key=lambda item: item[1][0])[0]
            self._seal(*largest, settle_s=None)

    def _are_too_many_hot(self) -> bool:
        sizes = self.hot.sizes()
        n_rows = sum(n for n, _ in sizes.values())
        return n_rows > self.limits.max_hot_rows or bool(sizes and self.is_hot_end_full())

    def is_hot_end_full(self) -> bool:
        """Whether hot rows use half of their memory limit: rows are sealed before senders are refused."""
        return self.hot.n_bytes > self.limits.max_hot_bytes // 2

    def _seal(self, tenant: str, table: str, *, settle_s: float | None) -> int:
        """Seal rows committed settle_s ago or earlier (None: all): by then the other ranks of a round have arrived.

        Seals at most one file's rows, and at most the rows that are sorted in memory. Returns the number of rows.
        """
        now, later = self.hot.begin_seal(
            tenant,
            table,
            settle_s,
            max_rows=_FILE * self.limits.seal_rows,
            max_bytes=self._sealer.max_sorted_bytes,
        )
        if not now:
            return 0
        until_us = now[-1].last_us
        rows, medians = pa.concat_tables(_rows(now)), None
        if table == "collectives":
            known = self._medians.get(tenant, round_lateness.MEDIANS.empty_table())
            late_ns, medians = round_lateness.lateness(self._sealer.db, rows, _rows(later), known=known)
            rows = rows.set_column(rows.column_names.index("late_ns"), "late_ns", late_ns)
        segment = self._sealer.sealed_table(tenant, table, rows, sealed_us=until_us)
        self.files.put(segment)

        def replace_files() -> None:
            self.journal.seal(segment, until_us, medians=medians)
            self.hot.sealed(tenant, table, until_us, segment=segment)

        self.writer.call(replace_files).result()
        if medians is not None:
            self._medians[tenant] = medians
        self.numbers.sealed_segments += 1
        self.numbers.sealed_rows += segment.n_rows
        # While rows wait, seals follow each other.
        process_memory().return_early(self.limits.max_memory_bytes)
        return segment.n_rows

    def _merge_small(self) -> None:
        """Merge neighbouring files until they are large: many small files slow down every query."""
        for tenant in self.hot.tenants():
            for segments in self.hot.segments(tenant).values():
                group = _to_merge(segments, self.limits.merge_rows, self._max_span_us(segments))
                if len(group) >= _MERGE_AT_LEAST:
                    try:
                        self.files.fetch(group)
                        merged = self._sealer.merged(group)
                    except StorageFailed:
                        if not self.set_aside_damaged(tenant):
                            raise
                        continue
                    self.files.put(merged)
                    self._replace(group, [merged])
                    self.numbers.merged_segments += len(group)

    def _sum_files(self) -> None:
        """Compute some of the sums that queries will need, newest files first."""
        for tenant in self.hot.tenants():
            segments = self.hot.segments(tenant).get("collectives", ())
            for sums, params in ((self.lateness, {"min_late_ns": DEFAULT_MIN_LATE_NS}), (self.ledgers, {})):
                due = sums.missing(segments, params)[:_SUMS_A_ROUND]
                with suppress(duckdb.Error):  # a query reports the error of a damaged file
                    sums.sums(self._sealer.db, due, params)

    def expire(self) -> None:
        """Delete expired rows, closed verdicts and ended jobs, and the oldest files beyond the limit in bytes."""
        now_ns = time.time_ns()
        all_of_them = [
            s for t in self.hot.tenants() for segments in self.hot.segments(t).values() for s in segments
        ]
        all_of_them.sort(key=_age_ns)
        total = sum(segment.n_bytes for segment in all_of_them)
        gone: dict[tuple[str, str], list[Segment]] = {}
        for segment in all_of_them:
            is_of_owners = self.limits.owner_max_age_s is not None and segment.table in OWNER_TABLES
            is_old = _age_ns(segment) < now_ns - self._max_age_s(segment.table) * 1e9
            if not is_old and (is_of_owners or total <= self.limits.max_bytes):
                continue
            total -= segment.n_bytes
            gone.setdefault((segment.tenant, segment.table), []).append(segment)
        for group in gone.values():
            self._replace(group, [])
            self.numbers.expired_segments += len(group)
        oldest_us = time.time_ns() // 1000 - int(self.limits.batch_ids_s * 1e6)
        self.writer.call(lambda: self.writer.forget_batches(oldest_us)).result()
        closed_us = now_ns // 1000 - int(self.limits.max_age_s * 1e6)
        n_gone: int = self.writer.call(lambda: self.writer.forget_verdicts(closed_us)).result()
        self.numbers.expired_verdicts += n_gone
        self.writer.call(lambda: self.writer.forget_jobs(closed_us)).result()
        if self.limits.owner_max_age_s is not None:
            over_us = now_ns // 1000 - int(self.limits.owner_max_age_s * 1e6)
            self.writer.call(lambda: self.writer.forget_owners(over_us)).result()

    def _max_span_us(self, segments: Sequence[Segment]) -> float:
        """A file of owners expires as a whole, so it spans a tenth of their age at most."""
        is_of_owners = bool(segments) and segments[0].table in OWNER_TABLES
        return self._max_age_s(segments[0].table) * 1e5 if is_of_owners else math.inf

    def _max_age_s(self, table: str) -> float:
        own = self.limits.owner_max_age_s if table in OWNER_TABLES else None
        return self.limits.max_age_s if own is None else own

    def _replace(self, gone: Sequence[Segment], new: Sequence[Segment]) -> None:
        tenant, table = gone[0].tenant, gone[0].table

        def replace_files() -> None:
            self.journal.replace_segments(gone, new)
            self.hot.replaced(tenant, table, tuple(gone), new=tuple(new))

        self.writer.call(replace_files).result()
        self._retired += [(time.monotonic(), segment) for segment in gone]

    def _remove_retired(self) -> None:
        """Delete replaced files after some minutes: a query may still be reading them."""
        now_s = time.monotonic()
        due = [segment for when_s, segment in self._retired if now_s - when_s >= self.limits.grace_s]
        for sums in (self.lateness, self.ledgers):
            sums.forget(due)
        self._retired = [entry for entry in self._retired if now_s - entry[0] < self.limits.grace_s]
        for segment in due:
            self.files.remove(segment)

    def _checkpoint_if_due(self) -> None:
        wal_bytes = self.journal.wal_bytes()
        is_quiet = self.writer.quiet_s() >= self.limits.quiet_s and wal_bytes > _QUIET_WAL_BYTES
        if is_quiet or wal_bytes > self.limits.wal_bytes:
            self.writer.call(self.journal.checkpoint).result()
            self.numbers.checkpoints += 1


def _rows(pieces: Sequence[CommittedRows]) -> list[pa.Table]:
    return [piece.rows for piece in pieces]


def _to_merge(segments: Sequence[Segment], merge_rows: int, span_us: float) -> list[Segment]:
    """The first run of small neighbours that fit into one file, sealed within a time."""
    group: list[Segment] = []
    n_rows = 0
    for segment in segments:
        is_small = segment.n_rows <= merge_rows // 4
        is_near = not group or segment.sealed_us - group[0].sealed_us <= span_us
        if is_small and is_near and n_rows + segment.n_rows <= merge_rows:
            group.append(segment)
            n_rows += segment.n_rows
        elif len(group) >= _MERGE_AT_LEAST:
            break
        else:
            group, n_rows = ([segment], segment.n_rows) if is_small else ([], 0)
    return group


def _age_ns(segment: Segment) -> int:
    """Time of the newest row in a file. Owners are sent again with the time of their first row."""
    if segment.table in OWNER_TABLES:
        return segment.sealed_us * 1000
    return segment.max_ts_ns if segment.max_ts_ns is not None else segment.sealed_us * 1000
