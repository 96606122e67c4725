"""Incidents of idle GPUs in a stream: they belong to a holder on a machine, and to no job of the stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from stallscope.diagnose.stream.incidents import Candidate, Change, Incident, Incidents
from stallscope.diagnose.stream.node_clocks import Nodes
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.verdicts import held_gpus
from stallscope.events.layout import IDLE_GPUS, dtype
from stallscope.events.trace import Trace

_SILENT_NS = 600_000_000_000
"""An agent repeats a row every minute; after this time without a row, the state is unknown."""
_MAX_ROWS = 1 << 14


@dataclass
class IdleGpus:
    """The last row of each GPU, by node, holder and GPU, with the stream's node numbers; and the open incidents."""

    limits: Thresholds
    usd_per_gpu_hour: float | None
    _rows: dict[tuple[int, bytes, bytes], np.void] = field(default_factory=dict)
    _at_ns: dict[int, int] = field(default_factory=dict)
    _incidents: Incidents = field(default_factory=Incidents)
    _step: int = 0
    _is_changed: bool = False

    def add(self, batch: Trace, at_ns: int) -> None:
        """Take a batch's rows. at_ns: by the stream's clock. Beyond a limit, the first rows are dropped."""
        for row in batch.idle_gpus.copy():
            key = int(row["node"]), bytes(row["holder"]), bytes(row["gpu"])
            known = self._rows.pop(key, row)
            self._rows[key] = row if row["ts_ns"] >= known["ts_ns"] else known
            self._at_ns[key[0]], self._is_changed = at_ns, True
        for key in list(islice(self._rows, max(len(self._rows) - _MAX_ROWS, 0))):
            del self._rows[key]

    def changes(self, nodes: Nodes, at_ns: int, *, is_last: bool = False) -> list[Change]:
        """The changes of incidents since the last call."""
        if silent := {node for node, last_ns in self._at_ns.items() if at_ns - last_ns > _SILENT_NS}:
            self._at_ns = {node: last_ns for node, last_ns in self._at_ns.items() if node not in silent}
            self._rows = {key: row for key, row in self._rows.items() if key[0] not in silent}
        if not (self._is_changed or silent or is_last):
            for incident in self._incidents.open:
                incident.confirmed_ns = at_ns
            return []
        rows = np.array([] if is_last else list(self._rows.values()), dtype(IDLE_GPUS))
        verdicts = held_gpus.verdicts(rows, nodes.names, nodes.wall_at, self.limits, self.usd_per_gpu_hour)
        self._rows = {key: row for key, row in self._rows.items() if row["is_idle"]}
        self._step, self._is_changed = self._step + 1, False
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
    """Do nothing: the next idle time starts at another time, so it has another id."""
