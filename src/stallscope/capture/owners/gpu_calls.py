"""The last GPU call of each traced process, and its GPUs, from the rows of the capture.

Names of GPUs: the driver's number of a GPU, the UUID of a partition (MIG).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.capture.owners.idle_rows import GpuProcess
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
    """State by process. _gpus: the GPUs on which the driver lists a process, with their partition."""

    _used_ns: dict[int, int] = field(default_factory=dict)
    _device: dict[int, int] = field(default_factory=dict)
    _gpus: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    _uuids: dict[tuple[int, int], str] = field(default_factory=dict)

    def take(self, table: Table, rows: Array) -> None:
        """Rows of any table."""
        if table is layout.PROCESSES:
            self._device |= dict(zip(rows["pid"].tolist(), rows["device"].tolist(), strict=True))
        elif table is layout.GPUS:
            for gpu, mig, uuid in zip(*(rows[name].tolist() for name in ("gpu", "mig", "uuid")), strict=True):
                self._uuids[gpu, mig] = uuid.decode("ascii", "replace")
        elif table is layout.GPU_PROCESSES:
            columns = (rows[name].tolist() for name in ("pid", "gpu", "mig", "alive"))
            for pid, gpu, mig, is_alive in zip(*columns, strict=True):
                gpus = self._gpus.get(pid, frozenset())
                self._gpus[pid] = gpus | {(gpu, mig)} if is_alive else gpus - {(gpu, mig)}
            self._gpus = {pid: gpus for pid, gpus in self._gpus.items() if gpus}
        if shows_use := _CALLS.get(table.name):
            self._note_use(rows[shows_use(rows)])

    def _note_use(self, rows: Array) -> None:
        pids, of_pid = np.unique(rows["pid"], return_inverse=True)
        newest_ns = np.zeros(len(pids), np.int64)
        np.maximum.at(newest_ns, of_pid, rows["ts_ns"])
        for pid, ns in zip(pids.tolist(), newest_ns.tolist(), strict=True):
            self._used_ns[pid] = max(ns, self._used_ns.get(pid, 0))

    def located(self, pid: int, device: int) -> None:
        """The GPU of a process, once it is known."""
        self._device[pid] = device

    def forget(self, pid: int) -> None:
        """This process has ended."""
        self._used_ns.pop(pid, None)
        self._device.pop(pid, None)

    def number(self, name: str) -> str:
        """The number of a GPU that a scheduler names by UUID; another name is returned unchanged."""
        return next((str(gpu) for (gpu, mig), uuid in self._uuids.items() if uuid == name and mig < 0), name)

    def occupied(self, traced: Collection[int]) -> set[str]:
        """The GPUs on which the driver lists a process that is not traced."""
        return {self._name(*gpu) for pid, gpus in self._gpus.items() if pid not in traced for gpu in gpus}

    def _name(self, gpu: int, mig: int) -> str:
        return str(gpu) if mig < 0 else self._uuids.get((gpu, mig), f"{gpu}:{mig}")

    def _names(self, pid: int, uuid: str) -> tuple[str, ...]:
        """The GPUs of a process, as the driver lists them; otherwise its only GPU, if it is known."""
        if gpus := self._gpus.get(pid):
            return tuple(sorted(self._name(*gpu) for gpu in gpus))
        device = self._device.get(pid, UNKNOWN)
        name = self.number(uuid) if uuid else ("" if device == UNKNOWN else str(device))
        return (name,) if name else ()

    def processes(
        self,
        pids: Iterable[int],
        labels: Callable[[int], Mapping[str, str]],
        n_peers: Callable[[int], int],
        gpu_uuid: Callable[[int], str] = lambda pid: "",
    ) -> list[GpuProcess]:
        """The traced processes. n_peers: processes of the group of a process. gpu_uuid: its only GPU, if known."""
        return [
            GpuProcess(
                pid, labels(pid), self._used_ns.get(pid, 0), self._names(pid, gpu_uuid(pid)), n_peers(pid)
            )
            for pid in pids
        ]
