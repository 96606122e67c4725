"""Drains records from the kernel's rings: on request, and before a ring fills.

A thread drains filling rings, so that attaching and writing never make a ring overflow. It sleeps until the kernel side
signals that a quarter of a ring is in use. The queue of drained batches is bounded: beyond the limit, whole batches are
dropped and their records counted.
"""

import os
import select
import threading
from typing import Protocol

from stallscope.events.layout import Array, joined

_POLL_EVERY_S = 1.0
"""Longest sleep without a signal: if records come at the same time on very many CPUs, it is possible that none of
them signals.
"""

_RETRY_S = 0.01
"""Pause while an unfinished record blocks the records behind it in the ring."""

_DRAIN_SHARE = 1 / 16
"""Share of a ring in use from which on it is drained."""

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
    """Drains `sources` from start() to stop(); take() returns the records since the last call."""

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
        self._empty = [records[:0] for records in self._drain()]

    def start(self) -> None:
        """Begin to drain."""
        self._thread.start()

    def take(self) -> list[Array]:
        """The records since the last call, one array for each of the sources, oldest record first.

        Raises the error that stopped the thread, if any.
        """
        if self._failure is None and not self._is_stopped:
            self._drain()
        with self._lock:
            waiting, self._waiting = self._waiting, [[] for _ in self._sources]
            self._n_waiting_bytes = 0
        if self._failure is not None:
            raise self._failure
        return [joined(batches or [empty]) for empty, batches in zip(self._empty, waiting, strict=True)]

    def stop(self) -> None:
        """Drain once more and end the thread; take() returns the remaining records."""
        self._is_stopped = True
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
            if self._failure is None:
                self._drain()
        os.close(self._stop_fd)

    def _run(self) -> None:
        try:
            with select.epoll() as poller:
                for fd in (self._stop_fd, *(source.fd for source in self._sources)):
                    poller.register(fd, select.EPOLLIN | select.EPOLLET)
                while not self._is_stopped:
                    if self._is_filling():
                        self._drain()
                    poller.poll(_RETRY_S if self._is_filling() else _POLL_EVERY_S)
        except BaseException as error:  # noqa: BLE001 (it is raised again in the main thread, by take())
            self._failure = error

    def _is_filling(self) -> bool:
        return any(source.fill() > _DRAIN_SHARE for source in self._sources)

    def _drain(self) -> list[Array]:
        with self._lock:
            drained = [source.drain() for source in self._sources]
            for i, records in enumerate(drained):
                self._enqueue(i, records)
        return drained

    def _enqueue(self, source: int, records: Array) -> None:
        if not len(records):
            return
        if self._n_waiting_bytes + records.nbytes > self._max_waiting_bytes:
            self.n_dropped += len(records)
            return
        self._waiting[source].append(records)
        self._n_waiting_bytes += records.nbytes
