"""The standing diagnosis: what arrives at the hub is diagnosed as it comes, and its verdicts are rows like any other.

One stream for each tenant and cluster. The writer's thread only puts committed batches into a queue; a thread of its
own feeds the streams and writes `verdicts` and `causal_chains`: opened, replaced while an incident lasts, closed when
it is over. After a restart it goes on from the rows stored last. What it cannot keep up with is left out, and counted.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from stallscope.diagnose.stream import Change, Stream
from stallscope.diagnose.verdict import verdict_as_json
from stallscope.errors import Overloaded, StallscopeError
from stallscope.store.hub import schema, traces
from stallscope.store.hub.store import Batch, HubStore

_LOG = logging.getLogger(__name__)
_TICK_S = 0.25
_MOST_WAITING_ROWS = 2_000_000
_MOST_STREAMS = 1_000
_MOST_ROWS_AT_ONCE = 100_000
_TAIL_S = 900.0
_SEVERITY = {"hang": "HIGH", "mismatch": "HIGH", "straggler": "HIGH", "inconclusive": "LOW"}

Key = tuple[str, str]
"""Tenant and cluster."""


@dataclass
class Numbers:
    """Since the start, for /metrics."""

    standing_rows: int = 0
    standing_rows_left_out: int = 0
    standing_failures: int = 0
    verdicts_opened: int = 0
    verdicts_closed: int = 0


@dataclass
class _Waiting:
    batches: deque[Batch] = field(default_factory=deque)
    n_rows: int = 0
    is_ended: bool = False


class Standing:
    """The streams of one hub. close() before the store is closed."""

    def __init__(self, store: HubStore, make_stream: Callable[[], Stream] = Stream):
        """make_stream: a stream with the limits and prices in force."""
        self.numbers = Numbers()
        self._store, self._make_stream = store, make_stream
        self._streams: dict[Key, Stream] = {}
        self._open: set[tuple[Key, str]] = set()
        self._opened_us: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._waiting = _Waiting()
        tail = self._stored_tail()
        store.subscribe(self._heard)
        self._thread = threading.Thread(target=self._run, args=(tail,), name="hub-standing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; incidents that are open stay open in the table, and are looked at again at the next start."""
        with self._changed:
            self._waiting.is_ended = True
            self._changed.notify()
        self._thread.join()

    def is_idle(self) -> bool:
        """Whether all that was committed has been looked at."""
        with self._changed:
            return not self._waiting.n_rows and not self._pending

    def _heard(self, batch: Batch) -> None:
        """A committed batch; called in the writer's thread."""
        n_rows = sum(len(rows) for name, rows in batch.tables.items() if name in traces.TABLES)
        if not n_rows:
            return
        with self._changed:
            if self._waiting.n_rows + n_rows > _MOST_WAITING_ROWS:
                self.numbers.standing_rows_left_out += n_rows
                return
            self._waiting.batches.append(batch)
            self._waiting.n_rows += n_rows
            self._changed.notify()

    def _run(self, tail: list[Batch]) -> None:
        self._guarded(lambda: self._resume(tail))
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting.batches or self._waiting.is_ended, timeout=_TICK_S
                )
                batches, n_rows = self._taken()
                is_ended = self._waiting.is_ended and not batches
            self._guarded(lambda batches=batches: self._look(batches))  # type: ignore[misc]
            with self._changed:
                self._waiting.n_rows -= n_rows
            if is_ended:
                return

    def _taken(self) -> tuple[list[Batch], int]:
        batches, n_rows = [], 0
        while self._waiting.batches and n_rows < _MOST_ROWS_AT_ONCE:
            batch = self._waiting.batches.popleft()
            batches.append(batch)
            n_rows += sum(len(rows) for name, rows in batch.tables.items() if name in traces.TABLES)
        return batches, n_rows

    def _guarded(self, step: Callable[[], None]) -> None:
        """Whatever goes wrong here must not end the diagnosis of everybody else."""
        try:
            step()
        except StallscopeError as error:
            self.numbers.standing_failures += 1
            _LOG.error("the standing diagnosis: %s", error)
        except Exception:  # noqa: BLE001 (it goes on with the next batch; what failed is counted and in the log)
            self.numbers.standing_failures += 1
            _LOG.exception("the standing diagnosis failed at a batch")

    def _look(self, batches: list[Batch]) -> None:
        for key, tables in by_cluster(batches).items():
            stream = self._stream(key)
            if stream is None:
                self.numbers.standing_rows_left_out += sum(len(rows) for rows in tables.values())
                continue
            trace = traces.trace(tables)
            self.numbers.standing_rows += sum(len(rows) for rows in tables.values())
            self._note(key, stream.feed(trace))
        for key, stream in self._streams.items():
            self._note(key, stream.tick())
        self._write()

    def _stream(self, key: Key) -> Stream | None:
        if key not in self._streams and len(self._streams) < _MOST_STREAMS:
            self._streams[key] = self._make_stream()
        return self._streams.get(key)

    def _note(self, key: Key, changes: list[Change]) -> None:
        tenant, cluster = key
        for change in changes:
            now_us = time.time_ns() // 1000
            opened_us = self._opened_us.setdefault((tenant, change.incident_id), now_us)
            if change.kind == "closed":
                self._open.discard((key, change.incident_id))
                self._opened_us.pop((tenant, change.incident_id), None)
                self.numbers.verdicts_closed += 1
            else:
                self.numbers.verdicts_opened += change.kind == "opened"
                self._open.add((key, change.incident_id))
            rows = (
                verdict_row(change, cluster, opened_us=opened_us, now_us=now_us),
                chain_row(change, cluster, now_us),
            )
            self._pending[tenant, change.incident_id] = rows

    def _write(self) -> None:
        """Store the rows that have changed; what the store has no room for is tried again."""
        by_tenant: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for (tenant, _), row in self._pending.items():
            by_tenant.setdefault(tenant, []).append(row)
        for tenant, rows in by_tenant.items():
            tables = {
                "verdicts": _table(schema.VERDICTS, [verdict for verdict, _ in rows]),
                "causal_chains": _table(schema.CAUSAL_CHAINS, [chain for _, chain in rows]),
            }
            try:
                self._store.append(Batch("", tenant, tables)).result(timeout=30)
            except (Overloaded, TimeoutError):
                return
            for key in [key for key in self._pending if key[0] == tenant]:
                del self._pending[key]

    def _stored_tail(self) -> list[Batch]:
        """The rows committed lately, as one batch for each tenant."""
        since_us = time.time_ns() // 1000 - int(_TAIL_S * 1e6)
        out = []
        for tenant in self._store.tenants():
            tables = {name: self._store.tail(tenant, name, since_us=since_us) for name in traces.TABLES}
            out.append(Batch("", tenant, {name: rows for name, rows in tables.items() if len(rows)}))
        return out

    def _resume(self, tail: list[Batch]) -> None:
        """Look at the rows stored last; then close what was open and is not seen any more."""
        stored = {
            (tenant, row["verdict_id"]): row
            for tenant in self._store.tenants()
            for row in self._store.snapshot(tenant, tables=("verdicts",)).hot["verdicts"].to_pylist()
            if row["state"] == "open"
        }
        for key, row in stored.items():
            self._opened_us[key] = int(row["opened_at"].timestamp() * 1e6)
        self._look(tail)
        seen = {(key[0], incident_id) for key, incident_id in self._open}
        now = pa.scalar(time.time_ns() // 1000, pa.timestamp("us", "UTC")).as_py()
        for key in stored.keys() - seen:
            self._opened_us.pop(key, None)
            row = {**stored[key], "state": "closed", "closed_at": now, "updated_at": now}
            row.pop("tenant")
            self._store.append(Batch("", key[0], {"verdicts": _table(schema.VERDICTS, [row])})).result(
                timeout=30
            )


def by_cluster(batches: list[Batch]) -> dict[Key, dict[str, pa.Table]]:
    """The rows of batches by tenant and cluster, and by table."""
    import pyarrow.compute as pc

    found: dict[Key, dict[str, list[pa.Table]]] = {}
    for batch in batches:
        for name in traces.TABLES:
            rows = batch.tables.get(name)
            if rows is None or not len(rows):
                continue
            clusters = pc.unique(rows["cluster_id"]).to_pylist()
            for cluster in clusters:
                mine = rows
                if len(clusters) > 1:
                    is_mine = (
                        rows["cluster_id"].is_null()
                        if cluster is None
                        else pc.equal(rows["cluster_id"], cluster)
                    )
                    mine = rows.filter(is_mine)
                found.setdefault((batch.tenant, cluster or ""), {}).setdefault(name, []).append(mine)
    return {
        key: {name: pa.concat_tables(rows, promote_options="default") for name, rows in tables.items()}
        for key, tables in found.items()
    }


def verdict_row(change: Change, cluster: str, *, opened_us: int, now_us: int) -> dict[str, Any]:
    """The row of `verdicts` that a change leaves. Times in us since 1970."""
    verdict = change.verdict
    main = verdict.causes[0] if verdict.causes else None
    return {
        "cluster_id": cluster,
        "verdict_id": change.incident_id,
        "state": "closed" if change.kind == "closed" else "open",
        "kind": verdict.kind,
        "summary": verdict.summary,
        "opened_at": opened_us,
        "updated_at": now_us,
        "closed_at": now_us if change.kind == "closed" else None,
        "since_ns": verdict.since_ns,
        "until_ns": verdict.until_ns,
        "node_id": verdict.nodes[0] if verdict.nodes else None,
        "rank": verdict.ranks[0] if verdict.ranks else None,
        "ranks": json.dumps(verdict.ranks),
        "nodes": json.dumps(verdict.nodes),
        "comm_hash": verdict.comm_hash,
        "cause": main.cause.name if main else None,
        "cause_share": main.share if main else None,
        "confidence": verdict.confidence,
        "late_ms": verdict.late_ms.get("median") if verdict.late_ms else None,
        "n_late_rounds": verdict.n_late_rounds,
        "gpu_seconds": verdict.cost.gpu_seconds if verdict.cost else None,
        "usd": verdict.cost.usd if verdict.cost else None,
        "is_lower_bound": verdict.cost.is_lower_bound if verdict.cost else None,
        "verdict": json.dumps(
            verdict_as_json(verdict) | ({"closed_because": change.reason} if change.reason else {})
        ),
    }


def chain_row(change: Change, cluster: str, now_us: int) -> dict[str, Any]:
    """The same in the shape of `causal_chains`."""
    verdict = change.verdict
    begin_ns = verdict.since_ns if verdict.since_ns is not None else now_us * 1000
    timeline = [
        {
            "layer": "HOST",
            "op": part.cause.name,
            "detail": f"{part.share:.0%} of the excess",
            "dur_us": part.excess_ns / 1e3,
        }
        for part in verdict.causes
    ]
    return {
        "ts": begin_ns // 1000,
        "ts_ns": begin_ns,
        "cluster_id": cluster,
        "node_id": verdict.nodes[0] if verdict.nodes else None,
        "rank": verdict.ranks[0] if verdict.ranks else None,
        "causal_chain_id": change.incident_id,
        "severity": _SEVERITY.get(verdict.kind, "MEDIUM"),
        "summary": verdict.summary,
        "root_cause": verdict.causes[0].cause.title if verdict.causes else verdict.abstained_because,
        "explanation": json.dumps(verdict.evidence),
        "recommendations": json.dumps(verdict.advice),
        "timeline": json.dumps(timeline),
        "state": "closed" if change.kind == "closed" else "open",
    }


def _table(table: schema.HubTable, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=schema.arrow_schema(table, without=schema.GIVEN_BY_HUB))
