"""Translates the device numbers of a process into the device numbers of the machine."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stallscope.capture.gpu.visible_devices import GpuNumbers, visible
from stallscope.capture.process.identity import environment
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import MemoryKind

_ON_DEVICE = (MemoryKind.DEVICE, MemoryKind.POOL, MemoryKind.VMM)


@dataclass
class Renumbering:
    """numbers: of the GPUs of this machine. proc: where /proc is mounted."""

    numbers: GpuNumbers
    proc: Path = Path("/proc")
    _seen: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def renumber(self, rows: Array) -> None:
        """Renumbers `device` in place, in rows that have a `pid`.

        A process that sees a single GPU uses that GPU, if any. Numbers that the process cannot have stay unchanged.
        """
        for pid in np.unique(rows["pid"]).tolist():
            seen = self._seen_by(pid)
            if not seen or (len(seen) > 1 and seen == tuple(range(len(seen)))):
                continue
            mine = rows["pid"] == pid
            own = rows["device"][mine]
            if len(seen) == 1:
                own = np.where((own == UNKNOWN) & _is_on_device(rows)[mine], 0, own)
            rows["device"][mine] = np.where(
                (own >= 0) & (own < len(seen)), np.array(seen)[np.clip(own, 0, len(seen) - 1)], own
            )

    def forget(self, pid: int) -> None:
        """The process has ended; its number may be reused."""
        self._seen.pop(pid, None)

    def _seen_by(self, pid: int) -> tuple[int, ...]:
        if pid not in self._seen:
            home = self.proc / str(pid)
            self._seen[pid] = visible(home, environment(home), self.numbers)
        return self._seen[pid]


def _is_on_device(rows: Array) -> Array:
    """Whether each row refers to a device: host memory does not."""
    if "kind" not in (rows.dtype.names or ()):
        return np.ones(len(rows), bool)
    return np.isin(rows["kind"], _ON_DEVICE)
