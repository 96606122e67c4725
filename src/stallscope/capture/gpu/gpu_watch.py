"""Watches the GPUs in a separate thread, because the driver may be slow to answer.

An error (Xid) is noticed at the next reading, so its time may be up to two seconds late.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from stallscope.capture.gpu.gpu_counters import EVERY, GpuCounters
from stallscope.capture.gpu.gpu_edges import GpuEdges
from stallscope.capture.gpu.gpu_state import GpuStates
from stallscope.capture.gpu.nvml import devices, library, query, text
from stallscope.errors import CannotTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array, Table

EVERY_S = 1.0
_STALE_NS = 15 * 10**9
_MAX_WAITING = 10_000
_MAX_XIDS = 64
"""Limit of errors per reading: a broken GPU may report the same error without end."""


class Gpus:
    """Reads the GPUs from the start to close(). Raises CannotTrace without a driver or without its bindings."""

    def __init__(
        self,
        node: int,
        *,
        every_s: float = EVERY_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
        lib: Callable[[], Any] = library,
    ):
        self._now_ns = now_ns
        self._every_s = every_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pending: dict[Table, list[Array]] = {
            table: [] for table in (layout.GPUS, layout.GPU_PROCESSES, layout.GPU_USE, layout.GPU_COUNTERS)
        }
        self._edges = GpuEdges()
        self._latest = layout.empty(layout.GPUS)
        self._n_readings = 0
        with ExitStack() as stack:
            self._nvml = stack.enter_context(lib())
            self._states = GpuStates(self._nvml, node)
            self._numbers = self._states.numbers()
            self.gpu_numbers = self._states.gpu_numbers()
            self._xids = _XidEvents(self._nvml)
            stack.callback(self._xids.close)
            self._counters = GpuCounters(self._nvml, node, dict(devices(self._nvml)))
            stack.callback(self._counters.close)
            self._resources = stack.pop_all()
        self._thread = threading.Thread(target=self._watch, name="gpus", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._states)

    def take_rows(self) -> list[tuple[Table, Array]]:
        """The rows to store since the last call, by table."""
        with self._lock:
            rows_by_table, self._pending = self._pending, {table: [] for table in self._pending}
        return [(table, np.concatenate(batches)) for table, batches in rows_by_table.items() if batches]

    def latest(self) -> Array:
        """The last reading: one row of GPUS for each GPU and partition; empty if the reading is too old to be valid."""
        with self._lock:
            is_fresh = self._now_ns() - self._latest["ts_ns"] < _STALE_NS
            return self._latest[is_fresh]

    def close(self) -> None:
        """Stop reading. Does not wait for a driver that does not answer."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._resources.close()

    def _watch(self) -> None:
        while True:
            self._read()
            if self._stop.wait(self._every_s):
                return

    def _read(self) -> None:
        now_ns = self._now_ns()
        reading = self._states.read(now_ns)
        rows = self._edges.changed_gpus(np.concatenate([reading.gpus, *self._errors(reading.gpus)]))
        processes = (
            None if reading.processes is None else self._edges.changed_processes(reading.processes, now_ns)
        )
        counters = self._counters.read(now_ns) if self._n_readings % EVERY == 0 else None
        self._n_readings += 1
        with self._lock:
            self._latest = reading.gpus
            self._queue(layout.GPUS, rows)
            self._queue(layout.GPU_USE, reading.use)
            if counters is not None:
                self._queue(layout.GPU_COUNTERS, counters)
            if processes is not None:
                self._queue(layout.GPU_PROCESSES, processes)

    def _queue(self, table: Table, rows: Array) -> None:
        """Queue rows for take_rows(). The oldest rows are dropped if they are not taken for a long time."""
        if len(rows):
            self._pending[table] = [*self._pending[table], rows][-_MAX_WAITING:]

    def _errors(self, rows: Array) -> list[Array]:
        """A separate row for each Xid since the last reading: the GPU's present state with the error number."""
        error_rows = []
        for uuid, xid in self._xids.poll():
            gpu_rows = rows[(rows["gpu"] == self._numbers.get(uuid, -1)) & (rows["mig"] == UNKNOWN)].copy()
            gpu_rows["xid"] = xid
            error_rows.append(gpu_rows)
        return error_rows


def watch_gpus(node: int, note: Callable[[str], None]) -> Gpus | None:
    """Start to watch the GPUs of this machine. Without a driver or its bindings, prints a note and returns None."""
    try:
        return Gpus(node)
    except CannotTrace as error:
        note(f"the state of the GPUs is not recorded: {error}")
        return None


class _XidEvents:
    """The errors that the driver reports. Empty without permission or on an old driver."""

    def __init__(self, nvml: Any):
        self._nvml = nvml
        self._set = query(nvml, nvml.nvmlEventSetCreate)
        for _, handle in devices(nvml) if self._set is not None else ():
            query(nvml, nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, self._set)

    def poll(self) -> list[tuple[bytes, int]]:
        """UUID of the GPU and number of each error since the last call."""
        nvml = self._nvml
        errors: list[tuple[bytes, int]] = []
        while self._set is not None and len(errors) < _MAX_XIDS:
            event = query(nvml, nvml.nvmlEventSetWait, self._set, 0)
            if event is None:
                break
            if event.eventType & nvml.nvmlEventTypeXidCriticalError:
                uuid = query(nvml, nvml.nvmlDeviceGetUUID, event.device) or ""
                errors.append((text(uuid).encode()[:48], int(event.eventData)))
        return errors

    def close(self) -> None:
        if self._set is not None:
            query(self._nvml, self._nvml.nvmlEventSetFree, self._set)
