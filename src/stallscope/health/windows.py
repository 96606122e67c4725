"""From captured rows to the signals of a machine, every 10 s.

A window has two halves, and a signal is the larger value of both. A single pause (garbage collection, a file that is
written) of up to 5 s therefore changes no signal.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.names import CATEGORY_NAMES, P2P_OPS
from stallscope.health import WINDOW_S

HALF_NS = WINDOW_S * 10**9 // 2
WARM_UP_WINDOWS = 2
"""Windows left out after the first collective of a job: libraries load, caches fill."""

_WAIT, _PREEMPTED = CATEGORY_NAMES.index("wait_gpu"), CATEGORY_NAMES.index("preempted")
_BUSY_PERCENT = 50
_ENOUGH_MEMORY = 0.1

Signals = dict[str, float]


@dataclass(frozen=True)
class Window:
    """cohort: the job's largest communicator, as 16 hexadecimal digits. signals: the known signals, by name."""

    cohort: str
    signals: Signals


@dataclass
class Windows:
    """The rows since the last half. proc: for the memory of the machine."""

    proc: Path = Path("/proc")
    _rows: list[Array] = field(default_factory=list)
    _last: dict[int, Array] = field(default_factory=dict)
    _gpus: dict[int, Array] = field(default_factory=dict)
    _half: Signals | None = None
    _half_end_ns: int = 0
    _cohort: str = ""
    _n_windows: int = 0

    def take(self, table: Table, rows: Array) -> None:
        """Rows of the capture, in order of time."""
        if table.name == "collectives" and len(rows):
            self._rows.append(rows[["pid", "ts_ns", "comm_hash", "nranks", "op", "ledger_ns"]].copy())
        elif table.name == "gpus":
            self._gpus |= {int(row["gpu"]): row.copy() for row in rows if row["mig"] == UNKNOWN}

    def window(self, now_ns: int) -> Window | None:
        """The signals of a complete window; None between windows, during the warm-up, and without collectives."""
        if not self._half_end_ns:
            self._half_end_ns = now_ns + HALF_NS
        if now_ns < self._half_end_ns:
            return None
        self._half_end_ns = now_ns + HALF_NS
        half = self._ended_half()
        if self._half is None:
            self._half = half
            return None
        first, self._half = self._half, None
        signals = {name: max(part[name] for part in (first, half) if name in part) for name in first | half}
        if not self._cohort or "throughput" not in signals:
            self._n_windows = 0
            return None
        self._n_windows += 1
        return Window(self._cohort, signals) if self._n_windows > WARM_UP_WINDOWS else None

    def _ended_half(self) -> Signals:
        rows, self._rows = self._rows, []
        signals = self._of_processes(np.concatenate(rows)) if rows else {}
        if clocks := [share for row in self._gpus.values() if (share := _clock_share(row)) is not None]:
            signals["compute"] = sum(clocks) / len(clocks)
        if (memory := _memory(self.proc)) is not None:
            signals["memory"] = memory
        return signals

    def _of_processes(self, rows: Array) -> Signals:
        """Throughput and CPU from the time ledgers at the last arrivals of two halves."""
        rounds = rows[~np.isin(rows["op"], P2P_OPS)]
        if len(rounds):
            self._cohort = _largest_communicator(rounds)
        spent, n = np.zeros(len(CATEGORY_NAMES), np.int64), 0
        for pid in np.unique(rounds["pid"]).tolist():
            own = rounds[rounds["pid"] == pid]
            newest = own[int(np.argmax(own["ts_ns"]))]
            before, self._last[pid] = self._last.get(pid), newest.copy()
            if before is not None:
                spent += np.maximum(newest["ledger_ns"] - before["ledger_ns"], 0)
                n += len(own)
        own_ns = int(spent.sum() - spent[_WAIT])
        if not n or own_ns <= 0:
            return {}
        return {"throughput": n / (own_ns / 1e9), "cpu": 1 - int(spent[_PREEMPTED]) / own_ns}


def _largest_communicator(rounds: Array) -> str:
    """The communicator with most ranks; of several, the communicator with the smallest hash."""
    largest = rounds[rounds["nranks"] == rounds["nranks"].max()]
    return f"{int(largest['comm_hash'].min()):016x}"


def _clock_share(row: Array) -> float | None:
    if row["utilization_percent"] < _BUSY_PERCENT or row["sm_mhz"] == UNKNOWN or row["sm_max_mhz"] <= 0:
        return None
    return float(row["sm_mhz"]) / float(row["sm_max_mhz"])


def _memory(proc: Path) -> float | None:
    try:
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        return min(1.0, kib["MemAvailable"] / kib["MemTotal"] / _ENOUGH_MEMORY)
    except (OSError, ValueError, IndexError, KeyError, ZeroDivisionError):
        return None
