"""The thread that empties the kernel's ring, so that attaching and writing never make it overflow.

It copies raw records and does nothing else. What waits to be written is bounded: beyond that whole batches
are dropped and their records counted.
"""

import threading
from collections import deque
from collections.abc import Callable

from stallscope.events.layout import Array

_EVERY_S = 0.025
_MAX_WAITING_BYTES = 64 << 20


class Collector:
    """Calls `drain` 40 times a second from start() to stop(); `taken()` gives what has come meanwhile.

    drain: gives the records since its last call, owned by the caller (possibly none).
    """

    def __init__(self, drain: Callable[[], Array], *, max_waiting_bytes: int = _MAX_WAITING_BYTES):
        self.n_dropped = 0
        self._drain = drain
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[Array] = deque()
        self._n_waiting_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)

    def start(self) -> None:
        """Begin to drain."""
        self._thread.start()

    def taken(self) -> list[Array]:
        """What has been drained since the last call. Raises what stopped the thread, if anything did."""
        with self._lock:
            batches, self._waiting = list(self._waiting), deque()
            self._n_waiting_bytes = 0
        if self._failure is not None:
            raise self._failure
        return batches

    def stop(self) -> None:
        """Drain once more and end the thread; taken() gives the rest."""
        self._stop.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        if self._failure is None:
            self._keep(self._drain())

    def _run(self) -> None:
        try:
            while not self._stop.wait(_EVERY_S):
                self._keep(self._drain())
        except BaseException as error:  # noqa: BLE001 (it is raised again in the main thread, by taken())
            self._failure = error

    def _keep(self, records: Array) -> None:
        if not len(records):
            return
        with self._lock:
            if self._n_waiting_bytes + records.nbytes > self._max_waiting_bytes:
                self.n_dropped += len(records)
                return
            self._waiting.append(records)
            self._n_waiting_bytes += records.nbytes
