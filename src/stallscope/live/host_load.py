"""The machine in one line: CPU load, memory, and the tracer's own load."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_HZ = os.sysconf("SC_CLK_TCK")


@dataclass
class System:
    """Remembers the previous reading, because CPU shares are differences. agent: the tracer's process."""

    agent: int
    proc: Path = Path("/proc")
    _cpu: tuple[int, int] = (0, 0)
    _agent_ticks: int = 0
    _total_ticks: int = 0

    def line(self) -> str:
        """One line; unreadable values are left out."""
        parts = [self._cpus(), _memory(self.proc), self._tracer()]
        return "; ".join(part for part in parts if part)

    def _cpus(self) -> str:
        try:
            fields = [int(word) for word in (self.proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return ""
        total, idle = sum(fields), fields[3] + fields[4]
        passed, idled = total - self._cpu[0], idle - self._cpu[1]
        self._cpu, self._total_ticks = (total, idle), passed
        n = os.cpu_count() or 1
        return f"{n} CPUs {100 * (1 - idled / passed):.0f} % busy" if passed > 0 else f"{n} CPUs"

    def _tracer(self) -> str:
        try:
            fields = (self.proc / str(self.agent) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
        used, self._agent_ticks = ticks - self._agent_ticks, ticks
        seconds = self._total_ticks / _TICKS_HZ / (os.cpu_count() or 1)
        share = (
            f"{100 * used / _TICKS_HZ / seconds:.1f} % of a CPU, " if seconds > 0 and used != ticks else ""
        )
        return f"tracer {share}{pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB"


def _memory(proc: Path) -> str:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        kb = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    except (OSError, ValueError, IndexError):
        return ""
    used = kb["MemTotal"] - kb.get("MemAvailable", 0)
    return f"memory {used / 2**20:.1f} of {kb['MemTotal'] / 2**20:.0f} GiB"
