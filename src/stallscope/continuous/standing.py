"""The thread that feeds committed rows to the diagnosis and writes its verdicts.

There is one stream for each tenant and cluster. The writer's thread only adds committed batches to the backlog; a
separate thread takes turns. It feeds each cluster's rows to its stream, and changes become rows of `verdicts` and
`causal_chains`: opened, replaced while an incident lasts, closed at its end. After a restart it resumes from the
latest stored rows. Rows that arrive too fast are skipped, counted, and reported in the verdicts.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

from stallscope.continuous.backlog import Backlog, Bounds, Key, Turn, by_cluster
from stallscope.continuous.continued import Continued, joined
from stallscope.continuous.rows import chain_row, stored_row, table_of
from stallscope.diagnose import NO_MORE_EVENTS, Change, Stream
from stallscope.errors import Overloaded, StallscopeError
from stallscope.store.hub import schema, traces
from stallscope.store.hub.store import Batch, HubStore, Receipt

_LOG = logging.getLogger(__name__)
_TICK_S = 0.25
_MOST_REST_S = 0.05
_MOST_STREAMS = 1_000
_TAIL_S = 900.0
_MOST_TAIL_ROWS = 500_000
_SKIPPED = "skipped_by_hub"


@dataclass
class Numbers:
    """Totals since the start, for /metrics; standing_lag_s: current waiting time of the oldest row."""

    standing_rows: int = 0
    standing_rows_left_out: int = 0
    standing_failures: int = 0
    standing_lag_s: float = 0.0
    verdicts_opened: int = 0
    verdicts_closed: int = 0


class Standing:
    """The streams of one hub. close() before the store is closed."""

    def __init__(
        self, store: HubStore, make_stream: Callable[[], Stream] = Stream, *, bounds: Bounds | None = None
    ):
        """make_stream: creates a stream with the current limits and prices."""
        self.numbers = Numbers()
        self._store, self._make_stream = store, make_stream
        self._streams: dict[Key, Stream] = {}
        self._left_out: dict[Key, int] = {}
        self._open: set[tuple[str, str]] = set()
        self._opened_us: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        self._confirmed_ns: dict[Key, dict[str, int]] = {}
        self._continued = Continued()
        self._backlog = Backlog(bounds)
        self._ticked_s = 0.0
        tail = self._stored_tail()
        store.subscribe(self._on_commit)
        self._thread = Thread(target=self._run, args=(tail,), name="hub-standing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. Open incidents stay open in the table, and are examined again at the next start."""
        self._backlog.end()
        self._thread.join()

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

    def _on_commit(self, batch: Batch) -> None:
        """A committed batch; called in the writer's thread."""
        n_left_out = self._backlog.add(batch)
        self.numbers.standing_rows_left_out += n_left_out
        if n_left_out:
            for (tenant, cluster), tables in by_cluster(batch).items():
                self._store.unexamined.add(tenant, cluster, n_rows=sum(map(len, tables.values())))

    def _run(self, tail: list[Batch]) -> None:
        self._guarded(None, lambda: self._resume(tail))
        tail.clear()
        while not self._backlog.is_ended:
            self._backlog.wait(_TICK_S)
            begin_s = time.monotonic()
            turn = self._backlog.turn()
            self._examine(turn)
            self._backlog.done()
            self.numbers.standing_lag_s = self._backlog.lag_s
            # Small batches cost as much as large ones: wait, for at most half of the time, to gather more rows.
            time.sleep(min(time.monotonic() - begin_s, _MOST_REST_S))

    def _guarded(self, key: Key | None, step: Callable[[], None], *, n_rows: int = 0) -> None:
        """A failure must not end the diagnosis of other clusters, and must not look like a healthy cluster.

        key: the current cluster, None if there is no single cluster. n_rows: not examined if the step fails.
        """
        try:
            step()
        except Exception as error:  # noqa: BLE001 (counted, logged, and stated in every answer about the cluster)
            self.numbers.standing_failures += 1
            if isinstance(error, StallscopeError):
                _LOG.error("the continuous diagnosis: %s", error)
            else:
                _LOG.exception("the continuous diagnosis failed at a batch")
            if key is not None:
                self._store.unexamined.add(*key, n_rows=n_rows, failure=type(error).__name__)

    def _examine(self, turn: Turn | None) -> None:
        """Feed the rows of a turn, advance the time, and store the changes."""
        if turn is not None:
            self._guarded(turn.key, lambda: self._feed(turn), n_rows=turn.n_rows)
        now_s = time.monotonic()
        if now_s - self._ticked_s >= _TICK_S:
            self._ticked_s = now_s
            for key, stream in list(self._streams.items()):
                self._guarded(key, lambda key=key, stream=stream: self._note(key, stream.tick()))  # type: ignore[misc]
                self._confirmed_ns[key] = {
                    self._continued.name(key[0], incident): at_ns
                    for incident, at_ns in stream.confirmed_ns().items()
                }
                if not stream.n_jobs and turn is None:
                    del self._streams[key], self._confirmed_ns[key]
            self._guarded(None, self._close_expired)
        self._guarded(None, self._write)

    def _feed(self, turn: Turn) -> None:
        if turn.n_left_out:
            self._report_skipped(turn)
        stream = self._stream(turn.key)
        if stream is None:
            self.numbers.standing_rows_left_out += turn.n_rows
            self._store.unexamined.add(*turn.key, n_rows=turn.n_rows)
            return
        trace = traces.trace(turn.tables)
        if turn.n_left_out:
            trace = replace(trace, lost={_SKIPPED: turn.n_left_out})
        self.numbers.standing_rows += turn.n_rows
        self._continued.rows_arrived(*turn.key, now_s=time.monotonic())
        self._note(turn.key, stream.feed(trace, is_behind=turn.is_behind))

    def _report_skipped(self, turn: Turn) -> None:
        tenant, cluster = turn.key
        self.numbers.standing_rows_left_out += turn.n_left_out
        self._store.unexamined.add(tenant, cluster, n_rows=turn.n_left_out)
        self._left_out[turn.key] = self._left_out.get(turn.key, 0) + turn.n_left_out
        _LOG.warning(
            "cluster %r of tenant %r sends more than the diagnosis can examine: %d rows were skipped, "
            "the diagnosis continues with the newest rows",
            cluster,
            tenant,
            turn.n_left_out,
        )

    def _stream(self, key: Key) -> Stream | None:
        if key not in self._streams and len(self._streams) < _MOST_STREAMS:
            self._streams[key] = self._make_stream()
        return self._streams.get(key)

    def _note(self, key: Key, changes: list[Change]) -> None:
        tenant, cluster = key
        for change in changes:
            incident, now_us = (tenant, change.incident_id), time.time_ns() // 1000
            opened_us = self._opened_us.setdefault(incident, now_us)
            n_left_out = self._left_out.get(key, 0)
            row = stored_row(change, cluster, opened_us=opened_us, now_us=now_us, n_left_out=n_left_out)
            row = self._as_first_stored(tenant, change, row)
            if change.kind == "closed":
                self._open.discard(incident)
                self._opened_us.pop(incident, None)
                self.numbers.verdicts_closed += 1
            else:
                self.numbers.verdicts_opened += change.kind == "opened"
                self._open.add(incident)
            named = replace(change, incident_id=row["verdict_id"])
            self._pending[tenant, named.incident_id] = (row, chain_row(named, cluster, now_us))

    def _as_first_stored(self, tenant: str, change: Change, row: dict[str, Any]) -> dict[str, Any]:
        """The row of a change, under the first id of an incident that continues."""
        continued, key = self._continued, (tenant, change.incident_id)
        if change.kind == "opened" and (known := continued.opened(tenant, row)):
            self._opened_us.pop((tenant, known["verdict_id"]), None)
        first = continued.first_rows.get(key)
        row = joined(row, first) if first is not None else row
        if change.kind == "closed":
            continued.first_rows.pop(key, None)
            if change.reason == NO_MORE_EVENTS:
                continued.offer(tenant, row, now_s=time.monotonic())
        return row

    def _write(self) -> None:
        """Store the changed rows; rows that the store has no room for are retried."""
        by_tenant: dict[str, list[tuple[str, str]]] = {}
        for key in self._pending:
            by_tenant.setdefault(key[0], []).append(key)
        under_way: list[tuple[list[tuple[str, str]], Future[Receipt]]] = []
        for tenant, keys in by_tenant.items():
            rows = [self._pending[key] for key in keys]
            tables = {
                "verdicts": table_of(schema.VERDICTS, [verdict for verdict, _ in rows]),
                "causal_chains": table_of(schema.CAUSAL_CHAINS, [chain for _, chain in rows]),
            }
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

    def _stored_tail(self) -> list[Batch]:
        """The recently committed rows, one batch per tenant; at most the newest rows."""
        out = []
        for tenant in self._store.tenants():
            tail_s = _TAIL_S
            while tail_s > 1.0 and self._n_stored(tenant, tail_s) > _MOST_TAIL_ROWS:
                tail_s /= 2
            tables = {
                name: self._store.tail(tenant, name, since_us=_ago_us(tail_s)) for name in traces.TABLES
            }
            out.append(Batch("", tenant, {name: rows for name, rows in tables.items() if len(rows)}))
        return out

    def _n_stored(self, tenant: str, tail_s: float) -> int:
        since_us = _ago_us(tail_s)
        return sum(self._store.tail_rows(tenant, name, since_us=since_us) for name in traces.TABLES)

    def _resume(self, tail: list[Batch]) -> None:
        """Examine the latest stored rows, in which stored open incidents continue."""
        stored = {
            (tenant, row["verdict_id"]): dict(row)
            for tenant in self._store.tenants()
            for row in self._store.snapshot(tenant, tables=("verdicts",)).hot["verdicts"].to_pylist()
            if row["state"] == "open"
        }
        for key, row in stored.items():
            self._opened_us[key] = row["opened_at"] = int(row["opened_at"].timestamp() * 1e6)
            row["updated_at"] = int(row["updated_at"].timestamp() * 1e6)
            self._continued.offer(key[0], row, now_s=time.monotonic())
        for batch in tail:
            for key, tables in by_cluster(batch).items():
                self._examine(Turn(key, tables, sum(map(len, tables.values()))))

    def _close_expired(self) -> None:
        """Close incidents that no stream has seen again since a restart or a gap."""
        now_us = time.time_ns() // 1000
        for tenant, row in self._continued.expired(now_s=time.monotonic()):
            if row["state"] == "open":
                closed = row | {"state": "closed", "closed_at": now_us, "updated_at": now_us}
                closed.pop("tenant", None)
                self._opened_us.pop((tenant, row["verdict_id"]), None)
                rows = table_of(schema.VERDICTS, [closed])
                self._store.append(Batch("", tenant, {"verdicts": rows})).result(timeout=30)


def _ago_us(seconds: float) -> int:
    return time.time_ns() // 1000 - int(seconds * 1e6)
