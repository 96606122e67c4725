"""The rows waiting for examination, by cluster. Each tenant in turn, and each of its clusters, gets a number of rows.

Waiting rows of a cluster are returned together, because many small batches cost more than one large batch. A cluster
that sends more than can be examined is sampled in whole rounds: the collectives of every k-th `seq`, of all ranks. So
its verdicts are current, and every remaining round is complete. Rows that are left out are counted and reported.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stallscope.continuous import machine_incidents
from stallscope.store.hub import traces
from stallscope.store.hub.store import Batch
from stallscope.store.hub.unexamined import OTHERS

Key = tuple[str, str]
"""Tenant and cluster."""

Tables = Mapping[str, pa.Table]

_TABLES = (*traces.TABLES, traces.LOSSES, machine_incidents.TABLE)
MAX_CLUSTERS = 1_000
"""Limit of the clusters of a batch, and of the waiting clusters of a tenant; equal to the limit of streams."""

_ALWAYS_KEPT = ("processes", "communicators", "owners", "idle_gpus", traces.LOSSES, machine_incidents.TABLE)
"""Small tables whose rows are sent only once."""

_BYTES_A_ROW = 400
"""Memory of a waiting collective, by measurement 345 to 375 bytes; the hub's queries use the same memory at first."""

_SHORTER = 0.95
"""A wait is shorter if it is this share of the shortest wait before: otherwise chance would make it shorter."""


@dataclass(frozen=True, kw_only=True)
class BacklogLimits:
    """turn_rows: rows of one cluster per turn. behind_s: rows that wait longer are examined in larger batches.

    If they wait longer, do not fit into a turn, and their wait has not become shorter for patience_s, the cluster is
    sampled twice as coarsely; after calm_s without such rows, twice as finely. A wait that becomes shorter needs no
    sample: the start of the diagnosis, or a pause of the machine, is made up for. max_every: the coarsest sample.

    max_rows: waiting rows of a cluster; beyond it the cluster is sampled at once, and in the coarsest sample only the
    newest rows are kept. max_rows_in: rows of all clusters before they are split by cluster. max_rows_all: waiting rows
    of all clusters; beyond it, the oldest rows of the largest cluster of the tenant with most rows are skipped.
    """

    turn_rows: int = 50_000
    behind_s: float = 1.0
    patience_s: float = 2.0
    calm_s: float = 5.0
    max_every: int = 64
    max_rows: int = 600_000
    max_rows_in: int = 2_000_000
    max_rows_all: int = 2_000_000

    @classmethod
    def within(cls, memory_bytes: int) -> "BacklogLimits":
        """The limits of a backlog whose rows may use this memory."""
        n_rows = memory_bytes // _BYTES_A_ROW
        return cls(
            max_rows=min(cls.max_rows, n_rows),
            max_rows_in=min(cls.max_rows_in, n_rows),
            max_rows_all=min(cls.max_rows_all, n_rows),
        )


@dataclass(frozen=True)
class ClusterTurn:
    """Rows of one cluster to examine. n_left_out: rows that were left out since the previous turn. every: the sample
    is every k-th round.
    """

    key: Key
    tables: Tables
    n_rows: int
    n_left_out: int = 0
    is_behind: bool = False
    every: int = 1


@dataclass(frozen=True)
class _Part:
    tables: Tables
    n_rows: int
    at_s: float


@dataclass
class _Queue:
    """min_wait_s: the shortest wait of its oldest row while it was behind, reached at min_at_s."""

    parts: deque[_Part] = field(default_factory=deque)
    n_rows: int = 0
    n_left_out: int = 0
    min_wait_s: float = math.inf
    min_at_s: float = 0.0

    def note_wait(self, wait_s: float, now_s: float, *, is_behind: bool) -> None:
        """Note how long the oldest row has waited."""
        if not is_behind:
            self.min_wait_s = math.inf
        elif wait_s < _SHORTER * self.min_wait_s:
            self.min_wait_s, self.min_at_s = wait_s, now_s


@dataclass
class _Sample:
    """every: the sample is every k-th round. since_s: time of the last change, or of the last rows that had to wait."""

    every: int = 1
    since_s: float = 0.0


class _Order:
    """The clusters with waiting rows. A tenant with many clusters gets no more turns than a tenant with one."""

    def __init__(self) -> None:
        self._of: dict[str, deque[Key]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, key: Key) -> None:
        self._of.setdefault(key[0], deque()).append(key)

    def n_of(self, tenant: str) -> int:
        """Number of the tenant's clusters."""
        return len(self._of.get(tenant, ()))

    def pop(self) -> Key:
        tenant = next(iter(self._of))
        keys = self._of.pop(tenant)
        key = keys.popleft()
        if keys:
            self._of[tenant] = keys
        return key


class Backlog:
    """Filled by the thread that commits, emptied by the thread that diagnoses."""

    def __init__(
        self,
        bounds: BacklogLimits | None = None,
        *,
        owns: Callable[[Key], bool] = lambda key: True,
        skipped: Callable[[Key, int], None] = lambda key, n_rows: None,
        clock_s: Callable[[], float] = time.monotonic,
    ):
        """owns: the clusters whose rows are kept. skipped: called with the rows of a cluster, or of OTHERS, that are
        left out because the tenant has too many clusters.
        """
        self._bounds, self._owns, self._clock_s = bounds or BacklogLimits(), owns, clock_s
        self._skipped = skipped
        self._changed = threading.Condition()
        self._came: deque[tuple[Batch, float]] = deque()
        self._n_in = 0
        self._queues: dict[Key, _Queue] = {}
        self._order = _Order()
        self._samples: dict[Key, _Sample] = {}
        self._n_taken = 0
        self._is_ended = False

    def add(self, batch: Batch) -> int:
        """Add a committed batch; fast. Returns the number of its rows that do not fit."""
        n_rows = count_rows(batch.tables)
        if not n_rows:
            return 0
        with self._changed:
            if self._n_in + n_rows > self._bounds.max_rows_in:
                return n_rows
            self._came.append((batch, self._clock_s()))
            self._n_in += n_rows
            self._changed.notify()
        return 0

    def clear(self) -> None:
        """Drop the waiting rows: they are stored, and will be read again."""
        with self._changed:
            self._came.clear()
            self._queues.clear()
            self._order = _Order()
            self._n_in = 0

    def end(self) -> None:
        """Accept no more rows."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()

    @property
    def is_ended(self) -> bool:
        """Whether end() was called."""
        return self._is_ended

    @property
    def n_waiting(self) -> int:
        """Rows that wait or are being examined."""
        with self._changed:
            return self._n_in + self._n_taken + sum(queue.n_rows for queue in self._queues.values())

    @property
    def lag_s(self) -> float:
        """Waiting time of the oldest row."""
        with self._changed:
            firsts = [queue.parts[0].at_s for queue in self._queues.values() if queue.parts]
            firsts += [self._came[0][1]] if self._came else []
        return self._clock_s() - min(firsts) if firsts else 0.0

    def wait(self, timeout_s: float) -> None:
        """Wait for rows, or for the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._came or self._order or self._is_ended, timeout=timeout_s)

    def turn(self) -> ClusterTurn | None:
        """The rows of the next cluster in turn, until done() is called; None if nothing waits."""
        self._split_by_cluster()
        with self._changed:
            if not self._order:
                return None
            key = self._order.pop()
            queue = self._queues[key]
            now_s = self._clock_s()
            wait_s = now_s - queue.parts[0].at_s
            is_behind = wait_s > self._bounds.behind_s
            queue.note_wait(wait_s, now_s, is_behind=is_behind)
            every = self._sample(key, queue, is_behind=is_behind)
            self._skip(queue)
            parts: list[_Part] = []
            n_rows = 0
            while queue.parts and (not parts or n_rows + queue.parts[0].n_rows <= self._bounds.turn_rows):
                parts.append(queue.parts.popleft())
                n_rows += parts[-1].n_rows
            queue.n_rows -= n_rows
            self._n_taken = n_rows
            n_left_out, queue.n_left_out = queue.n_left_out, 0
            if queue.parts:
                self._order.add(key)
            else:
                del self._queues[key]
        return ClusterTurn(key, _joined(parts), n_rows, n_left_out, is_behind, every)

    def done(self) -> None:
        """The rows of the last turn have been examined."""
        with self._changed:
            self._n_taken = 0

    def _split_by_cluster(self) -> None:
        """Split new batches by cluster."""
        with self._changed:
            came, self._came = self._came, deque()
        for batch, at_s in came:
            all_parts = by_cluster(batch)
            parts = {key: tables for key, tables in all_parts.items() if self._owns(key)}
            if (n_skipped := n_further(batch, all_parts)) and self._owns((batch.tenant, OTHERS)):
                self._skipped((batch.tenant, OTHERS), n_skipped)
            with self._changed:
                self._n_in -= count_rows(batch.tables)
                for key, tables in parts.items():
                    if key not in self._queues:
                        if self._order.n_of(key[0]) >= MAX_CLUSTERS:
                            self._skipped(key, count_rows(tables))
                            continue
                        self._queues[key] = _Queue()
                        self._order.add(key)
                    queue, sample = self._queues[key], self._samples.get(key)
                    part = _sampled(_Part(tables, count_rows(tables), at_s), sample.every if sample else 1)
                    queue.parts.append(part)
                    queue.n_rows += part.n_rows
                    queue.n_left_out += count_rows(tables) - part.n_rows
        with self._changed:
            self._bound_all()

    def _sample(self, key: Key, queue: _Queue, *, is_behind: bool) -> int:
        """Adapt the sample of a cluster to the waiting rows. Returns its k."""
        bounds, now_s = self._bounds, self._clock_s()
        sample = self._samples.get(key, _Sample())
        is_growing = is_behind and now_s - queue.min_at_s >= bounds.patience_s
        has_too_many = is_growing and queue.n_rows > bounds.turn_rows
        while (has_too_many or queue.n_rows > bounds.max_rows) and sample.every < bounds.max_every:
            self._samples[key] = sample = _Sample(2 * sample.every, now_s)
            n_before = queue.n_rows
            queue.parts = deque(_sampled(part, sample.every) for part in queue.parts)
            queue.n_rows = sum(part.n_rows for part in queue.parts)
            queue.n_left_out += n_before - queue.n_rows
            has_too_many = False
            queue.min_wait_s = math.inf
        if is_behind:
            sample.since_s = now_s
        every = sample.every
        if every > 1 and now_s - sample.since_s > bounds.calm_s:
            sample.every, sample.since_s = every // 2, now_s
            if sample.every == 1:
                del self._samples[key]
        return every

    def _skip(self, queue: _Queue) -> None:
        """Skip the oldest rows of a cluster beyond the bound: other tables are not sampled."""
        if queue.n_rows > self._bounds.max_rows:
            _drop_oldest(queue, self._bounds.turn_rows)

    def _bound_all(self) -> None:
        """Skip rows beyond the bound of all clusters, of the tenant with most rows."""
        n_rows = sum(queue.n_rows for queue in self._queues.values())
        while n_rows > self._bounds.max_rows_all:
            of_tenant: Counter[str] = Counter()
            for key, queue in self._queues.items():
                of_tenant[key[0]] += queue.n_rows
            ((tenant, _),) = of_tenant.most_common(1)
            largest = max(
                (queue for key, queue in self._queues.items() if key[0] == tenant),
                key=lambda queue: queue.n_rows,
            )
            n_before = largest.n_rows
            _drop_oldest(largest, n_before // 2)
            if largest.n_rows == n_before:
                return  # only rows that are never left out
            n_rows -= n_before - largest.n_rows


def _drop_oldest(queue: _Queue, most: int) -> None:
    """Drop the oldest rows until at most `most` are left, but none of small tables whose rows are sent only once."""
    kept: list[_Part] = []
    n_before = queue.n_rows
    while queue.parts and queue.n_rows > most:
        part = queue.parts.popleft()
        queue.n_rows -= part.n_rows
        tables = {
            name: rows if name in _ALWAYS_KEPT else rows.slice(0, 0) for name, rows in part.tables.items()
        }
        kept.append(_Part(tables, count_rows(tables), part.at_s))
    if kept:
        at_s = queue.parts[0].at_s if queue.parts else kept[-1].at_s
        whole = _Part(_joined(kept), sum(part.n_rows for part in kept), at_s)
        queue.parts.appendleft(whole)
        queue.n_rows += whole.n_rows
    queue.n_left_out += n_before - queue.n_rows


def _sampled(part: _Part, every: int) -> _Part:
    """The part with the collectives of every k-th round only; collectives without a round are kept."""
    rows = part.tables.get("collectives")
    if every == 1 or rows is None:
        return part
    is_left_out = pc.not_equal(pc.bit_wise_and(rows["seq"], pa.scalar(every - 1, rows["seq"].type)), 0)
    kept = rows.filter(pc.invert(pc.fill_null(is_left_out, fill_value=False)))
    return _Part({**part.tables, "collectives": kept}, part.n_rows - len(rows) + len(kept), part.at_s)


def by_cluster(batch: Batch) -> dict[Key, dict[str, pa.Table]]:
    """The rows of a batch by tenant and cluster, and by table. Rows without a cluster are of the cluster "".

    At most MAX_CLUSTERS clusters: senders choose the names, and each cluster costs as much as thousands of rows.
    """
    by_key: dict[Key, dict[str, pa.Table]] = {}
    for name in _TABLES:
        rows = batch.tables.get(name)
        if rows is None or not len(rows):
            continue
        for cluster, cluster_rows in _split(rows):
            key = (batch.tenant, cluster)
            if key in by_key or len(by_key) < MAX_CLUSTERS:
                by_key.setdefault(key, {})[name] = cluster_rows
    return by_key


def in_parts(tables: Tables, max_rows: int) -> Iterator[dict[str, pa.Table]]:
    """Stored rows, in the order of their commits, in parts of about max_rows rows."""
    n_parts = -(-sum(map(len, tables.values())) // max_rows)
    times = {name: np.asarray(rows["received_at"].cast(pa.int64())) for name, rows in tables.items()}
    longest = max(times.values(), key=len)
    ends = [longest[len(longest) * number // n_parts] for number in range(1, n_parts)]
    at = dict.fromkeys(tables, 0)
    for end in [*ends, None]:
        until = {
            name: len(each) if end is None else int(np.searchsorted(each, end))
            for name, each in times.items()
        }
        part = {
            name: rows.slice(at[name], until[name] - at[name])
            for name, rows in tables.items()
            if until[name] > at[name]
        }
        at = until
        if part:
            yield part


def n_further(batch: Batch, parts: Mapping[Key, Tables]) -> int:
    """The rows of a batch beyond MAX_CLUSTERS clusters. parts: see by_cluster()."""
    return count_rows(batch.tables) - sum(map(count_rows, parts.values()))


def _split(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each cluster."""
    coded = pc.fill_null(rows["cluster_id"].combine_chunks(), "").dictionary_encode()
    clusters = coded.dictionary.to_pylist()
    if len(clusters) == 1:
        yield clusters[0], rows
        return
    codes = np.asarray(coded.indices)
    order = np.argsort(codes, kind="stable")
    ordered = rows.take(pa.array(order))
    begins = np.searchsorted(codes[order], np.arange(min(len(clusters), MAX_CLUSTERS) + 1)).tolist()
    for cluster, begin, end in zip(clusters, begins, begins[1:], strict=False):
        yield cluster, ordered.slice(begin, end - begin)


def _joined(parts: list[_Part]) -> dict[str, pa.Table]:
    tables: dict[str, list[pa.Table]] = {}
    for part in parts:
        for name, rows in part.tables.items():
            tables.setdefault(name, []).append(rows)
    return {
        name: table[0] if len(table) == 1 else pa.concat_tables(table, promote_options="default")
        for name, table in tables.items()
    }


def count_rows(tables: Tables) -> int:
    """The rows that the diagnosis examines."""
    return sum(len(rows) for name, rows in tables.items() if name in _TABLES)
