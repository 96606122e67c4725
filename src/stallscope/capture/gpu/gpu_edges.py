"""Selects the GPU states to store: states that differ from the last stored state by more than noise."""

from dataclasses import dataclass, field

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array

_STORE_EVERY_NS = 30 * 10**9

_NOISE = {
    "utilization_percent": 4,
    "memory_used_bytes": 256 << 20,
    "sm_mhz": 45,
    "memory_mhz": 45,
    "power_mw": 50_000,
    "temperature_celsius": 4,
}
"""Changes up to these sizes are not stored: clocks move in steps of 15 MHz. Any change of another field is stored."""


@dataclass
class GpuEdges:
    """The last stored row of each GPU and partition, and of each process on a GPU."""

    _gpus: dict[tuple[int, int], Array] = field(default_factory=dict)
    _processes: dict[tuple[int, int, int], Array] = field(default_factory=dict)

    def changed_gpus(self, rows: Array) -> Array:
        """The rows of GPUS to store: changed rows, rows with an error, and one row every 30 s."""
        is_stored = np.zeros(len(rows), bool)
        for i, row in enumerate(rows):
            key = int(row["gpu"]), int(row["mig"])
            last = self._gpus.get(key)
            is_stored[i] = last is None or row["xid"] != UNKNOWN or _is_due(row, last) or _differs(row, last)
            if is_stored[i]:
                self._gpus[key] = row.copy()
        return rows[is_stored]

    def changed_processes(self, rows: Array, now_ns: int) -> Array:
        """The rows of GPU_PROCESSES to store: new processes, large changes of memory, and processes that have ended.

        rows: all processes at now_ns.
        """
        current = {(int(row["gpu"]), int(row["mig"]), int(row["pid"])): row for row in rows}
        stored = []
        for key in self._processes.keys() - current.keys():
            ended = self._processes.pop(key)
            ended["ts_ns"], ended["alive"] = now_ns, 0
            stored.append(ended)
        for key, row in current.items():
            last = self._processes.get(key)
            if last is None or _is_due(row, last) or _differs(row, last):
                stored.append(row)
                self._processes[key] = row.copy()
        return np.array(stored, layout.dtype(layout.GPU_PROCESSES))


def _is_due(row: Array, last: Array) -> bool:
    return bool(row["ts_ns"] - last["ts_ns"] >= _STORE_EVERY_NS)


def _differs(row: Array, last: Array) -> bool:
    for name in row.dtype.names or ():
        if name in ("ts_ns", "node", "xid") or row[name] == last[name]:
            continue
        if name not in _NOISE or UNKNOWN in (row[name], last[name]):
            return True
        if abs(int(row[name]) - int(last[name])) > _NOISE[name]:
            return True
    return False
