"""CPU time and data of processes from /proc, to distinguish a process that prepares data from an idle process."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.capture.process.process_identity import environment, small_file
from stallscope.capture.process.workload import workload

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


@dataclass
class ProcActivity:
    """proc: where /proc is mounted. Labels of a process are read once, until another process has its number."""

    proc: Path = Path("/proc")
    labels_of: Callable[[int, Mapping[str, str]], dict[str, str]] = workload
    _labels: dict[tuple[int, bytes], dict[str, str]] = field(default_factory=dict)

    def used(self, pids: Iterable[int]) -> tuple[int, int]:
        """CPU time in ns, and bytes read and written, of these processes and their descendants."""
        children = self._children()
        waiting, known = list(pids), set[int]()
        while waiting:
            pid = waiting.pop()
            if pid not in known:
                known.add(pid)
                waiting += children.get(pid, ())
        each = [self._used(pid) for pid in known]
        return sum(cpu for cpu, _ in each), sum(data for _, data in each)

    def with_label(self, label: str, value: str) -> list[int]:
        """The processes of this machine with a label, by their environment and control groups."""
        found: dict[tuple[int, bytes], dict[str, str]] = {}
        for pid in self._pids():
            key = (pid, _started(self._stat(pid)))
            found[key] = self._labels.get(key) or self.labels_of(pid, environment(self.proc / str(pid)))
        self._labels = found
        return [pid for (pid, _), labels in found.items() if labels.get(label) == value]

    def _pids(self) -> list[int]:
        return [int(path.name) for path in self.proc.iterdir() if path.name.isdecimal()]

    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for pid in self._pids():
            fields = self._stat(pid)
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(pid)
        return children

    def _stat(self, pid: int) -> list[bytes]:
        """The fields of /proc/PID/stat from the state on; empty if the process has ended."""
        return small_file(f"{self.proc}/{pid}/stat").rpartition(b")")[2].split()

    def _used(self, pid: int) -> tuple[int, int]:
        fields = self._stat(pid)
        cpu_ns = (int(fields[11]) + int(fields[12])) * _TICK_NS if len(fields) > 12 else 0
        lines = small_file(f"{self.proc}/{pid}/io").splitlines()
        return cpu_ns, sum(int(line.split()[1]) for line in lines if line.startswith((b"rchar", b"wchar")))


def _started(fields: list[bytes]) -> bytes:
    return fields[19] if len(fields) > 19 else b""
