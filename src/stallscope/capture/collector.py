"""Takes records out of the kernel's rings: whenever they are asked for, and before a ring fills.

For the latter there is a thread, so that attaching and writing never make a ring overflow. It mostly finds that there
is nothing to do. What waits to be written is bounded: beyond that whole batches are dropped and their records counted.
"""

import threading
from typing import Protocol

from stallscope.events.layout import Array, joined

_EVERY_S = 0.05
_FULL = 1 / 16
"""Of a ring: from here on it is emptied. The rest has room for what may come until the next look."""

_MAX_WAITING_BYTES = 64 << 20


class Source(Protocol):
    """A ring: ring.Ring."""

    def drain(self) -> Array:
        """The records since its last call (possibly none), owned by the caller."""

    def fill(self) -> float:
        """Share of it that is in use."""


class Collector:
    """Looks after each of `sources` 20 times a second from start() to stop(); taken() gives what has come meanwhile."""

    def __init__(self, *sources: Source, max_waiting_bytes: int = _MAX_WAITING_BYTES):
        self.n_dropped = 0
        self._sources = sources
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[list[Array]] = [[] for _ in sources]
        self._n_waiting_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self._none = [records[:0] for records in self._drain()]

    def start(self) -> None:
        """Begin to drain."""
        self._thread.start()

    def taken(self) -> list[Array]:
        """What has come since the last call, one array for each of the sources, oldest record first.

        Raises what stopped the thread, if anything did.
        """
        if self._failure is None and not self._stop.is_set():
            self._drain()
        with self._lock:
            waiting, self._waiting = self._waiting, [[] for _ in self._sources]
            self._n_waiting_bytes = 0
        if self._failure is not None:
            raise self._failure
        return [joined(batches or [none]) for none, batches in zip(self._none, waiting, strict=True)]

    def stop(self) -> None:
        """Drain once more and end the thread; taken() gives the rest."""
        self._stop.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        if self._failure is None:
            self._drain()

    def _run(self) -> None:
        try:
            while not self._stop.wait(_EVERY_S):
                if any(source.fill() > _FULL for source in self._sources):
                    self._drain()
        except BaseException as error:  # noqa: BLE001 (it is raised again in the main thread, by taken())
            self._failure = error

    def _drain(self) -> list[Array]:
        with self._lock:
            drained = [source.drain() for source in self._sources]
            for i, records in enumerate(drained):
                self._keep(i, records)
        return drained

    def _keep(self, source: int, records: Array) -> None:
        if not len(records):
            return
        if self._n_waiting_bytes + records.nbytes > self._max_waiting_bytes:
            self.n_dropped += len(records)
            return
        self._waiting[source].append(records)
        self._n_waiting_bytes += records.nbytes
