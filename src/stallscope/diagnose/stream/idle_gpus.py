"""Incidents of idle GPUs in a stream: they belong to a holder on a machine, and to no job of the stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.stream.incidents import Candidate, Change, Incident, Incidents
from stallscope.diagnose.stream.node_clocks import Nodes
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.verdicts import idle
from stallscope.events.layout import IDLE_GPUS, Array, empty
from stallscope.events.trace import Trace

_SILENT_NS = 600_000_000_000
"""An agent repeats a row every minute; after this time without a row, the state is unknown."""
_MAX_ROWS = 1 << 14


@dataclass
class IdleGpus:
    """The last row of each GPU, with the stream's node numbers, and the open incidents."""

    limits: Thresholds
    usd_per_gpu_hour: float | None
    _rows: Array = field(default_factory=lambda: empty(IDLE_GPUS))
    _at_ns: dict[int, int] = field(default_factory=dict)
    _incidents: Incidents = field(default_factory=Incidents)
    _step: int = 0

    def add(self, batch: Trace, at_ns: int) -> None:
        """Take a batch's rows. at_ns: by the stream's clock."""
        if not len(batch.idle_gpus):
            return
        rows = np.concatenate([self._rows, batch.idle_gpus])
        rows = rows[np.argsort(rows["ts_ns"], kind="stable")]
        _, last = np.unique(rows[["node", "holder", "gpu"]][::-1], return_index=True)
        self._rows = rows[len(rows) - 1 - last][-_MAX_ROWS:]
        self._at_ns |= dict.fromkeys(np.unique(batch.idle_gpus["node"]).tolist(), at_ns)

    def changes(self, nodes: Nodes, at_ns: int, *, is_last: bool = False) -> list[Change]:
        """The changes of incidents since the last call."""
        if not len(self._rows) and not self._incidents.open:
            return []
        silent = [node for node, seen_ns in self._at_ns.items() if at_ns - seen_ns > _SILENT_NS]
        self._rows = self._rows[~np.isin(self._rows["node"], silent)]
        verdicts = (
            []
            if is_last
            else idle.verdicts(self._rows, nodes.names, nodes.wall_at, self.limits, self.usd_per_gpu_hour)
        )
        self._rows = self._rows[self._rows["is_idle"] == 1]
        self._step += 1
        shown = [
            Candidate(
                f"idle {v.nodes[0]} {v.evidence.holder} {v.evidence.idle_because}", frozenset(), v, -1, 1
            )
            for v in verdicts
        ]
        return self._incidents.update(
            shown, step=self._step, at_ns=at_ns, is_whole=True, closing=_closed, job="idle GPUs"
        )

    def confirmed_ns(self) -> Mapping[str, int]:
        """See Stream."""
        return {incident.id: incident.confirmed_ns for incident in self._incidents.open}


def _closed(incident: Incident, reason: str) -> None:
    """Nothing to separate: the next idle time has another begin, and so another id."""
