"""The sinks of the agent: the node trace, a hub, and metrics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stallscope.capture.session import SYMBOLS, Label, PartialSink
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.trace import Clock
from stallscope.exporters.exporters import Outputs
from stallscope.exporters.node_health import NodeHealth
from stallscope.exporters.node_verdicts import NodeVerdicts
from stallscope.exporters.request_sums import RequestSums
from stallscope.store.node import NodeTrace

if TYPE_CHECKING:  # imports gRPC, which only an agent with a hub needs
    from stallscope.exporters.hub_output import HubOutput

_ONLY_LOCAL = (layout.SAMPLES, layout.POSITIONS)
"""Tables whose stacks only the node trace has."""


class NodeSink:
    """Appends rows to a node trace, with the trace's numbers for functions."""

    def __init__(self, store: NodeTrace, node: int):
        self._store, self._node = store, node
        self._symbol_of: dict[int, int] = {0: 0}

    def append(self, table: Table, rows: Array) -> None:
        if "symbol" in (rows.dtype.names or ()):
            rows = rows.copy()
            rows["symbol"] = self._symbols(rows["symbol"])
        self._store.append(table, rows)

    def stack(self, pid: int, frames: Sequence[str]) -> int:
        return self._store.stack(self._node, pid, frames)

    def add_labels(self, labels: Sequence[Label]) -> None:
        rows = [(label.ts_ns, self._node, label.pid, label.label, label.value) for label in labels]
        self._store.insert("annotations", ("ts_ns", "node", "pid", "label", "value"), rows)

    def lost(self, ts_ns: int, losses: Sequence[tuple[str, int | None, int]]) -> None:
        self._store.lost(self._node, ts_ns, losses)

    def process_ended(self, pid: int, ended_ns: int) -> None:
        self._store.process_ended(self._node, pid, ended_ns)

    def process_rank_known(self, pid: int, rank: int, *, nranks: int) -> None:
        self._store.process_rank_known(self._node, pid, rank, nranks=nranks)

    def process_device_known(self, pid: int, device: int) -> None:
        self._store.process_device_known(self._node, pid, device)

    def process_libraries_known(self, pid: int, libraries: str) -> None:
        self._store.process_libraries_known(self._node, pid, libraries)

    def communicator_ended(self, pid: int, comm_hash: int, *, ended_ns: int) -> None:
        self._store.communicator_ended(self._node, pid, comm_hash, ended_ns=ended_ns)

    def _symbols(self, numbers: Array) -> Array:
        """The trace's numbers for functions, from indices into SYMBOLS."""
        for number in set(numbers.tolist()) - self._symbol_of.keys():
            self._symbol_of[number] = self._store.symbol(SYMBOLS[number])
        return np.array([self._symbol_of[number] for number in numbers.tolist()], numbers.dtype)


class HubSink(PartialSink):
    """Collects rows for a hub until send(). A hub gets no stacks, no labels and no single requests."""

    def __init__(self, output: "HubOutput"):
        self._output = output
        self._rows: dict[str, list[Array]] = {}
        self._lost: dict[str, int] = {}
        self._complaint = ""
        self._requests = RequestSums()
        self._verdicts = NodeVerdicts()

    def incident(self, line: dict[str, Any]) -> None:
        """A change of an incident on this machine, from any thread: a line of live/incident_lines.py."""
        self._verdicts.take(line)

    def append(self, table: Table, rows: Array) -> None:
        self._requests.take(table, rows)
        if table not in layout.HUB_TABLES or table in _ONLY_LOCAL:
            return
        if "stack" in (rows.dtype.names or ()):
            rows = rows.copy()
            rows["stack"] = UNKNOWN
        self._rows.setdefault(table.name, []).append(rows)

    def lost(self, ts_ns: int, losses: Sequence[tuple[str, int | None, int]]) -> None:
        for kind, _, n in losses:
            self._lost[kind] = self._lost.get(kind, 0) + n

    def process_ended(self, pid: int, ended_ns: int) -> None:
        self._output.process_ended(pid, ended_ns)

    def process_rank_known(self, pid: int, rank: int, *, nranks: int) -> None:
        self._output.process_rank_known(pid, rank, nranks=nranks)

    def process_device_known(self, pid: int, device: int) -> None:
        self._output.process_device_known(pid, device)

    def process_libraries_known(self, pid: int, libraries: str) -> None:
        self._output.process_libraries_known(pid, libraries)

    def communicator_ended(self, pid: int, comm_hash: int, *, ended_ns: int) -> None:
        self._output.communicator_ended(pid, comm_hash, ended_ns=ended_ns)

    def send(self, reading: Clock, *, is_synchronised: bool | None = None) -> None:
        """Send the collected rows with a fresh reading of the clock."""
        tables = {name: layout.joined(rows) for name, rows in self._rows.items()} | {
            layout.LATENCIES.name: self._requests.rows(reading.monotonic_ns),
            layout.NODE_VERDICTS.name: self._verdicts.rows(reading.monotonic_ns),
        }
        lost, self._rows, self._lost = self._lost, {}, {}
        self._output.offer(tables, clock=reading, symbols=SYMBOLS, is_synchronised=is_synchronised, lost=lost)

    def status(self) -> str:
        """Counts of records that the hub has acknowledged."""
        return self._output.status()

    def news(self) -> str:
        """A line when the hub begins to refuse data, or takes data again; otherwise empty."""
        before, self._complaint = self._complaint, self._output.complaint()
        if self._complaint == before:
            return ""
        if self._complaint:
            return f"the hub accepts no data: {self._complaint}; the rows wait on disk, and stallscope will retry"
        return "the hub accepts data again"


class HealthSink(PartialSink):
    """Passes rows to the health of this machine."""

    def __init__(self, health: NodeHealth):
        self._health = health

    def append(self, table: Table, rows: Array) -> None:
        self._health.take(table, rows)


class MetricsSink(PartialSink):
    """Counts rows for the exported metrics."""

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def append(self, table: Table, rows: Array) -> None:
        self._outputs.take(table, rows)

    def lost(self, ts_ns: int, losses: Sequence[tuple[str, int | None, int]]) -> None:
        for kind, _, n in losses:
            self._outputs.lost(kind, n)

    def process_ended(self, pid: int, ended_ns: int) -> None:
        self._outputs.process_ended(pid)
