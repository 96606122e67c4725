"""The nodes of a stream: their numbers, readings of their clocks, and the time of their latest events."""

from dataclasses import replace
from typing import Any

import numpy as np

from stallscope.events.layout import (
    GPU_PROCESSES,
    GPUS,
    HOST_EVENTS,
    POSITIONS,
    SAMPLES,
    SENT_TABLES,
    SERVING_TABLES,
    UNKNOWN,
    Array,
)
from stallscope.events.trace import Clock, Trace

_MAX_READINGS = 8  # of a node's clock: early readings far apart, late readings close together
_TIMES = ("ts_ns", "ended_ns")
_ONLY_ON_NODES = (GPUS, GPU_PROCESSES, SAMPLES, POSITIONS, *SERVING_TABLES)
_ON_NODES = (*SENT_TABLES, HOST_EVENTS, *_ONLY_ON_NODES)
_UNTIMED = frozenset(
    {"processes", "communicators", "owners", "idle_gpus", *(table.name for table in _ONLY_ON_NODES)}
)
"""Tables whose rows do not show the time of their node's latest event."""


class Nodes:
    """Nodes by name; numbers in order of appearance. All times are of the nodes' own monotonic clocks."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._clocks: dict[int, list[Clock]] = {}
        self._probed: dict[int, Clock] = {}
        self._latest_ns: dict[int, int] = {}
        self._latest_at_ns: dict[int, int] = {}
        self._has_ends: set[int] = set()

    def taken(self, batch: Trace, at_ns: int) -> Trace:
        """The batch with the stream's node numbers; its clocks and ends are noted. at_ns: time of its arrival."""
        number = np.array([self._number.setdefault(name, len(self._number)) for name in batch.nodes])
        for clock in batch.clocks:
            self._note_clock(replace(clock, node=int(number[clock.node])))
        for clock in batch.probed:
            self._probed[int(number[clock.node])] = replace(clock, node=int(number[clock.node]))
        for node, end_ns in enumerate(batch.ends_ns):
            if end_ns != UNKNOWN:
                self._has_ends.add(int(number[node]))
                self._note(int(number[node]), end_ns, at_ns)
        tables: dict[str, Any] = {
            table.name: _renumbered(getattr(batch, table.name), number) for table in _ON_NODES
        }
        for name, rows in tables.items():
            if name not in _UNTIMED and len(rows):
                self._note_rows(rows, at_ns)
        return replace(batch, **tables, nodes=self.names, clocks=(), probed=(), ends_ns=())

    @property
    def names(self) -> tuple[str, ...]:
        """All names, by number."""
        return tuple(self._number)

    def numbered(self, names: tuple[str, ...]) -> set[int]:
        """The numbers of some nodes."""
        return {self._number[name] for name in names}

    def clocks(self, nodes: set[int]) -> tuple[Clock, ...]:
        """Readings of these nodes' clocks."""
        return tuple(clock for node in sorted(nodes) for clock in self._clocks.get(node, ()))

    def probed(self, nodes: set[int]) -> tuple[Clock, ...]:
        """The latest reading of each of these nodes' clocks against one wall clock."""
        return tuple(self._probed[node] for node in sorted(nodes & self._probed.keys()))

    def wall_ns(self, rows: Array) -> Array | None:
        """Times of rows on their nodes' wall clocks: int64 (n,); None where a node has no clock reading."""
        offset = np.zeros(len(self._number), np.int64)
        for node in np.unique(rows["node"]).tolist():
            if not self._clocks.get(node):
                return None
            latest = self._clocks[node][-1]
            offset[node] = latest.wall_ns - latest.monotonic_ns
        wall: Array = rows["ts_ns"] + offset[rows["node"]]
        return wall

    def wall_at(self, node: int, at_ns: int) -> int | None:
        """A time of a node's clock on its wall clock; None without a reading."""
        if not self._clocks.get(node):
            return None
        latest = self._clocks[node][-1]
        return at_ns + latest.wall_ns - latest.monotonic_ns

    def silent_ns(self, nodes: set[int]) -> dict[int, int]:
        """By node, how much earlier its latest rows arrived than the rows of other nodes: ns of the stream's clock."""
        arrived = {node: self._latest_at_ns[node] for node in nodes if node in self._latest_at_ns}
        newest = max(arrived.values(), default=0)
        return {node: newest - at_ns for node, at_ns in arrived.items()}

    def latest_ns(self, node: int) -> int:
        """The time of a node's latest event, on its clock; UNKNOWN without any."""
        return self._latest_ns.get(node, UNKNOWN)

    def now_ns(self, node: int, at_ns: int) -> int:
        """The time on a node's clock at a time of the stream's clock.

        A source that states the end of its data does not go beyond it: a silent agent proves nothing. For other
        sources, time continues from the latest event.
        """
        latest = self.latest_ns(node)
        if latest == UNKNOWN or node in self._has_ends:
            return latest
        return latest + max(at_ns - self._latest_at_ns[node], 0)

    def report_life(self, nodes: set[int]) -> bool:
        """Whether a source on one of these nodes reports running processes, so that its silence has a meaning."""
        return bool(nodes & self._has_ends)

    def _note(self, node: int, latest_ns: int, at_ns: int) -> None:
        if latest_ns > self._latest_ns.get(node, UNKNOWN):
            self._latest_ns[node], self._latest_at_ns[node] = latest_ns, at_ns

    def _note_rows(self, rows: Array, at_ns: int) -> None:
        latest = np.full(int(rows["node"].max()) + 1, UNKNOWN)
        np.maximum.at(latest, rows["node"], rows["ts_ns"])
        for node in np.flatnonzero(latest != UNKNOWN).tolist():
            self._note(node, int(latest[node]), at_ns)

    def _note_clock(self, clock: Clock) -> None:
        kept = self._clocks.setdefault(clock.node, [])
        if clock in kept:
            return
        kept.append(clock)
        kept.sort(key=lambda clock: clock.monotonic_ns)
        if len(kept) > _MAX_READINGS:
            gaps = [kept[i + 1].monotonic_ns - kept[i - 1].monotonic_ns for i in range(1, len(kept) - 1)]
            del kept[1 + gaps.index(min(gaps))]


def _renumbered(rows: Array, number: Array) -> Array:
    if not len(rows) or (number == np.arange(len(number))).all():
        return rows
    rows = rows.copy()
    rows["node"] = number[rows["node"]]
    return rows
