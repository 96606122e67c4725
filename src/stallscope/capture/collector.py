"""The thread that empties the kernel's rings, so that attaching and writing never make them overflow.

It copies raw records and does nothing else. What waits to be written is bounded: beyond that whole batches
are dropped and their records counted.
"""

import threading
from collections.abc import Callable

import numpy as np

from stallscope.events.layout import Array

_EVERY_S = 0.05
_MAX_WAITING_BYTES = 64 << 20

Drain = Callable[[], Array]
"""Gives the records since its last call (possibly none), owned by the caller."""


class Collector:
    """Calls each of `drains` 20 times a second from start() to stop(); taken() gives what has come meanwhile."""

    def __init__(self, *drains: Drain, max_waiting_bytes: int = _MAX_WAITING_BYTES):
        self.n_dropped = 0
        self._drains = drains
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[list[Array]] = [[] for _ in drains]
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
        """What has been drained since the last call, one array for each of the drains, oldest record first.

        Raises what stopped the thread, if anything did.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, [[] for _ in self._drains]
            self._n_waiting_bytes = 0
        if self._failure is not None:
            raise self._failure
        return [_joined(none, batches) for none, batches in zip(self._none, waiting, strict=True)]

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
                self._drain()
        except BaseException as error:  # noqa: BLE001 (it is raised again in the main thread, by taken())
            self._failure = error

    def _drain(self) -> list[Array]:
        drained = [drain() for drain in self._drains]
        for i, records in enumerate(drained):
            self._keep(i, records)
        return drained

    def _keep(self, source: int, records: Array) -> None:
        if not len(records):
            return
        with self._lock:
            if self._n_waiting_bytes + records.nbytes > self._max_waiting_bytes:
                self.n_dropped += len(records)
                return
            self._waiting[source].append(records)
            self._n_waiting_bytes += records.nbytes


def _joined(none: Array, batches: list[Array]) -> Array:
    """One array of all batches, put together as bytes: numpy takes 30 us a batch to compare and copy fields."""
    if not batches:
        return none
    return np.concatenate([batch.view(np.uint8) for batch in batches]).view(none.dtype)
