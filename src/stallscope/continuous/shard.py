"""The diagnosis of a share of the clusters: a thread feeds their committed rows to streams and writes the verdicts.

There is one stream for each tenant and cluster. The writer's thread only adds committed batches to the backlog; the
shard's thread takes turns. It feeds each cluster's rows to its stream, and changes become rows of `verdicts` and
`causal_chains`: opened, replaced while an incident lasts, closed at its end. After a restart, of the hub or of the
process of the streams, it resumes from the latest stored rows. Rows that arrive too fast are sampled in whole rounds;
rows that are left out are counted, and reported in the verdicts.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stallscope.continuous import machine_incidents
from stallscope.continuous.backlog import (
    Backlog,
    BacklogLimits,
    ClusterTurn,
    Key,
    by_cluster,
    count_rows,
    in_parts,
    n_further,
)
from stallscope.continuous.continued import GRACE_S, ContinuedIncidents
from stallscope.continuous.job_rows import JobRows, as_examined
from stallscope.continuous.stream_process import ProcessEnded, StepFailed
from stallscope.continuous.streams import Diagnoses
from stallscope.continuous.verdict_rows import chain_row, stored_row, table_of
from stallscope.diagnose import NO_MORE_EVENTS, Change, JobState
from stallscope.errors import Overloaded, StallscopeError
from stallscope.store.hub import schema, traces
from stallscope.store.hub.batches import Batch, Receipt
from stallscope.store.hub.store_protocol import Store
from stallscope.store.hub.totals import total
from stallscope.store.hub.unexamined import OTHERS

_LOG = logging.getLogger(__name__)
_TICK_S = 0.25
_MAX_PAUSE_S = 0.05
_WARN_EVERY_S = 60.0
_MIN_RUN_S = 60.0
"""If the process of the streams ends again within this time, the stored rows are not fed again."""
_TAIL_S = 900.0
_MAX_TAIL_ROWS = 500_000
_RESUMED_ROWS = 50_000
"""Stored rows of one step: other clusters of the same process wait for it."""


@dataclass
class ShardTotals:
    """Totals since the start, for /metrics; diagnosis_lag_s: current waiting time of the oldest row."""

    diagnosis_rows: int = 0
    diagnosis_rows_left_out: int = 0
    diagnosis_failures: int = 0
    diagnosis_lag_s: float = 0.0
    verdicts_opened: int = 0
    verdicts_closed: int = 0

    @staticmethod
    def of_all(parts: Sequence["ShardTotals"]) -> "ShardTotals":
        """The totals of several shards; the largest lag."""
        return replace(total(parts), diagnosis_lag_s=max(part.diagnosis_lag_s for part in parts))


class Shard:
    """The diagnosis of the clusters for which owns() is true, in one thread. close() before the store is closed."""

    def __init__(
        self,
        store: Store,
        streams: Diagnoses,
        tail: Iterator[Batch],
        *,
        owns: Callable[[Key], bool],
        bounds: BacklogLimits | None = None,
    ):
        """tail: the latest stored rows, of any clusters; read in the thread."""
        self.numbers = ShardTotals()
        self._store, self._streams, self._owns = store, streams, owns
        self._left_out: dict[Key, tuple[int, int]] = {}
        self._warned_s: dict[Key, float] = {}
        self._opened_us: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any] | None]] = {}
        self._confirmed_ns: dict[Key, dict[str, int]] = {}
        self._continued = ContinuedIncidents()
        self._job_rows = JobRows()
        self._unwritten_jobs: dict[Key, dict[str, dict[str, Any]]] = {}
        self._jobs_under_way: dict[Key, tuple[Future[Receipt], dict[str, dict[str, Any]]]] = {}
        self._backlog = Backlog(bounds, owns=owns, skipped=self._skip)
        self._ticked_s = 0.0
        self._resumed_s = time.monotonic()
        self._is_interrupted = False
        self._thread = Thread(target=self._run, args=(tail,), name="hub-diagnosis", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. Open incidents stay open in the table, and are examined again at the next start."""
        self._backlog.end()
        self._thread.join()
        self._streams.close()

    def is_idle(self) -> bool:
        """Whether all committed rows have been examined."""
        return not self._backlog.n_waiting and not self._pending

    def confirmed_ns(self, tenant: str) -> dict[str, int]:
        """When the diagnosis last confirmed each open incident of a tenant, ns since 1970."""
        return {
            incident: at_ns
            for (owner, _), of_cluster in list(self._confirmed_ns.items())
            if owner == tenant
            for incident, at_ns in of_cluster.items()
        }

    def add(self, batch: Batch) -> None:
        """Take a committed batch; called in the writer's thread."""
        if self._backlog.add(batch):
            parts = by_cluster(batch)
            of_parts = {key: count_rows(tables) for key, tables in parts.items()}
            for key, n in (of_parts | {(batch.tenant, OTHERS): n_further(batch, parts)}).items():
                if n and self._owns(key):
                    self._skip(key, n)

    def _skip(self, key: Key, n_rows: int) -> None:
        """Count rows that will not be examined."""
        self.numbers.diagnosis_rows_left_out += n_rows
        self._store.unexamined.add(*key, n_rows=n_rows)

    def _run(self, tail: Iterator[Batch]) -> None:
        self._guarded(None, lambda: self._resume(tail))
        while not self._backlog.is_ended:
            self._backlog.wait(_TICK_S)
            begin_s = time.monotonic()
            turn = self._backlog.turn()
            self._examine(turn)
            self._backlog.done()
            if self._is_interrupted:
                self._restart()
            self.numbers.diagnosis_lag_s = self._backlog.lag_s
            # Small batches cost as much as large ones: wait, for at most half of the time, to gather more rows.
            time.sleep(min(time.monotonic() - begin_s, _MAX_PAUSE_S))

    def _guarded(self, key: Key | None, step: Callable[[], None], *, n_rows: int = 0) -> None:
        """A failure must not end the diagnosis of other clusters, and must not look like a healthy cluster.

        key: the current cluster; None if the step covers several clusters. n_rows: not examined if the step fails.
        """
        try:
            step()
        except Exception as error:  # noqa: BLE001 (counted, logged, and stated in every answer about the cluster)
            self.numbers.diagnosis_failures += 1
            self._is_interrupted |= isinstance(error, ProcessEnded)
            if isinstance(error, (StallscopeError, StepFailed)):
                _LOG.error("the continuous diagnosis: %s", error)
            else:
                _LOG.exception("the continuous diagnosis failed at a batch")
            if key is not None:
                kind = error.kind if isinstance(error, StepFailed) else type(error).__name__
                self._store.unexamined.add(*key, n_rows=n_rows, failure=kind)

    def _restart(self) -> None:
        """After the end of the process of the streams: resume in a new process, from the latest stored rows.

        Rows that end the process again soon are not fed again.
        """
        self._is_interrupted = False
        for key in self._confirmed_ns:
            self._store.unexamined.add(*key, failure="the process of the diagnosis ended")
        self._confirmed_ns.clear()
        now_s = time.monotonic()
        if now_s - self._resumed_s >= _MIN_RUN_S:
            self._resumed_s = now_s
            self._backlog.clear()
            self._guarded(None, lambda: self._resume(stored_tail(self._store)))

    def _examine(self, turn: ClusterTurn | None) -> None:
        """Feed the rows of a turn, advance the time, and store the changes."""
        if turn is not None:
            self._guarded(turn.key, lambda: self._feed(turn), n_rows=turn.n_rows)
        now_s = time.monotonic()
        if now_s - self._ticked_s >= _TICK_S:
            self._ticked_s = now_s
            self._guarded(None, lambda: self._advance(has_rows=turn is not None))
            self._guarded(None, self._close_expired)
        self._guarded(None, self._write)
        self._guarded(None, self._write_jobs)

    def _advance(self, *, has_rows: bool) -> None:
        """Advance the time of all streams, and end the streams without jobs."""
        advances = self._streams.tick()
        for key, advance in advances.items():
            if advance.failure:
                self.numbers.diagnosis_failures += 1
                self._store.unexamined.add(*key, failure=advance.failure)
            if advance.n_left_out:
                self._report_left_out(key, advance.n_left_out, every=advance.every)
            self._note(key, advance.changes)
            self._confirmed_ns[key] = {
                self._continued.name(key[0], incident): at_ns
                for incident, at_ns in advance.confirmed_ns.items()
            }
            self._guarded(key, lambda key=key, jobs=advance.jobs: self._note_jobs(key, jobs))  # type: ignore[misc]
        ended = [key for key, advance in advances.items() if not advance.n_jobs and not has_rows]
        if ended:
            self._streams.forget(ended)
            for key in ended:
                del self._confirmed_ns[key]

    def _feed(self, turn: ClusterTurn) -> None:
        if turn.n_left_out:
            self._report_left_out(turn.key, turn.n_left_out, every=turn.every)
        tables = dict(turn.tables)
        if (rows := tables.pop(machine_incidents.TABLE, None)) is not None:
            self._note_stated(turn.key, rows)
        changes = self._streams.feed(
            turn.key,
            tables,
            n_left_out=turn.n_left_out if turn.every == 1 else 0,
            is_behind=turn.is_behind,
        )
        if changes is None:
            self._skip(turn.key, turn.n_rows)
            return
        self.numbers.diagnosis_rows += turn.n_rows
        self._continued.rows_arrived(*turn.key, now_s=time.monotonic())
        self._note(turn.key, changes)

    def _report_left_out(self, key: Key, n_left_out: int, *, every: int) -> None:
        tenant, cluster = key
        self.numbers.diagnosis_rows_left_out += n_left_out
        self._store.unexamined.add(tenant, cluster, n_rows=n_left_out, every=every)
        n_before, every_before = self._left_out.get(key, (0, 0))
        self._left_out[key] = n_before + n_left_out, every
        now_s = time.monotonic()
        if every != every_before and now_s - self._warned_s.get(key, -math.inf) >= _WARN_EVERY_S:
            self._warned_s[key] = now_s
            _LOG.warning(
                "cluster %r of tenant %r sends more than the diagnosis can examine: %d rows were left out, "
                "the diagnosis continues with every %dth round",
                cluster,
                tenant,
                n_left_out,
                every,
            )

    def _note(self, key: Key, changes: list[Change]) -> None:
        tenant, cluster = key
        for change in changes:
            incident, now_us = (tenant, change.incident_id), time.time_ns() // 1000
            opened_us = self._opened_us.setdefault(incident, now_us)
            n_left_out, every = self._left_out.get(key, (0, 1))
            row = stored_row(
                change, cluster, opened_us=opened_us, now_us=now_us, n_left_out=n_left_out, every=every
            )
            row, is_repeated = self._as_first_stored(tenant, change, row)
            if change.kind == "closed":
                self._opened_us.pop(incident, None)
            if is_repeated:
                continue
            self.numbers.verdicts_opened += change.kind == "opened"
            self.numbers.verdicts_closed += change.kind == "closed"
            named = replace(change, incident_id=row["verdict_id"])
            self._pending[tenant, named.incident_id] = (row, chain_row(named, cluster, now_us))

    def _note_stated(self, key: Key, rows: pa.Table) -> None:
        """Take verdicts that machines have made. A machine repeats open incidents; others end, see offer()."""
        tenant, now_us = key[0], time.time_ns() // 1000
        for row, chain in machine_incidents.stated(rows, key[1], now_us=now_us):
            incident = (tenant, row["verdict_id"])
            is_new = incident not in self._opened_us
            row["opened_at"] = self._opened_us.setdefault(incident, now_us)
            self._continued.offers.pop(incident, None)
            if row["state"] == "closed":
                self._opened_us.pop(incident, None)
                self.numbers.verdicts_closed += 1
            else:
                self.numbers.verdicts_opened += is_new
                self._continued.offer(tenant, row, now_s=time.monotonic())
            self._pending[incident] = (row, chain)

    def _as_first_stored(
        self, tenant: str, change: Change, row: dict[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """The row of a change, under the first id of an incident that continues, and whether it is stored already."""
        continued = self._continued
        if change.kind == "opened" and (known := continued.opened(tenant, row)):
            self._opened_us.pop((tenant, known["verdict_id"]), None)
        is_repeated = continued.is_repeated(tenant, row)
        row = continued.stored(tenant, row)
        if change.kind == "closed":
            continued.ended(tenant, change.incident_id)
            if change.reason == NO_MORE_EVENTS:
                continued.offer(tenant, row, now_s=time.monotonic())
        return row, is_repeated

    def _write(self) -> None:
        """Store the changed rows; rows that the store has no room for are retried."""
        by_tenant: dict[str, list[tuple[str, str]]] = {}
        for key in self._pending:
            by_tenant.setdefault(key[0], []).append(key)
        under_way: list[tuple[list[tuple[str, str]], Future[Receipt]]] = []
        for tenant, keys in by_tenant.items():
            rows = [self._pending[key] for key in keys]
            tables = {"verdicts": table_of(schema.VERDICTS, [verdict for verdict, _ in rows])}
            if chains := [chain for _, chain in rows if chain is not None]:
                tables["causal_chains"] = table_of(schema.CAUSAL_CHAINS, chains)
            try:
                under_way.append((keys, self._store.append(Batch("", tenant, tables))))
            except Overloaded:
                break
        for keys, future in under_way:
            try:
                future.result(timeout=30)
            except (Overloaded, TimeoutError):
                return
            for key in keys:
                del self._pending[key]

    def _resume(self, tail: Iterator[Batch]) -> None:
        """Examine the latest stored rows, in which stored open incidents continue."""
        for tenant in self._store.tenants():
            for row in self._store.snapshot(tenant, tables=("verdicts",)).hot["verdicts"].to_pylist():
                if self._owns((tenant, row["cluster_id"] or "")):
                    self._remember(tenant, row)
        for batch in tail:
            for key, tables in by_cluster(batch).items():
                if not self._owns(key):
                    continue
                for part in in_parts(tables, _RESUMED_ROWS):
                    if self._backlog.is_ended:  # a slot may be handed over again before its rows were read
                        return
                    self._examine(ClusterTurn(key, part, count_rows(part)))

    def _remember(self, tenant: str, row: dict[str, Any]) -> None:
        """Note a stored incident that the streams may find again."""
        row |= {name: int(row[name].timestamp() * 1e6) for name in ("opened_at", "updated_at")}
        incident = (tenant, row["verdict_id"])
        if row["state"] == "open":
            self._opened_us[incident] = row["opened_at"]
            self._continued.offer(tenant, row, now_s=time.monotonic())
        elif row["updated_at"] >= _ago_us(_TAIL_S + GRACE_S):
            self._continued.closed[incident] = row

    def _note_jobs(self, key: Key, jobs: Sequence[JobState]) -> None:
        """Note the changed rows of jobs."""
        jobs = as_examined(jobs, is_complete=not self._store.unexamined.reason(*key))
        if changed := self._job_rows.changed(*key, jobs, time.monotonic()):
            self._unwritten_jobs.setdefault(key, {}).update((row["job"], row) for row in changed)

    def _write_jobs(self) -> None:
        """Store the changed rows of jobs; rows that the store could not store are retried."""
        for key, (future, rows) in list(self._jobs_under_way.items()):
            if not future.done():
                continue
            del self._jobs_under_way[key]
            if future.exception():
                self._unwritten_jobs[key] = rows | self._unwritten_jobs.get(key, {})
        for key in self._unwritten_jobs.keys() - self._jobs_under_way.keys():
            rows, now_us = self._unwritten_jobs[key], time.time_ns() // 1000
            table = table_of(schema.JOBS, [row | {"updated_at": now_us} for row in rows.values()])
            try:
                future = self._store.append(Batch("", key[0], {"jobs": table}))
            except Overloaded:
                return
            self._jobs_under_way[key] = future, self._unwritten_jobs.pop(key)

    def _close_expired(self) -> None:
        """Close incidents that no stream has seen again since a restart or a gap."""
        now_us = time.time_ns() // 1000
        for tenant, row in self._continued.expired(now_s=time.monotonic()):
            if row["state"] == "open":
                closed = row | {"state": "closed", "closed_at": now_us, "updated_at": now_us}
                closed.pop("tenant", None)
                self._opened_us.pop((tenant, row["verdict_id"]), None)
                self._pending[tenant, row["verdict_id"]] = (closed, None)


def stored_tail(store: Store, *, until_us: int | None = None) -> Iterator[Batch]:
    """The recently committed rows, one batch per tenant; at most the newest rows.

    until_us: the last commit of these rows; None: read until now.
    """
    for tenant in store.tenants():
        tail_s = _TAIL_S
        while (n_stored := _n_stored(store, tenant, tail_s)) > _MAX_TAIL_ROWS and tail_s > 1.0:
            tail_s /= 2
        if n_stored > _MAX_TAIL_ROWS:  # a clock was ahead or is behind
            _LOG.warning("tenant %r: the latest stored rows are too many to be examined again", tenant)
            continue
        names = (*traces.TABLES, traces.LOSSES)
        tables = {name: store.tail(tenant, name, since_us=_ago_us(tail_s)) for name in names}
        if until_us is not None:
            until = pa.scalar(until_us, pa.timestamp("us", "UTC"))
            tables = {
                name: rows.filter(pc.less_equal(rows["received_at"], until)) for name, rows in tables.items()
            }
        yield Batch("", tenant, {name: rows for name, rows in tables.items() if len(rows)})


def _n_stored(store: Store, tenant: str, tail_s: float) -> int:
    since_us = _ago_us(tail_s)
    return sum(store.tail_rows(tenant, name, since_us=since_us) for name in traces.TABLES)


def _ago_us(seconds: float) -> int:
    return time.time_ns() // 1000 - int(seconds * 1e6)
