"""The continuous diagnosis of a hub: its clusters, divided into shards.

With processes, each shard's streams are in a process of their own, so that the diagnosis of several clusters uses
several cores and the receiver keeps its core.
"""

import zlib
from collections.abc import Callable, Iterator
from functools import partial

from stallscope.continuous.backlog import BacklogLimits, Key
from stallscope.continuous.shard import Shard, ShardTotals, stored_tail
from stallscope.continuous.stream_process import StreamProcess
from stallscope.continuous.streams import Streams
from stallscope.diagnose import Stream
from stallscope.store.hub.batches import Batch
from stallscope.store.hub.store_protocol import Store


class ContinuousDiagnosis:
    """The continuous diagnosis of one hub. close() before the store is closed."""

    def __init__(
        self,
        store: Store,
        make_stream: Callable[[], Stream] = Stream,
        *,
        bounds: BacklogLimits | None = None,
        n_processes: int = 0,
    ):
        """make_stream: creates a stream with the current limits and prices. n_processes: 0 uses a thread instead."""
        tail = list(stored_tail(store))
        n = max(n_processes, 1)
        make = StreamProcess if n_processes else Streams
        self._shards = [
            Shard(
                store,
                make(make_stream),
                _each_once(list(tail)),
                owns=partial(_is_of, number, n),
                bounds=bounds,
            )
            for number in range(n)
        ]
        store.subscribe(self._on_commit)

    @property
    def numbers(self) -> ShardTotals:
        """The totals of all shards; the largest lag."""
        return ShardTotals.of_all([shard.numbers for shard in self._shards])

    def close(self) -> None:
        """Stop. Open incidents stay open in the table, and are examined again at the next start."""
        for shard in self._shards:
            shard.close()

    def is_idle(self) -> bool:
        """Whether all committed rows have been examined."""
        return all(shard.is_idle() for shard in self._shards)

    def confirmed_ns(self, tenant: str) -> dict[str, int]:
        """When the diagnosis last confirmed each open incident of a tenant, ns since 1970."""
        return {
            incident: at_ns
            for shard in self._shards
            for incident, at_ns in shard.confirmed_ns(tenant).items()
        }

    def _on_commit(self, batch: Batch) -> None:
        """A committed batch; called in the writer's thread."""
        for shard in self._shards:
            shard.add(batch)


def _each_once(batches: list[Batch]) -> Iterator[Batch]:
    """Each batch, whose memory is free as soon as it was read."""
    while batches:
        yield batches.pop(0)


def _is_of(shard: int, n_shards: int, key: Key) -> bool:
    """Whether a shard has a cluster."""
    return zlib.crc32("\0".join(key).encode()) % n_shards == shard
