"""Incidents of inference engines in a stream: late requests, and engines that no longer answer.

The latest requests of each machine are judged again every second while requests are open or end. The rows of engines
are kept here, because the rows of a job are kept by its rounds, and engines have none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.stream.incidents import EVENTS_ENDED, Candidate, Change, Incident, Incidents
from stallscope.diagnose.stream.node_clocks import Nodes
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.verdicts import inference_engine
from stallscope.events import layout
from stallscope.events.layout import SERVING_TABLES, UNKNOWN, Array, process_keys
from stallscope.events.trace import Trace

_EVERY_NS = 1_000_000_000
_KEPT_NS = 120_000_000_000
"""An incident of late requests closes if no late request has ended for this time."""
_MAX_ROWS = 20_000
_OF_PROCESSES = (layout.OFFCPU, layout.SAMPLES, layout.HOST_EVENTS, layout.POSITIONS, layout.SNAPSHOTS)
_TABLES = (*SERVING_TABLES, *_OF_PROCESSES)
Identities = Callable[[set[int]], dict[str, Array]]
"""Returns the rows of `processes` and `owners` of some processes (node << 32 | pid)."""


@dataclass
class Engines:
    """The latest rows of the engines of all nodes, with the stream's node numbers, and the open incidents."""

    limits: Thresholds
    _rows: dict[str, Array] = field(default_factory=lambda: {t.name: layout.empty(t) for t in _TABLES})
    _new: dict[str, list[Array]] = field(default_factory=dict)
    _stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _incidents: Incidents = field(default_factory=Incidents)
    _processes: set[int] = field(default_factory=set)
    _judged_at_ns: int = -(1 << 62)
    _step: int = 0

    def add(self, batch: Trace) -> None:
        """Take a batch's rows of engines."""
        self._processes |= set(process_keys(batch.servers).tolist())
        if not self._processes:
            return
        keys = np.array(sorted(self._processes))
        for table in _TABLES:
            rows = getattr(batch, table.name)
            rows = rows[np.isin(process_keys(rows), keys)] if len(rows) else rows
            if len(rows):
                self._new.setdefault(table.name, []).append(rows)
        named = self._named_stacks()
        self._stacks |= {number: frames for number, frames in batch.stacks.items() if number in named}

    def changes(
        self, nodes: Nodes, at_ns: int, identities: Identities, *, is_last: bool = False
    ) -> list[Change]:
        """The changes of incidents since the last call. at_ns: by the stream's clock."""
        if not (self._processes or self._incidents.open) or (
            at_ns - self._judged_at_ns < _EVERY_NS and not is_last
        ):
            return []
        self._judged_at_ns = at_ns
        self._step += 1
        known = identities(self._processes)
        self._fold(nodes, known["processes"])
        shown = [_candidate(verdict) for verdict in self._verdicts(nodes, known)]
        changes = self._incidents.update(
            shown, step=self._step, at_ns=at_ns, is_whole=True, closing=_closed, job="inference"
        )
        ended = self._incidents.end(at_ns, EVENTS_ENDED, _closed) if is_last else []
        return [*changes, *ended]

    def confirmed_ns(self) -> Mapping[str, int]:
        """See Stream."""
        return {incident.id: incident.confirmed_ns for incident in self._incidents.open}

    def _verdicts(self, nodes: Nodes, known: dict[str, Array]) -> list[Verdict]:
        times = self._rows["requests"]["end_ns"]
        seconds = float(times.max() - times.min()) / 1e9 if len(times) else 0.0
        whole = Report("", {"n_ranks": len(self._processes), "seconds": seconds}, [])
        tables: dict[str, Any] = self._rows | known
        trace = Trace(
            **tables,
            stacks=self._stacks,
            nodes=nodes.names,
            clocks=nodes.clocks({key >> 32 for key in self._processes}),
            ends_ns=tuple(nodes.latest_ns(node) for node in range(len(nodes.names))),
        )
        return inference_engine.verdicts(trace, whole, self.limits)

    def _fold(self, nodes: Nodes, processes: Array) -> None:
        """Sort the new rows into the tables, and drop old rows and the rows of ended processes."""
        new, self._new = self._new, {}
        latest = np.array([nodes.latest_ns(node) for node in range(len(nodes.names))])
        ended = np.unique(process_keys(processes[processes["ended_ns"] != UNKNOWN]))
        self._processes -= set(ended.tolist())
        for table in _TABLES:
            rows = layout.joined([self._rows[table.name], *new.get(table.name, [])])
            times = rows["end_ns"] if table is layout.REQUESTS else rows["ts_ns"]
            is_kept = times > latest[rows["node"]] - _KEPT_NS
            if table is layout.SERVERS:
                is_kept = _with_last_rows(rows, is_kept) & ~np.isin(process_keys(rows), ended)
            self._rows[table.name] = rows[is_kept][-_MAX_ROWS:]
        named = self._named_stacks()
        self._stacks = {number: frames for number, frames in self._stacks.items() if number in named}

    def _named_stacks(self) -> set[int]:
        """The numbers of the stacks that the kept and the new rows name."""
        names = [table.name for table in (layout.OFFCPU, layout.SAMPLES, layout.POSITIONS)]
        parts = [rows["stack"] for name in names for rows in (self._rows[name], *self._new.get(name, []))]
        return set(np.unique(np.concatenate(parts)).tolist())


def _with_last_rows(rows: Array, is_kept: Array) -> Array:
    """is_kept, and the last row of each process: it states its engine."""
    _, last = np.unique(process_keys(rows)[::-1], return_index=True)
    is_kept[len(rows) - 1 - last] = True
    return is_kept


def _candidate(verdict: Verdict) -> Candidate:
    evidence, cause = verdict.evidence, verdict.causes[0].cause.name if verdict.causes else ""
    sort = f"{verdict.kind} {verdict.nodes} {evidence.engine} {evidence.endpoint} {verdict.pids} {cause}"
    return Candidate(sort, frozenset(), verdict, -1, 1)


def _closed(incident: Incident, reason: str) -> None:
    """Do nothing: the next incident starts at another time, so it has another id."""
