"""The single thread that writes the hub's file: it commits the waiting batches, many in one transaction.

A batch's future resolves after its commit. A known batch id is acknowledged without storing the batch again. If more
rows wait than the limits allow, a batch is refused at once.
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stallscope.errors import BadInput, Overloaded, StallscopeError, StorageFailed
from stallscope.store.hub import schema
from stallscope.store.hub.batches import (
    Batch,
    BatchMember,
    Receipt,
    completed,
    entries_of,
    kept_rows,
    packed_early,
    separated,
    sole_member,
)
from stallscope.store.hub.commit_times import CommitTimes
from stallscope.store.hub.hot import HotRows
from stallscope.store.hub.journal import AlreadyStored, Entry, Journal
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.memory_size import process_memory
from stallscope.store.hub.nodes import Nodes
from stallscope.store.hub.small_tables import with_latest

Listener = Callable[[Batch], None]
_IDLE_S = 0.25
_GATHER_S = 0.04
_FEW_ROWS = 40_000
"""A commit takes some ms even with few rows: with fewer than this it briefly waits for rows that are being decoded."""


_TENANT_SHARE = 0.75
"""Share of the hot rows: one tenant's rows cannot shut out another tenant."""


@dataclass
class Counters:
    """Totals since the start, for /metrics; only the writer's thread changes them, except refused."""

    batches: int = 0
    rows: int = 0
    duplicates: int = 0
    refused: int = 0
    failed: int = 0
    commits: int = 0
    commit_s: float = 0.0
    longest_hold_s: float = 0.0
    listener_failures: int = 0


@dataclass(frozen=True)
class _Waiting:
    """A batch with the requests whose rows it contains."""

    batch: Batch
    n_bytes: int
    packed: Mapping[str, memoryview]
    members: Sequence[BatchMember]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(tenant, batch id) of the members that have an id."""
        return [(self.batch.tenant, member.batch_id) for member in self.members if member.batch_id]

    def refuse(self, error: Exception) -> None:
        for member in self.members:
            member.stored.set_exception(error)

    def acknowledge(self, received_us: int, *, is_duplicate: bool) -> None:
        for member in self.members:
            member.stored.set_result(Receipt(member.n_all_rows, is_duplicate, received_us))

    def alone(self) -> "list[_Waiting]":
        """Its members, each with its own rows."""
        parts = separated(self.batch, self.members)
        return [_Waiting(batch, batch.n_bytes or 0, {}, (member,)) for batch, member in parts]


@dataclass
class _Queue:
    waiting: deque[_Waiting] = field(default_factory=deque)
    jobs: deque[tuple[Callable[[], Any], "Future[Any]"]] = field(default_factory=deque)
    n_rows: int = 0
    n_bytes: int = 0
    n_coming: int = 0
    is_closed: bool = False


class Writer:
    """The queue and its thread."""

    def __init__(
        self,
        journal: Journal,
        hot: HotRows,
        *,
        nodes: Nodes,
        limits: Limits,
        committed: Callable[[int], None],
        clock_ns: Callable[[], int] = time.time_ns,
    ):
        """committed: called with the time of each commit, before the commit is acknowledged."""
        self._committed, self._clock_ns = committed, clock_ns
        self.counters = Counters()
        self._journal, self._hot, self._nodes, self._limits = journal, hot, nodes, limits
        self._changed = threading.Condition()
        self._queue = _Queue()
        self._listeners: list[Listener] = []
        self._kept = {name: journal.kept(name) for name in schema.KEPT if name != "nodes"}
        self._known_ids: OrderedDict[tuple[str, str], int] = OrderedDict(
            ((tenant, batch_id), received_us) for tenant, batch_id, received_us in journal.batch_ids()
        )
        self._last_us = journal.latest_us()
        self._times = CommitTimes()
        self._quiet_since_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hub-writer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> "Future[Receipt]":
        """Queue a batch. Raises Overloaded if the queue is full, BadInput if its rows do not match their table."""
        member = sole_member(batch)
        self.submit_together(batch, (member,))
        return member.stored

    def submit_together(self, batch: Batch, members: Sequence[BatchMember]) -> None:
        """Queue the rows of several requests. Raises the errors of submit(); then no member is queued."""
        batch = Batch(
            batch.batch_id,
            batch.tenant,
            {name: schema.conformed(name, rows) for name, rows in batch.tables.items() if len(rows)},
            batch.n_bytes,
        )
        n_rows, n_bytes = batch.n_rows, batch.n_bytes
        if n_bytes is None:
            n_bytes = sum(rows.nbytes for rows in batch.tables.values())
        if n_bytes > self._limits.max_queue_bytes:
            raise BadInput(f"a batch of {n_bytes:,} bytes is too large; send smaller batches")
        with self._changed:
            self._check_room(n_rows, n_bytes, batch.tenant)
        early = packed_early(batch)
        with self._changed:
            self._check_room(n_rows, n_bytes, batch.tenant)
            queue = self._queue
            queue.waiting.append(_Waiting(batch, n_bytes, early, members))
            queue.n_rows += n_rows
            queue.n_bytes += n_bytes
            if len(queue.waiting) == 1 or self._has_enough():
                self._changed.notify()

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Announces a batch inside the with block: small waiting batches are committed together with it."""
        queue = self._queue
        with self._changed:
            queue.n_coming += 1
        try:
            yield
        finally:
            with self._changed:
                queue.n_coming -= 1
                if queue.waiting and self._has_enough():
                    self._changed.notify()

    def check_room(self) -> None:
        """Raises Overloaded while no more rows are accepted: senders are refused before their rows are decoded."""
        with self._changed:
            self._check_room(0, 0)

    def _check_room(self, n_rows: int, n_bytes: int, tenant: str = "") -> None:
        if self._queue.is_closed:
            raise Overloaded("the hub is stopping; send again later", 5.0)
        if reason := self._reason_to_refuse(n_rows, n_bytes, tenant):
            self.counters.refused += 1
            retry_s = self._limits.retry_after_s
            raise Overloaded(f"{reason}; send again in {retry_s:g} s", retry_s)

    def _reason_to_refuse(self, n_rows: int, n_bytes: int, tenant: str) -> str:
        queue, limits, hot = self._queue, self._limits, self._hot
        if queue.waiting and (
            queue.n_rows + n_rows > limits.max_queue_rows
            or queue.n_bytes + n_bytes > limits.max_queue_bytes
            or self._times.wait_s(queue.n_rows, limits.group_rows) > limits.max_queue_s
        ):
            return f"{queue.n_rows:,} rows are waiting to be stored"
        n_hot = hot.n_bytes + queue.n_bytes + n_bytes
        is_share_full = hot.bytes_of(tenant) + n_bytes > limits.max_hot_bytes * _TENANT_SHARE
        if hot.n_bytes and (n_hot > limits.max_hot_bytes or (tenant and is_share_full)):
            return "the rows in memory have reached their limit, until files have been written"
        if process_memory().is_above(limits.max_memory_bytes):
            return "the hub has reached its memory limit"
        return ""

    def call(self, job: Callable[[], Any]) -> "Future[Any]":
        """Run a function in the writer's thread, between two commits."""
        future: Future[Any] = Future()
        with self._changed:
            if self._queue.is_closed:
                future.set_exception(StorageFailed("the hub is stopping"))
                return future
            self._queue.jobs.append((job, future))
            self._changed.notify()
        return future

    def subscribe(self, listener: Listener) -> None:
        """Call the listener with every committed batch, in the writer's thread; it must not block."""
        self._listeners.append(listener)

    def queued(self) -> tuple[int, int]:
        """Waiting rows and bytes."""
        with self._changed:
            return self._queue.n_rows, self._queue.n_bytes

    @property
    def latest_us(self) -> int:
        """The time of the newest commit; a later commit has a later time."""
        return self._last_us

    def quiet_s(self) -> float:
        """Time since the last batch arrived."""
        return time.monotonic() - self._quiet_since_s

    def kept(self, name: str, tenant: str) -> pa.Table:
        """The tenant's rows of a table that the hub maintains itself."""
        if name == "nodes":
            return self._nodes.rows(tenant)
        rows = self._kept[name]
        return rows.filter(pc.equal(rows["tenant"], tenant))

    def close(self) -> None:
        """Commit the waiting batches, then end the thread."""
        with self._changed:
            self._queue.is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, timeout=_IDLE_S)
                if self._queue.waiting:
                    self._changed.wait_for(self._has_enough, timeout=_GATHER_S)
                group = self._next_group()
                jobs = list(self._queue.jobs)
                self._queue.jobs.clear()
                is_done = self._queue.is_closed and not group and not self._queue.waiting and not jobs
            begin_s = time.monotonic()
            if group:
                self._commit(group)
                self._quiet_since_s = time.monotonic()
            for job, future in jobs:
                _fulfil(future, job)
            took_s = time.monotonic() - begin_s
            self.counters.longest_hold_s = max(self.counters.longest_hold_s, took_s)
            if n_rows := sum(entry.batch.n_rows for entry in group):
                self._times.add(n_rows, took_s)
            if is_done:
                return

    def _has_work(self) -> bool:
        return bool(self._queue.waiting or self._queue.jobs or self._queue.is_closed)

    def _has_enough(self) -> bool:
        queue = self._queue
        return not queue.n_coming or queue.n_rows >= _FEW_ROWS or bool(queue.jobs) or queue.is_closed

    def _next_group(self) -> list[_Waiting]:
        """The batches of the next transaction."""
        queue, n_rows = self._queue, 0
        group: list[_Waiting] = []
        while queue.waiting and (
            not group or n_rows + queue.waiting[0].batch.n_rows <= self._limits.group_rows
        ):
            entry = queue.waiting.popleft()
            group.append(entry)
            n_rows += entry.batch.n_rows
            queue.n_bytes -= entry.n_bytes
        queue.n_rows -= n_rows
        return group

    def _commit(self, group: list[_Waiting]) -> None:
        """Commit all batches together; if that fails, each alone, so that an invalid batch cannot fail the others.

        Nothing is committed alone while the journal accepts no commit at all.
        """
        try:
            self._commit_together(group)
        except AlreadyStored as stored:
            self._known_ids.update(stored.keys)
            self._commit(group)
        except Overloaded as error:
            self.counters.failed += len(group)
            for entry in group:
                entry.refuse(error)
        except StallscopeError as error:
            if len(group) == 1 and len(group[0].members) == 1:
                self.counters.failed += 1
                group[0].refuse(error)
                return
            for entry in group if len(group) > 1 else group[0].alone():
                self._commit([entry])

    def _commit_together(self, group: list[_Waiting]) -> None:
        begin_s = time.monotonic()
        received_us = max(self._clock_ns() // 1000, self._last_us + 1)
        fresh, known = self._split(group)
        entries = entries_of([(entry.batch, entry.packed) for entry in fresh], received_us)
        kept = kept_rows([entry.batch for entry in fresh])
        senders = [
            (entry.batch.tenant, entry.batch.tables["nodes"])
            for entry in fresh
            if "nodes" in entry.batch.tables
        ]
        changed = self._nodes.record(entries, senders, received_us)
        if changed is not None:
            kept["nodes"] = [changed]
        if fresh:
            ids = [key for entry in fresh for key in entry.keys]
            self._journal.commit(received_us, entries, batch_ids=ids, kept=kept)
            self._last_us = received_us
            if entries or ids:  # Journal.latest_us() does not see a commit of replaced rows alone
                self._committed(received_us)
            self._known_ids.update((key, received_us) for key in ids)
            self._publish(entries, kept, received_us)
        for entry in fresh:
            entry.acknowledge(received_us, is_duplicate=False)
        for entry, when_us in known:
            entry.acknowledge(when_us or received_us, is_duplicate=True)
        counters = self.counters
        counters.batches += sum(len(entry.members) for entry in fresh)
        counters.rows += sum(entry.batch.n_rows for entry in fresh)
        counters.duplicates += len(known)
        counters.commits += 1
        counters.commit_s += time.monotonic() - begin_s
        self._notify([entry.batch for entry in fresh])

    def _split(self, group: list[_Waiting]) -> tuple[list[_Waiting], list[tuple[_Waiting, int]]]:
        """The new batches, and the batches with a known id, with the time of their commit (0: now)."""
        fresh: list[_Waiting] = []
        known: list[tuple[_Waiting, int]] = []
        now: set[tuple[str, str]] = set()
        waiting = deque(group)
        while waiting:
            entry = waiting.popleft()
            keys = entry.keys
            if not self._has_known(keys, now):
                fresh.append(entry)
                now.update(keys)
            elif len(entry.members) > 1:
                waiting.extendleft(reversed(entry.alone()))
            else:
                known.append((entry, self._known_ids.get(keys[0], 0)))
        return fresh, known

    def _has_known(self, keys: list[tuple[str, str]], now: set[tuple[str, str]]) -> bool:
        """Whether a key is known, in this commit, or twice among the keys."""
        return any(key in self._known_ids or key in now for key in keys) or len(set(keys)) < len(keys)

    def _publish(self, entries: list[Entry], kept: Mapping[str, list[pa.Table]], received_us: int) -> None:
        rows_by_table: dict[tuple[str, str], list[pa.Table]] = {}
        for entry in entries:
            rows_by_table.setdefault((entry.tenant, entry.table), []).append(entry.rows)
        for (tenant, table), parts in rows_by_table.items():
            rows = completed(table, pa.concat_tables(parts), tenant, received_us=received_us)
            self._hot.add(tenant, table, rows, received_us=received_us)
        for name, pieces in kept.items():
            if name != "nodes":
                self._kept[name] = with_latest(name, self._kept[name], pieces)

    def _notify(self, batches: list[Batch]) -> None:
        for batch in batches:
            for listener in self._listeners:
                try:
                    listener(batch)
                except Exception:  # noqa: BLE001 (a failing listener must not stop the writer; the failure is counted)
                    self.counters.listener_failures += 1

    def forget_verdicts(self, before_us: int) -> int:
        """Delete verdicts closed before this time, in the writer's thread. Returns their number."""
        n_gone = self._journal.forget_verdicts(before_us)
        if n_gone:
            self._kept |= {name: self._journal.kept(name) for name in ("verdicts", "causal_chains")}
        return n_gone

    def forget_jobs(self, before_us: int) -> None:
        """Delete ended jobs without a change since this time, in the writer's thread."""
        if self._journal.forget_jobs(before_us):
            self._kept |= {"jobs": self._journal.kept("jobs")}

    def forget_owners(self, before_us: int) -> None:
        """Delete owners of jobs and incidents that were over before this time, in the writer's thread."""
        if self._journal.forget_owners(before_us):
            self._kept |= {name: self._journal.kept(name) for name in ("jobs", "verdicts", "causal_chains")}

    def forget_batches(self, before_us: int) -> None:
        """Forget old batch ids, and the oldest beyond the limit, in the writer's thread."""
        n_old = 0
        for received_us in self._known_ids.values():
            if received_us >= before_us:
                break
            n_old += 1
        if n_old:
            self._journal.forget_batches(before_us)
            for _ in range(n_old):
                self._known_ids.popitem(last=False)
        while self.has_too_many_ids():
            self._forget_oldest_ids()

    def has_too_many_ids(self) -> bool:
        """Whether forget_batches() would forget ids beyond the limit."""
        return len(self._known_ids) > self._limits.max_batch_ids

    def _forget_oldest_ids(self) -> None:
        """Forget ids of the tenant with most ids: no tenant's ids are forgotten for the requests of another tenant."""
        n_of = Counter(tenant for tenant, _ in self._known_ids)
        ((tenant, n),) = n_of.most_common(1)
        most = self._limits.max_batch_ids
        n_excess = len(self._known_ids) - most + most // 10  # not again at once
        n_gone = max(1, min(n_excess, n - most // (2 * len(n_of))))
        until_us = [us for (owner, _), us in self._known_ids.items() if owner == tenant][n_gone - 1]
        self._journal.forget_batches(until_us + 1, tenant)
        gone = [key for key, us in self._known_ids.items() if key[0] == tenant and us <= until_us]
        for key in gone:
            del self._known_ids[key]


def _fulfil(future: "Future[Any]", job: Callable[[], Any]) -> None:
    try:
        future.set_result(job())
    except Exception as error:  # noqa: BLE001 (the caller's future gets the error)
        future.set_exception(error)
