"""The processes of a job, their CPU time and data, from /proc: a process that prepares data is not idle."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.owners.peers import has_peers
from stallscope.capture.process.process_identity import environment, fields_of_stat, small_file, stat_fields
from stallscope.capture.process.workload import workload

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FRESH_S = 5.0
"""All holders of idle GPUs are measured with one reading of the process table."""
_KERNEL_THREADS = 2
"""The parent of all kernel threads."""
_DATA = (b"rchar", b"wchar", b"read_bytes", b"write_bytes")
"""Fields of /proc/PID/io; the last two include mapped files and delayed writes."""


class JobProcess(NamedTuple):
    """A process of a job. has_peers: see peers.py."""

    pid: int
    comm: str
    labels: Mapping[str, str]
    has_peers: bool = False


class _Stat(NamedTuple):
    parent: int
    started: bytes
    comm: str


@dataclass
class ProcActivity:
    """proc: where /proc is mounted. Labels of a process are read once, until it becomes another program."""

    proc: Path = Path("/proc")
    labels_of: Callable[[int, Mapping[str, str]], dict[str, str]] = workload
    clock_s: Callable[[], float] = time.monotonic
    _processes: dict[tuple[int, _Stat], JobProcess] = field(default_factory=dict)
    _table: dict[int, _Stat] = field(default_factory=dict)
    _read_s: float = float("-inf")

    def used(self, pids: Iterable[int]) -> tuple[int, int]:
        """CPU time in ns, and bytes read and written, of these processes and their descendants.

        Descendants that have ended count with the process that waited for them.
        """
        children: dict[int, list[int]] = {}
        for pid, stat in self._current_table().items():
            children.setdefault(stat.parent, []).append(pid)
        waiting, known = list(pids), set[int]()
        while waiting:
            pid = waiting.pop()
            if pid not in known:
                known.add(pid)
                waiting += children.get(pid, ())
        each = [self._used(pid) for pid in known]
        return sum(cpu for cpu, _ in each), sum(data for _, data in each)

    def with_label(self, label: str, value: str) -> list[JobProcess]:
        """The processes of this machine with a label, by their environment and control groups."""
        processes = {}
        for pid, stat in self._current_table().items():
            key = (pid, stat)
            processes[key] = self._processes.get(key) or self._process(pid, stat)
        self._processes = processes
        return [process for process in processes.values() if process.labels.get(label) == value]

    def _process(self, pid: int, stat: _Stat) -> JobProcess:
        if _KERNEL_THREADS in (pid, stat.parent):
            return JobProcess(pid, stat.comm, {})
        variables = environment(self.proc / str(pid))
        command = small_file(f"{self.proc}/{pid}/cmdline")
        return JobProcess(pid, stat.comm, self.labels_of(pid, variables), has_peers(variables, command))

    def _current_table(self) -> dict[int, _Stat]:
        now_s = self.clock_s()
        if now_s - self._read_s >= _FRESH_S:
            pids = [int(path.name) for path in self.proc.iterdir() if path.name.isdecimal()]
            stats = {pid: self._stat(pid) for pid in pids}
            self._table = {pid: stat for pid, stat in stats.items() if stat}
            self._read_s = now_s
        return self._table

    def _stat(self, pid: int) -> _Stat | None:
        """None if the process has ended."""
        text = small_file(f"{self.proc}/{pid}/stat")
        fields = fields_of_stat(text)
        name = text.partition(b"(")[2].rpartition(b")")[0].decode(errors="replace")
        return _Stat(int(fields[1]), fields[19], name) if len(fields) > 19 else None

    def _used(self, pid: int) -> tuple[int, int]:
        fields = stat_fields(f"{self.proc}/{pid}")
        if len(fields) <= 14:
            return 0, 0
        lines = small_file(f"{self.proc}/{pid}/io").splitlines()
        data = sum(int(line.split()[1]) for line in lines if line.startswith(_DATA))
        page_faults = int(fields[9]) + int(fields[10])
        return sum(map(int, fields[11:15])) * _TICK_NS, data + page_faults * _PAGE_BYTES
