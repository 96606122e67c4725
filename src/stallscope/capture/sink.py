"""The receiver of captured rows: a node trace, a hub, metrics."""

from collections.abc import Sequence
from typing import Protocol

from stallscope.capture.process.annotation_socket import Label
from stallscope.events.layout import UNKNOWN, Array, Table


class Sink(Protocol):
    """Receives rows and life-cycle events of one machine, from one thread. Calls must not wait for a network."""

    def append(self, table: Table, rows: Array) -> None:
        """New rows, at least one. `symbol` is an index into operations.SYMBOLS; `stack` a number from stack().

        A sink does not change the rows, and copies those that it keeps.
        """

    def stack(self, pid: int, frames: Sequence[str]) -> int:
        """The number of a stack, innermost frame first; events.layout.UNKNOWN in a sink without stacks."""

    def add_labels(self, labels: Sequence[Label]) -> None:
        """New labels of processes."""

    def lost(self, ts_ns: int, losses: Sequence[tuple[str, int | None, int]]) -> None:
        """Records lost since the last call: (kind, CPU, count)."""

    def process_ended(self, pid: int, ended_ns: int) -> None:
        """The end of a process whose row was appended before."""

    def process_rank_known(self, pid: int, rank: int, *, nranks: int) -> None:
        """The rank of a process, where a communicator and no launcher states it."""

    def process_device_known(self, pid: int, device: int) -> None:
        """The number of a process's GPU, once it is known."""

    def process_libraries_known(self, pid: int, libraries: str) -> None:
        """The communication libraries of a process have changed."""

    def communicator_ended(self, pid: int, comm_hash: int, *, ended_ns: int) -> None:
        """The end of a process's membership in a communicator."""


class PartialSink:
    """A sink that ignores everything. A subclass overrides the methods for the data that it receives."""

    def append(self, table: Table, rows: Array) -> None: ...

    def stack(self, pid: int, frames: Sequence[str]) -> int:
        return UNKNOWN

    def add_labels(self, labels: Sequence[Label]) -> None: ...

    def lost(self, ts_ns: int, losses: Sequence[tuple[str, int | None, int]]) -> None: ...

    def process_ended(self, pid: int, ended_ns: int) -> None: ...

    def process_rank_known(self, pid: int, rank: int, *, nranks: int) -> None: ...

    def process_device_known(self, pid: int, device: int) -> None: ...

    def process_libraries_known(self, pid: int, libraries: str) -> None: ...

    def communicator_ended(self, pid: int, comm_hash: int, *, ended_ns: int) -> None: ...


class Sinks:
    """Forwards to several sinks. The first sink numbers the stacks."""

    def __init__(self, *sinks: Sink):
        self._sinks = sinks

    def append(self, table: Table, rows: Array) -> None:
        for sink in self._sinks:
            sink.append(table, rows)

    def stack(self, pid: int, frames: Sequence[str]) -> int:
        return self._sinks[0].stack(pid, frames)

    def add_labels(self, labels: Sequence[Label]) -> None:
        for sink in self._sinks:
            sink.add_labels(labels)

    def lost(self, ts_ns: int, losses: Sequence[tuple[str, int | None, int]]) -> None:
        for sink in self._sinks:
            sink.lost(ts_ns, losses)

    def process_ended(self, pid: int, ended_ns: int) -> None:
        for sink in self._sinks:
            sink.process_ended(pid, ended_ns)

    def process_rank_known(self, pid: int, rank: int, *, nranks: int) -> None:
        for sink in self._sinks:
            sink.process_rank_known(pid, rank, nranks=nranks)

    def process_device_known(self, pid: int, device: int) -> None:
        for sink in self._sinks:
            sink.process_device_known(pid, device)

    def process_libraries_known(self, pid: int, libraries: str) -> None:
        for sink in self._sinks:
            sink.process_libraries_known(pid, libraries)

    def communicator_ended(self, pid: int, comm_hash: int, *, ended_ns: int) -> None:
        for sink in self._sinks:
            sink.communicator_ended(pid, comm_hash, ended_ns=ended_ns)
