"""The latest GPU states that drivers reported, for all nodes of a stream, and verdicts with these states.

A row is valid until the next row of its GPU (or of a process on it), so the last row of each is never dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stallscope.diagnose.report.verdict import Report
from stallscope.diagnose.stream.incidents import Candidate
from stallscope.diagnose.verdicts._owners import with_owners
from stallscope.diagnose.verdicts._pids import with_pids
from stallscope.diagnose.verdicts.gpu_driver import with_gpu_states
from stallscope.events.layout import GPU_PROCESSES, GPUS, Array, empty
from stallscope.events.trace import Trace

_KEYS = {"gpus": ("node", "gpu", "mig"), "gpu_processes": ("node", "gpu", "mig", "pid")}


@dataclass
class Drivers:
    """Rows of both tables by time, with the stream's node numbers. max_rows: approximate limit of each table."""

    max_rows: int = 1 << 15
    tables: dict[str, Array] = field(
        default_factory=lambda: {t.name: empty(t) for t in (GPUS, GPU_PROCESSES)}
    )

    def add(self, batch: Trace) -> None:
        """Take a batch's rows."""
        for name, known in self.tables.items():
            rows = getattr(batch, name)
            if len(rows):
                both = np.concatenate([known, rows])
                both = both[np.argsort(both["ts_ns"], kind="stable")]
                self.tables[name] = _lately(both, _KEYS[name], self.max_rows)

    def of(self, nodes: set[int]) -> dict[str, Array]:
        """The rows of some nodes, by table."""
        return {name: rows[np.isin(rows["node"], sorted(nodes))] for name, rows in self.tables.items()}


def explained(trace: Trace, shown: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the state of their GPUs, the processes of their ranks and their owners."""
    report = with_gpu_states(trace, Report("", {}, [candidate.verdict for candidate in shown]))
    verdicts = with_owners(trace, with_pids(trace, report.verdicts))
    return [replace(candidate, verdict=verdict) for candidate, verdict in zip(shown, verdicts, strict=True)]


def _lately(rows: Array, key: tuple[str, ...], max_rows: int) -> Array:
    """The newest half of the rows if they exceed max_rows, and the last earlier row of each key."""
    if len(rows) <= max_rows:
        return rows
    cut = len(rows) - max_rows // 2
    _, last = np.unique(rows[list(key)][:cut][::-1], return_index=True)
    return np.concatenate([rows[np.sort(cut - 1 - last)], rows[cut:]])
