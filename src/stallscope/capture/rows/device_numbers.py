"""Translates the device numbers of a process into the device numbers of the machine."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stallscope.capture.process.process_identity import environment
from stallscope.capture.process.visible_devices import GpuNumbers, visible_gpus
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import MemoryKind

_ON_DEVICE = (MemoryKind.DEVICE, MemoryKind.POOL, MemoryKind.VMM)


@dataclass
class DeviceNumbers:
    """numbers: the numbers of this machine's GPUs. proc: mount point of procfs."""

    numbers: GpuNumbers
    proc: Path = Path("/proc")
    _gpus_of_pid: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def renumber(self, rows: Array) -> None:
        """Renumber `device` in place, in rows that have a `pid`.

        A process that sees a single GPU uses that GPU, if any. Numbers that the process cannot have stay unchanged.
        """
        for pid in np.unique(rows["pid"]).tolist():
            gpus = self._visible_gpus(pid)
            if not gpus or (len(gpus) > 1 and gpus == tuple(range(len(gpus)))):
                continue
            is_of_process = rows["pid"] == pid
            numbers = rows["device"][is_of_process]
            if len(gpus) == 1:
                numbers = np.where((numbers == UNKNOWN) & _is_on_device(rows)[is_of_process], 0, numbers)
            rows["device"][is_of_process] = np.where(
                (numbers >= 0) & (numbers < len(gpus)),
                np.array(gpus)[np.clip(numbers, 0, len(gpus) - 1)],
                numbers,
            )

    def forget(self, pid: int) -> None:
        """The process has ended; its number may be reused."""
        self._gpus_of_pid.pop(pid, None)

    def _visible_gpus(self, pid: int) -> tuple[int, ...]:
        if pid not in self._gpus_of_pid:
            process_dir = self.proc / str(pid)
            self._gpus_of_pid[pid] = visible_gpus(process_dir, environment(process_dir), self.numbers)
        return self._gpus_of_pid[pid]


def _is_on_device(rows: Array) -> Array:
    """Whether each row refers to a GPU; rows of host memory do not."""
    if "kind" not in (rows.dtype.names or ()):
        return np.ones(len(rows), bool)
    return np.isin(rows["kind"], _ON_DEVICE)
