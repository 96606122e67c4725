"""The last GPU call of each traced process, and its GPU, from the rows of the capture."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.capture.owners.idle_gpus import GpuProcess
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.names import Op

_CALLS: Mapping[str, Callable[[Array], Array]] = {
    layout.COLLECTIVES.name: lambda rows: np.ones(len(rows), bool),
    layout.CALLS.name: lambda rows: np.ones(len(rows), bool),
    layout.OPERATIONS.name: lambda rows: rows["op"] != Op.IOCTL,
    layout.SNAPSHOTS.name: lambda rows: rows["in_call"] != Op.NONE,
    layout.GPU_USE.name: lambda rows: rows["sm_percent"] > 0,
}
"""The rows of a table that show a use of the GPU. A process inside a call waits for its GPU, or for its peers."""


@dataclass
class GpuCalls:
    """State by process."""

    _used_ns: dict[int, int] = field(default_factory=dict)
    _device: dict[int, int] = field(default_factory=dict)

    def take(self, table: Table, rows: Array) -> None:
        """Rows of any table."""
        if table is layout.PROCESSES:
            self._device |= dict(zip(rows["pid"].tolist(), rows["device"].tolist(), strict=True))
        if shows_use := _CALLS.get(table.name):
            used = rows[shows_use(rows)]
            pids, of_pid = np.unique(used["pid"], return_inverse=True)
            newest_ns = np.zeros(len(pids), np.int64)
            np.maximum.at(newest_ns, of_pid, used["ts_ns"])
            for pid, ns in zip(pids.tolist(), newest_ns.tolist(), strict=True):
                self._used_ns[pid] = max(ns, self._used_ns.get(pid, 0))

    def located(self, pid: int, device: int) -> None:
        """The GPU of a process, once it is known."""
        self._device[pid] = device

    def forget(self, pid: int) -> None:
        """This process has ended."""
        self._used_ns.pop(pid, None)
        self._device.pop(pid, None)

    def _number(self, pid: int) -> str:
        device = self._device.get(pid, UNKNOWN)
        return "" if device == UNKNOWN else str(device)

    def processes(
        self,
        pids: Iterable[int],
        labels: Callable[[int], Mapping[str, str]],
        members: Collection[int],
        gpu_uuid: Callable[[int], str] = lambda pid: "",
    ) -> list[GpuProcess]:
        """The traced processes. members: processes of communicators. gpu_uuid: of a GPU or MIG instance, if known."""
        return [
            GpuProcess(
                pid,
                labels(pid),
                self._used_ns.get(pid, 0),
                gpu_uuid(pid) or self._number(pid),
                pid in members,
            )
            for pid in pids
        ]
