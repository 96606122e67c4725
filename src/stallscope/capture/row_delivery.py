"""Delivers kernel records to a sink as rows: once a second, and records also in between."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from stallscope.capture.gpu.driver_calls import DriverCalls
from stallscope.capture.gpu.gpu_watch import Gpus
from stallscope.capture.gpu.kernel_records import KernelRecords
from stallscope.capture.host import HostEvents
from stallscope.capture.owners.gpu_calls import GpuCalls
from stallscope.capture.owners.idle_rows import IdleGpus
from stallscope.capture.owners.owners import Owners
from stallscope.capture.probes.collector import Collector
from stallscope.capture.probes.governor import Governor
from stallscope.capture.probes.program import Program
from stallscope.capture.process.annotation_socket import Label, Labels
from stallscope.capture.process.comm_split import Splits
from stallscope.capture.process.processes import Processes, Snapshots
from stallscope.capture.process.status import RecordCounts
from stallscope.capture.process.visible_devices import GpuNumbers
from stallscope.capture.rows import records
from stallscope.capture.rows.call_statistics import CallSums
from stallscope.capture.rows.device_numbers import DeviceNumbers
from stallscope.capture.rows.lost_records import Losses
from stallscope.capture.rows.snapshots import snapshots
from stallscope.capture.serving.engine_spans import EngineSpans
from stallscope.capture.serving.request_capture import Serving
from stallscope.capture.sink import Sink
from stallscope.capture.stacks.sampler import Stacks
from stallscope.capture.stacks.silent_ranks import ExaminedProcesses, SilentRanks
from stallscope.capture.stacks.thread_samples import Samples
from stallscope.events import layout
from stallscope.events.kernel import Kind
from stallscope.events.layout import Array, Table
from stallscope.events.names import Op

_TABLES_WITH_DEVICE = (layout.COLLECTIVES, layout.CALLS, layout.MEMORY)
"""Tables whose `device` is the number of the GPU within the process."""


class Delivery:
    """Delivers rows of the tables in events.layout, and the start and end of processes and communicators.

    node: the number of this machine in the rows. gpu_processes: processes that use a GPU. running: all processes in
    scope. chosen: processes that the user chose. raw_file: also write every raw event into this file. note: prints
    a line for the user.
    """

    def __init__(
        self,
        probes: Program,
        sink: Sink,
        *,
        node: int,
        governor: Governor,
        gpu_processes: Callable[[], Iterable[int]],
        note: Callable[[str], None],
        has_stacks: bool,
        labels: Labels | None = None,
        gpus: Gpus | None = None,
        driver_calls: DriverCalls | None = None,
        running: Callable[[], Iterable[int]] = tuple,
        chosen: Collection[int] = (),
        raw_file: Path | None = None,
        owners: Owners | None = None,
        idle_gpus: IdleGpus | None = None,
        kernels: KernelRecords | None = None,
        metrics_every_s: int = 0,
        engine_spans: EngineSpans | None = None,
    ):
        self.counts = RecordCounts()
        self.collector = Collector(
            probes.arrivals, probes.events, probes.natives, probes.stacks, probes.requests, probes.tokens
        )
        self.samples = (
            Samples(
                probes.processes,
                peek=probes.peek,
                is_complete=lambda: governor.unprobed_waits.are_probed,
            )
            if has_stacks
            else None
        )
        self._events: list[Array] = []
        self._probes, self._sink, self._node, self._raw_file = probes, sink, node, raw_file
        self._labels, self._gpus, self._driver_calls = labels, gpus, driver_calls
        self._owners, self._idle_gpus, self._gpu_calls = owners or Owners(), idle_gpus, GpuCalls()
        self._kernels, self._n_calls = kernels, 0
        self._governor = governor
        numbers = gpus.gpu_numbers if gpus else GpuNumbers()
        self._processes = Processes(node, gpus=numbers)
        self._device_numbers = DeviceNumbers(numbers)
        self._snapshots = Snapshots()
        self._host = HostEvents(
            node, probes.entries, drivers=lambda: driver_calls.drivers if driver_calls else {}
        )
        self._splits = Splits()
        self._losses = Losses()
        self._call_sums = CallSums(node, probes.operations, probes.balances, governor, own_pid=os.getpid())
        self._stacks = (
            Stacks(node, sink.stack, note, probes.walk_python, probes.peek, probes.know_native)
            if has_stacks
            else None
        )
        self._serving = Serving(
            node,
            probes,
            running,
            chosen=chosen,
            note=note,
            metrics_every_s=metrics_every_s,
            spans=engine_spans,
        )
        self._silent_ranks = SilentRanks(node, self._stacks, gpu_processes) if self._stacks else None

    def deliver_records(self) -> None:
        """Deliver the records since the last call."""
        arrivals, events, natives, python_stacks, requests, tokens = self.collector.take()
        self._serving.take(requests, tokens)
        if self._stacks:
            self._stacks.take(natives, python_stacks)
        self._events.append(events)
        self._append_records(arrivals, events)

    def deliver_second(self, *, is_last: bool = False) -> None:
        """Deliver records, processes and their states, and losses. is_last: no further record completes another."""
        now_ns = time.monotonic_ns()
        if is_last:
            self._splits.n_patience = 0
        self.deliver_records()
        events, self._events = layout.joined(self._events), []
        sums = self._call_sums.rows(now_ns)
        for table, rows in sums:
            self._append(table, rows)
        self._append_states(events, now_ns)
        for table, rows in self._serving.second(now_ns):
            self._append(table, rows)
        if self._stacks:
            for pid in self._serving.stalled(now_ns):
                self._append_named(layout.POSITIONS, self._stacks.all_thread_positions(pid, now_ns))
        if self._driver_calls:
            self._append_callers(self._driver_calls, dict(sums)[layout.OPERATIONS], now_ns)
        if self.samples and self._stacks:
            self._append_named(
                layout.SAMPLES, self.samples.take_rows(self._node, now_ns, self._stacks.number)
            )
        self._append(layout.HOST_EVENTS, self._host.rows(events, self._processes.pids(), now_ns))
        self._annotate(self._labels.take_labels() if self._labels else [])
        self._append_idle_gpus(now_ns)
        for table, rows in self._gpus.take_rows() if self._gpus else ():
            self._append(table, rows)
        losses = self._losses.new_losses(self._probes.counters(), n_dropped=self.collector.n_dropped)
        if self._kernels is not None:
            kernels = self._kernels.second(self._processes.pids(), n_calls=self._n_calls)
            self._append(layout.GPU_KERNELS, kernels)
            n_lost, self._n_calls = self._kernels.take_lost(), 0
            losses += [("gpu_kernels", None, n_lost)] if n_lost else []
        self._sink.lost(now_ns, losses)
        self.counts.n_lost = self._losses.n_lost

    def _append_records(self, arrivals: Array, events: Array) -> None:
        tables = records.tables(arrivals, events, node=self._node, splits=self._splits)
        for table in layout.EVENT_TABLES:
            if table.name in tables:
                self._append(table, tables[table.name])
        for pid, comm_hash, ended_ns in zip(*records.communicators_ended(events, self._splits), strict=True):
            self._sink.communicator_ended(int(pid), int(comm_hash), ended_ns=int(ended_ns))
        self._processes.add_communicators(tables["communicators"])
        self.counts.add_rounds(tables["collectives"])
        self._n_calls += len(tables["collectives"])
        for process in self._processes.update_devices(tables["collectives"]):
            self._gpu_calls.located(process.pid, process.device)
            self._sink.process_device_known(process.pid, process.device)
        if self._raw_file:
            with self._raw_file.open("ab") as file:
                records.raw(events).tofile(file)

    def _append_states(self, events: Array, now_ns: int) -> None:
        """A snapshot of each traced process; the start and the end of each process."""
        states = self._probes.processes()
        moved_ns = self._governor.unprobed_waits.moved_ns(states)
        starts = records.of_kind(events, Kind.PROCESS)
        first_ns = dict.fromkeys(states.pids.tolist(), now_ns)
        first_ns |= dict(zip(starts["pid"].tolist(), starts["ts_ns"].tolist(), strict=True))
        if len(self._append_processes(first_ns, now_ns)):
            self._governor.renew()
        for process in self._processes.update_ranks():
            self._sink.process_rank_known(process.pid, process.rank, nranks=process.nranks)
        for pid, libraries in self._processes.update_libraries(now_ns):
            self._sink.process_libraries_known(pid, libraries)
        self._append(
            layout.SNAPSHOTS, self._snapshots.remember(snapshots(states, node=self._node, moved_ns=moved_ns))
        )
        if self._stacks:
            self._stacks.follow(states.pids.tolist())
            positions = self._stacks.silent_positions(states, now_ns, members=self._processes.members())
            self._append_named(layout.POSITIONS, positions)
        if self._silent_ranks:
            self._append_silent_ranks(
                self._silent_ranks.examine(frozenset(states.pids.tolist()), now_ns), now_ns
            )
        exits = records.of_kind(events, Kind.EXIT, Kind.EXEC)
        self._append_ends(dict(zip(exits["pid"].tolist(), exits["ts_ns"].tolist(), strict=True)), now_ns)
        self.counts.n_processes = len(self._processes)

    def _append_processes(self, first_ns: Mapping[int, int], now_ns: int) -> Array:
        """Deliver new processes, their owners and changed owners. Returns the new processes."""
        new_processes = self._processes.add(first_ns)
        self._append(layout.PROCESSES, new_processes)
        variables = {pid: self._processes.take_environment(pid) for pid in new_processes["pid"].tolist()}
        rows = self._owners.rows(variables, node=self._node, now_ns=now_ns, first_ns=first_ns)
        self._append_named(layout.OWNERS, rows)
        return new_processes

    def _append_idle_gpus(self, now_ns: int) -> None:
        if self._idle_gpus:
            calls, owners, pids = self._gpu_calls, self._owners, self._processes.pids()
            processes = calls.processes(
                pids,
                owners.labels,
                lambda pid: max(owners.n_peers(pid), self._processes.n_members(pid)),
                owners.gpu_uuid,
            )
            rows = self._idle_gpus.rows(
                now_ns,
                owners.allocations(),
                processes,
                number=calls.number,
                occupied=calls.occupied(frozenset(pids)),
            )
            self._append_named(layout.IDLE_GPUS, rows)

    def _append_ends(self, exit_ns: dict[int, int], now_ns: int) -> None:
        if exit_ns:
            self._append(layout.MEMORY, self._call_sums.final_rows(exit_ns, now_ns))
            self._probes.forget(exit_ns.keys())
        for pid in self._processes.remove_ended(exit_ns):
            ended_ns = exit_ns.get(pid, now_ns)
            self._device_numbers.forget(pid)
            self._owners.forget(pid)
            self._gpu_calls.forget(pid)
            if self._stacks:
                self._stacks.forget(pid)
            self._append(layout.SNAPSHOTS, self._snapshots.final_rows([pid], ended_ns))
            self._sink.process_ended(pid, ended_ns)

    def _append_silent_ranks(self, examined: ExaminedProcesses, now_ns: int) -> None:
        """Ranks that have made no call yet, and their code locations."""
        self._append_processes(dict.fromkeys(examined.pids, now_ns), now_ns)
        self._append_named(layout.SNAPSHOTS, examined.snapshots)
        self._append_named(layout.POSITIONS, examined.positions)

    def _append_callers(self, calls: DriverCalls, operations: Array, now_ns: int) -> None:
        """Processes that call into the GPU driver without being traced: their labels, and their end."""
        calls.refresh()
        traced = frozenset(self._processes.pids())
        self._annotate(
            calls.new_labels(operations["pid"][operations["op"] == Op.IOCTL].tolist(), traced, now_ns)
        )
        if ended_pids := self._call_sums.ended_untraced(traced):
            self._append(layout.MEMORY, self._call_sums.final_rows(ended_pids, now_ns))
            self._probes.forget(ended_pids)
            calls.forget(ended_pids)

    def _annotate(self, labels: list[Label]) -> None:
        if labels:
            self._sink.add_labels(labels)

    def _append(self, table: Table, rows: Array) -> None:
        """Deliver rows whose GPUs and stacks have the kernel's numbers."""
        if not len(rows):
            return
        if table in _TABLES_WITH_DEVICE:
            self._device_numbers.renumber(rows)
        if "stack" in (rows.dtype.names or ()):
            rows["stack"] = self._stacks.numbers(rows["stack"]) if self._stacks else layout.UNKNOWN
        self._append_named(table, rows)
        self.counts.n_records += len(rows)

    def _append_named(self, table: Table, rows: Array) -> None:
        """Deliver rows whose stacks have the sink's numbers."""
        if len(rows):
            if self._idle_gpus:
                self._gpu_calls.take(table, rows)
            self._sink.append(table, rows)
