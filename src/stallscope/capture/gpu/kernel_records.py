"""The operations on the GPUs of traced processes, from the memory of NCCL's profiler plugin in each of them.

A process without the plugin is asked again from time to time, because NCCL loads the plugin with the first
communicator. The memory outlives its process until it is read and closed here.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from stallscope.capture.gpu.nccl_ring import Event, NcclRing, recorded_events, ring_of
from stallscope.capture.gpu.nccl_trace import kernel_rows
from stallscope.capture.gpu.plugin_windows import PluginWindows
from stallscope.events import layout
from stallscope.events.layout import Array

_RETRY_S = 10.0
_MARGIN_S = 0.2  # the plugin's thread may wait for a CPU


class KernelRecords:
    """Reads and switches the plugin of all traced processes. For one thread, but for request()."""

    def __init__(
        self,
        node: int,
        windows: PluginWindows,
        *,
        find: Callable[[int], NcclRing | None] = ring_of,
        wall_s: Callable[[], float] = time.time,
    ):
        self._node, self._windows, self._find, self._wall_s = node, windows, find, wall_s
        self._rings: dict[int, NcclRing] = {}
        self._asked_s: dict[int, float] = {}
        self._is_requested = False
        self._was_on = False
        self._n_lost = self._n_gone = 0

    @property
    def n_processes(self) -> int:
        """Processes whose plugin is read."""
        return len(self._rings)

    def request(self) -> None:
        """Record soon: the diagnosis is undecided. Safe from any thread."""
        self._is_requested = True

    def second(self, pids: Iterable[int], *, n_calls: int) -> Array:
        """The rows of GPU_KERNELS since the last call, once a second. n_calls: collectives in this second."""
        now_s = self._wall_s()
        running = set(pids)
        self._open(running, now_s)
        rows = [self._drained(pid, ring) for pid, ring in self._rings.items()]
        for pid in self._rings.keys() - running:
            self._close(pid)
        self._windows.note_calls(n_calls, is_on=self._was_on)
        left_s = self._windows.seconds(now_s, is_undecided=self._is_requested) if self._rings else 0.0
        self._is_requested = self._is_requested and not left_s
        for ring in self._rings.values():
            ring.switch(recorded_events(ring) if left_s else Event(0), seconds=left_s)
        self._was_on = left_s > _MARGIN_S
        out = np.concatenate([layout.empty(layout.GPU_KERNELS), *rows])
        return out[np.argsort(out["ts_ns"], kind="stable")]

    def take_lost(self) -> int:
        """The records lost since the last call: overwritten before they were read, or never written."""
        n_lost = sum(ring.n_lost + ring.n_dropped for ring in self._rings.values()) + self._n_gone
        new, self._n_lost = n_lost - self._n_lost, n_lost
        return max(new, 0)

    def close(self) -> None:
        """Switch the plugin off in all processes."""
        for pid in list(self._rings):
            self._close(pid)

    def _open(self, pids: set[int], now_s: float) -> None:
        for pid in self._asked_s.keys() - pids:
            del self._asked_s[pid]
        for pid in pids - self._rings.keys():
            if now_s - self._asked_s.get(pid, -_RETRY_S) < _RETRY_S:
                continue
            self._asked_s[pid] = now_s
            with suppress(OSError, ValueError):
                if ring := self._find(pid):
                    self._rings[pid] = ring

    def _drained(self, pid: int, ring: NcclRing) -> Array:
        records = ring.drain()
        return kernel_rows(records, ring.communicators(), pid=pid, node=self._node)

    def _close(self, pid: int) -> None:
        ring = self._rings.pop(pid)
        self._n_gone += ring.n_lost + ring.n_dropped
        ring.close()
