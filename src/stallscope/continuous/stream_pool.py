"""A few processes of streams for diagnoses that come and go, such as the diagnosis of each slot of a hub.

A cluster belongs to one diagnosis at a time. Each diagnosis uses one of the processes; the steps of several diagnoses
take turns. If a process ends, each of its diagnoses gets ProcessEnded once, because the streams of all of them are
lost.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from stallscope.continuous.backlog import Key
from stallscope.continuous.stream_process import ProcessEnded, StepFailed, StreamProcess
from stallscope.continuous.streams import AdvancedStream
from stallscope.diagnose import Change, Stream

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass
class _Shared:
    """A process, and the number of diagnoses that use it."""

    process: StreamProcess
    n_users: int = 0
    n_ends: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class StreamPool:
    """The processes; each starts with its first rows. Thread-safe; close() after the streams of all diagnoses."""

    def __init__(self, make_stream: Callable[[], Stream], n_processes: int):
        self._lock = threading.Lock()
        self._processes = [_Shared(StreamProcess(make_stream)) for _ in range(n_processes)]

    def streams(self) -> "PooledStreams":
        """Streams for one diagnosis, in the process with the fewest diagnoses."""
        with self._lock:
            shared = min(self._processes, key=lambda each: each.n_users)
            shared.n_users += 1
        return PooledStreams(self, shared)

    def leave(self, shared: _Shared) -> None:
        """A diagnosis does not use a process any more."""
        with self._lock:
            shared.n_users -= 1

    def close(self) -> None:
        """End the processes."""
        for shared in self._processes:
            with shared.lock:
                shared.process.close()


class PooledStreams:
    """The streams of one diagnosis, see streams.Diagnoses. For one thread at a time."""

    def __init__(self, pool: StreamPool, shared: _Shared):
        self._pool, self._shared = pool, shared
        self._n_ends = shared.n_ends
        self._keys: set[Key] = set()
        self._is_closed = False

    def feed(
        self, key: Key, tables: Mapping[str, pa.Table], *, n_left_out: int = 0, is_behind: bool = False
    ) -> list[Change] | None:
        """See streams.Diagnoses."""

        def step(process: StreamProcess) -> list[Change] | None:
            self._keys.add(key)  # a failed step may leave a stream as well
            return process.feed(key, tables, n_left_out=n_left_out, is_behind=is_behind)

        return self._answer(step)

    def tick(self, keys: Collection[Key] | None = None) -> dict[Key, AdvancedStream]:
        """See streams.Diagnoses; of the streams of this diagnosis only."""
        wanted = self._keys if keys is None else self._keys & set(keys)
        return self._answer(lambda process: process.tick(set(wanted))) if wanted else {}

    def forget(self, keys: Iterable[Key]) -> None:
        """See streams.Diagnoses."""
        gone = self._keys & set(keys)
        if gone:
            self._answer(lambda process: process.forget(gone))
            self._keys -= gone

    def close(self) -> None:
        """End the streams of this diagnosis; the process continues."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.forget(list(self._keys))
        except StepFailed as error:
            _LOG.warning("the continuous diagnosis: %s", error)
        finally:
            self._pool.leave(self._shared)

    def _answer(self, step: Callable[[StreamProcess], _T]) -> _T:
        """The result of a step. Raises ProcessEnded also if the process ended in a step of another diagnosis."""
        shared = self._shared
        with shared.lock:
            n_ends_before, self._n_ends = self._n_ends, shared.n_ends
            if n_ends_before != shared.n_ends and self._keys:
                self._keys.clear()
                raise ProcessEnded("the diagnosis process ended while it examined rows of another cluster")
            try:
                return step(shared.process)
            except ProcessEnded:
                shared.n_ends += 1
                self._n_ends = shared.n_ends
                self._keys.clear()
                raise
