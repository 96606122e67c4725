"""Takes records out of the kernel's rings: whenever they are asked for, and before a ring fills.

For the latter there is a thread, so that attaching and writing never make a ring overflow. It sleeps until the kernel
side says that a quarter of a ring is in use. What waits to be written is bounded: beyond that whole batches are dropped
and their records counted.
"""

import os
import select
import threading
from typing import Protocol

from stallscope.events.layout import Array, joined

_LOOK_EVERY_S = 1.0
"""Without being told: where records come at one time on very many CPUs, none of them may be the one that tells."""

_AGAIN_S = 0.01
"""While a record that is being written keeps those behind it in the ring."""

_FULL = 1 / 16
"""Of a ring: from here on it is worth while."""

_MAX_WAITING_BYTES = 64 << 20


class Source(Protocol):
    """A ring: ring.Ring."""

    @property
    def fd(self) -> int:
        """Readable once it fills (epoll, edge-triggered)."""

    def drain(self) -> Array:
        """The records since its last call (possibly none), owned by the caller."""

    def fill(self) -> float:
        """Share of it that is in use."""


class Collector:
    """Looks after `sources` from start() to stop(); taken() gives what has come meanwhile."""

    def __init__(self, *sources: Source, max_waiting_bytes: int = _MAX_WAITING_BYTES):
        self.n_dropped = 0
        self._sources = sources
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[list[Array]] = [[] for _ in sources]
        self._n_waiting_bytes = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
        if self._failure is None and not self._is_stopped:
            self._drain()
        with self._lock:
            waiting, self._waiting = self._waiting, [[] for _ in self._sources]
            self._n_waiting_bytes = 0
        if self._failure is not None:
            raise self._failure
        return [joined(batches or [none]) for none, batches in zip(self._none, waiting, strict=True)]

    def stop(self) -> None:
        """Drain once more and end the thread; taken() gives the rest."""
        self._is_stopped = True
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
            if self._failure is None:
                self._drain()
        os.close(self._stop_fd)

    def _run(self) -> None:
        try:
            with select.epoll() as ready:
                for fd in (self._stop_fd, *(source.fd for source in self._sources)):
                    ready.register(fd, select.EPOLLIN | select.EPOLLET)
                while not self._is_stopped:
                    if self._fills():
                        self._drain()
                    ready.poll(_AGAIN_S if self._fills() else _LOOK_EVERY_S)
        except BaseException as error:  # noqa: BLE001 (it is raised again in the main thread, by taken())
            self._failure = error

    def _fills(self) -> bool:
        return any(source.fill() > _FULL for source in self._sources)

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
