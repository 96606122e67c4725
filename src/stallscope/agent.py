"""The agent: captures on one machine and writes the node trace. Wiring, and the work of each second.

Three threads: one empties the kernel's rings when they fill, and one governs high-frequency probes. The main thread
sleeps until a process loads a library, which it attaches to, or until a second is over. It then writes the new rows.
With a hub a fourth thread sends, and new rows are taken several times a second. The agent runs next to a job and must
stay small: it loads neither DuckDB nor pyarrow. A wake-up costs a virtual machine 0.15 ms, so no thread polls
if the kernel can notify it.
"""

import grp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from stallscope import __version__
from stallscope.capture.gpu.driver_calls import DriverCalls
from stallscope.capture.gpu.drivers import Driver, majors
from stallscope.capture.gpu.gpus import Gpus, watched
from stallscope.capture.gpu.visible_devices import GpuNumbers
from stallscope.capture.host import HostEvents
from stallscope.capture.probes import clock, mmap_watch, preflight, privileges, program
from stallscope.capture.probes.attaching import Attaching
from stallscope.capture.probes.calibration import times_way_in
from stallscope.capture.probes.collector import Collector
from stallscope.capture.probes.discovery import Discovery
from stallscope.capture.probes.governor import Governor
from stallscope.capture.probes.operations import SYMBOLS
from stallscope.capture.probes.optional_programs import IOCTL_WAYS
from stallscope.capture.probes.program import Program
from stallscope.capture.process.annotation_socket import Label, Labels
from stallscope.capture.process.comm_split import Splits
from stallscope.capture.process.machine import boot_id, facts
from stallscope.capture.process.processes import Processes, Snapshots
from stallscope.capture.process.status import StatusLine, Tally, line
from stallscope.capture.process.workload import workload
from stallscope.capture.rows import records
from stallscope.capture.rows.call_statistics import Tallies
from stallscope.capture.rows.device_numbers import Renumbering
from stallscope.capture.rows.lost_records import Losses
from stallscope.capture.rows.snapshots import snapshots
from stallscope.capture.stacks.sampler import Stacks
from stallscope.capture.stacks.silent_ranks import Examined, Unseen
from stallscope.capture.stacks.thread_samples import Samples
from stallscope.ending import ASKS, set_by_signals, signal_descriptor
from stallscope.errors import CannotTrace, NotFound
from stallscope.events import layout
from stallscope.events.kernel import Kind
from stallscope.events.layout import Array, Table
from stallscope.events.names import Op
from stallscope.events.trace import Clock
from stallscope.exporters.event_socket import EventSocket
from stallscope.exporters.exporters import Outputs, outputs
from stallscope.exporters.incidents import incident_finder
from stallscope.exporters.verdict_journal import VerdictJournal
from stallscope.serve.sidecar import serving_beside
from stallscope.store.node import NodeTrace
from stallscope.store.writer import only_writer, set_aside_if_of_another_boot

if TYPE_CHECKING:  # imports gRPC, which only an agent with a hub needs
    from stallscope.exporters.hub import HubOutput

_LOOK_EVERY_S = 0.04
_SECOND_NS = 10**9
_SEND_EVERY_NS = _SECOND_NS // 4
_PRUNE_EVERY_NS = 30 * _SECOND_NS
_SIGNALS = (*ASKS, signal.SIGHUP)
_WITH_A_DEVICE = (layout.COLLECTIVES, layout.CALLS, layout.MEMORY)
"""Tables whose `device` is the number of the GPU within the process."""
_SOURCE = "live capture of real processes by eBPF"


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A hub to send to. address: HOST:PORT. insecure: without TLS. client_cert, client_key: for mutual TLS."""

    address: str
    token_file: Path
    cluster: str = "default"
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure: bool = False
    max_spool_bytes: int = 200_000_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to trace, and the outputs.

    pids: these processes and their descendants; empty: all. duration_s: None continues until a signal.
    hook_budget: share of a thread's time that high-frequency probes may cost; 0: no such probes.
    record_all: store every raw event of the ledger in `raw_path(db)`: much data, to check the
    ledger with. prometheus: address for serving metrics; otlp: URL for sending metrics; empty: none.
    serve: listen address for other machines and assistants, with serve_words for `stallscope serve`.
    wall_ns: the wall clock of this machine. notes_only: print events, but no status line every second.
    stacks: store the code locations of blocked threads.
    gpu_ioctls: count calls into the GPU driver; gpu_majors: finds its devices.
    annotate_socket: socket for jobs' labels; None: no labels. annotate_group: group of other users who may send labels.
    cloud: cloud whose metadata service describes this machine (aws, gcp, azure); empty: none.
    confined: give up all privileges that are no longer needed; for a process that only traces.
    thresholds: of diagnose/thresholds.py, and usd_per_gpu_hour: for the continuous diagnosis of this trace, in a
    separate process. alerts: the file of alerts. event_socket: where
    local programs receive changes of incidents. prints_verdicts: print a line for each incident that opens or closes.
    max_db_bytes, max_age_s: limits of the trace, 0: none. ready: called once, when new processes are traced.
    """

    db: Path
    node: str
    max_db_bytes: int = 10_000_000_000
    max_age_s: int = 0
    pids: tuple[int, ...] = ()
    duration_s: float | None = None
    hook_budget: float = 0.005
    record_all: bool = False
    notes_only: bool = False
    stacks: bool = True
    gpu_ioctls: bool = False
    gpu_majors: Callable[[], Mapping[int, Driver]] = majors
    annotate_socket: Path | None = None
    annotate_group: str = ""
    cloud: str = ""
    prometheus: str = ""
    otlp: str = ""
    serve: str = ""
    serve_words: tuple[str, ...] = ()
    hub: Hub | None = None
    confined: bool = False
    wall_ns: Callable[[], int] = time.time_ns
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    usd_per_gpu_hour: float | None = None
    alerts: Path | None = None
    event_socket: Path | None = None
    prints_verdicts: bool = True
    ready: Callable[[], None] = lambda: None


def spool_path(db: Path) -> Path:
    """The folder of batches that the hub has not acknowledged yet."""
    return db.with_name(db.name + ".to-hub")


def raw_path(db: Path) -> Path:
    """The file of raw events: consecutive rows of events.kernel.RAW."""
    return db.with_name(db.name + ".raw")


def trace(options: Options, *, out: TextIO = sys.stderr, stop: threading.Event | None = None) -> None:
    """Trace until SIGINT, SIGTERM, the end of the duration, or `stop` is set (noticed within a second).

    Raises CannotTrace, NotFound (no such process), StorageFailed, BadTrace, NewerSchema. At any end, the
    probes are removed and all rows captured before are in the trace.
    """
    preflight.check()
    preflight.check_pids(options.pids)
    stop = stop or threading.Event()
    chosen = frozenset(options.pids) if options.pids else None
    with ExitStack() as stack:
        stack.enter_context(set_by_signals(stop, _SIGNALS))
        kernel_side = program.Options(
            record_all=options.record_all,
            pids=chosen,
            own_pid=os.getpid(),
            ioctl_ways=tuple(IOCTL_WAYS) if options.gpu_ioctls else (),
        )
        probes = stack.enter_context(Program.load(kernel_side))
        status = stack.enter_context(closing(StatusLine(out, notes_only=options.notes_only)))
        if aside := set_aside_if_of_another_boot(options.db, boot_id(), time.time_ns()):
            status.note(f"the trace from before the last boot is kept as {aside}")
        stack.enter_context(only_writer(options.db, _group_of_the_user()))
        store = stack.enter_context(closing(NodeTrace(options.db)))
        journal = VerdictJournal(status.note if options.prints_verdicts else None)
        stack.callback(lambda: journal.write(store.insert))
        if options.confined:
            privileges.drop_all_but(_privileges(options, probes.mode))
        exports = stack.enter_context(
            outputs(
                prometheus=options.prometheus,
                otlp=options.otlp,
                node=options.node,
                note=status.note,
            )
        )
        events = (
            stack.enter_context(closing(EventSocket(options.event_socket))) if options.event_socket else None
        )
        stack.enter_context(
            incident_finder(
                options.db,
                lambda line: _report(line, journal, exports, events),
                options.thresholds,
                options.usd_per_gpu_hour,
                options.alerts,
            )
        )
        if options.serve:
            stack.enter_context(
                serving_beside(
                    options.db, options.serve, node=options.node, words=options.serve_words, say=status.note
                )
            )
        status.note(f"tracing into {options.db}; Ctrl-C ends it")
        if probes.missing:
            status.note(f"this kernel does not provide: {', '.join(probes.missing)}")
        if probes.mode == "perf":
            status.note(
                "this kernel attaches probes one by one: only the functions that jobs wait in get probes, launches are "
                "not counted, and the end of the trace takes 0.1 s per probe; Linux 6.6 and later do better"
            )
        driver_calls = None
        if probes.ioctl_way:
            driver_calls = DriverCalls(probes.know_drivers, probes.caller, options.gpu_majors)
        if driver_calls and (remark := driver_calls.refresh()):
            status.note(remark)
        if probes.ioctl_way == "tracepoint":
            status.note(
                "calls into the GPU driver are counted by a tracepoint that slows every system call slightly"
            )
        to_hub = stack.enter_context(closing(_line_to_hub(options.hub, options))) if options.hub else None
        labels = _labels(options, status)
        if labels:
            stack.enter_context(closing(labels))
        gpus = watched(store.node(options.node), status.note)
        if gpus:
            stack.enter_context(closing(gpus))
        _run(
            options,
            probes,
            store,
            to_hub,
            exports=exports,
            labels=labels,
            gpus=gpus,
            driver_calls=driver_calls,
            journal=journal,
            status=status,
            stop=stop,
            waking=stack.enter_context(signal_descriptor()),
        )


def _report(
    line: dict[str, Any], journal: VerdictJournal, exports: Outputs | None, events: EventSocket | None
) -> None:
    """Pass on a change of an incident, in the thread that reads the diagnosis."""
    journal.take(line)
    if events:
        events.take(line)
    if exports:
        exports.incident(line)


def _privileges(options: Options, mode: str) -> frozenset[int]:
    """The capabilities needed once the trace is open; the first thread starts afterwards."""
    socket = options.annotate_socket
    return privileges.kept(
        privileges.held(),
        mode,
        written=[options.db, options.db.absolute().parent, *([socket.parent] if socket else [])],
        ports=map(privileges.port, (options.prometheus, options.serve)),
        chowns=bool(options.annotate_group),
    )


def _line_to_hub(hub: Hub, options: Options) -> "HubOutput":
    """The output to the hub; it connects later. Raises BadInput, NotFound, StorageFailed."""
    from stallscope.exporters.hub import HubOutput, Target
    from stallscope.serve.tokens import token_in

    token_in(hub.token_file)
    target = Target(
        address=hub.address,
        node=options.node,
        cluster=hub.cluster,
        token=lambda: token_in(hub.token_file),
        ca_file=hub.ca_file,
        client_cert=hub.client_cert,
        client_key=hub.client_key,
        insecure=hub.insecure,
        about={"agent": f"stallscope {__version__}"},
    )
    return HubOutput.open(target, spool_path(options.db), max_spool_bytes=hub.max_spool_bytes)


def _run(
    options: Options,
    probes: Program,
    store: NodeTrace,
    to_hub: "HubOutput | None",
    *,
    exports: Outputs | None,
    labels: Labels | None,
    gpus: Gpus | None,
    driver_calls: DriverCalls | None,
    journal: VerdictJournal,
    status: StatusLine,
    stop: threading.Event,
    waking: int,
) -> None:
    """Discover, attach and write until stopped; then once more, without probes. waking: readable at a signal."""
    mmap_events = mmap_watch.opened(waking)
    discovery = Discovery(pids=frozenset(options.pids), ignored=frozenset({os.getpid()}), mapped=mmap_events)
    governor = Governor(probes, options.hook_budget, times_way_in(probes))
    attaching = Attaching(discovery, probes.attach, governor=governor, only_few=probes.mode == "perf")
    scribe = _Scribe(
        options,
        probes,
        store,
        to_hub,
        governor=governor,
        gpu_processes=discovery.gpu_processes,
        exports=exports,
        labels=labels,
        gpus=gpus,
        driver_calls=driver_calls,
        note=status.note,
    )
    begin_ns = time.monotonic_ns()
    end_ns = begin_ns + int(options.duration_s * _SECOND_NS) if options.duration_s is not None else None
    followed: set[int] = set()
    scribe.collector.start()
    governor.start()
    if scribe.samples:
        scribe.samples.start()
    options.ready()
    try:
        while not stop.is_set() and (end_ns is None or time.monotonic_ns() < end_ns):
            now_ns = time.monotonic_ns()
            for note in attaching.new(now_ns) + governor.notes():
                status.note(note)
            if options.pids and (new := discovery.chosen() - followed):
                probes.follow(new)
                followed |= new
            if now_ns >= scribe.next_ns:
                journal.write(store.insert)
                scribe.write()
                status.show(scribe.status())
                attaching.drop_unused(now_ns)
            elif to_hub and now_ns >= scribe.next_send_ns:
                scribe.take()
            due_ns = min(scribe.next_ns, scribe.next_send_ns) if to_hub else scribe.next_ns
            due_ns = min(due_ns, end_ns) if end_ns is not None else due_ns
            _pause(stop, mmap_events, (due_ns - time.monotonic_ns()) / _SECOND_NS)
    finally:
        governor.stop()
        if scribe.samples:
            scribe.samples.close()
        if mmap_events:
            mmap_events.close()
        probes.detach()
        scribe.collector.stop()
    scribe.write(is_last=True)
    status.show(scribe.status())


def _pause(stop: threading.Event, mmap_events: mmap_watch.Mapped | None, at_most_s: float) -> None:
    """Sleep until a process loads a library or there is work to do; 40 ms on kernels without such notifications."""
    if mmap_events:
        mmap_events.wait(at_most_s)
    else:
        stop.wait(_LOOK_EVERY_S)


class _Scribe:
    """Writes new rows into the trace about once a second; to a hub more often."""

    def __init__(
        self,
        options: Options,
        probes: Program,
        store: NodeTrace,
        to_hub: "HubOutput | None",
        *,
        governor: Governor,
        gpu_processes: Callable[[], Iterable[int]],
        exports: Outputs | None,
        labels: Labels | None = None,
        note: Callable[[str], None] = lambda _: None,
        gpus: Gpus | None = None,
        driver_calls: DriverCalls | None = None,
    ):
        self.tally = Tally()
        self.next_ns = 0
        self.next_send_ns = 0
        self._to_hub = to_hub
        self._for_hub: dict[str, list[Array]] = {}
        self._events: list[Array] = []
        self.collector = Collector(probes.arrivals, probes.events, probes.natives, probes.stacks)
        self._options, self._probes, self._store, self._exports = options, probes, store, exports
        self._labels, self._gpus, self._driver_calls = labels, gpus, driver_calls
        self._governor = governor
        self._node = store.node(options.node)
        self._session = store.session(
            self._node,
            _SOURCE,
            started_ns=time.monotonic_ns(),
            facts=facts(probes.mode, not_told=probes.missing)
            | ({"gpu_ioctls": probes.ioctl_way or "not on this kernel"} if options.gpu_ioctls else {})
            | _cloud_facts(options.cloud),
        )
        numbers = gpus.gpu_numbers if gpus else GpuNumbers()
        self._processes = Processes(self._node, gpus=numbers)
        self._renumbering = Renumbering(numbers)
        self._last = Snapshots()
        self._host = HostEvents(
            self._node, probes.entries, drivers=lambda: driver_calls.known if driver_calls else {}
        )
        self._splits = Splits()
        self._losses = Losses()
        self._tallies = Tallies(
            self._node,
            probes.operations,
            probes.balances,
            governor,
            own_pid=os.getpid(),
        )
        self._stacks = (
            Stacks(
                self._node,
                partial(store.stack, self._node),
                note,
                probes.walk_python,
                probes.peek,
                probes.know_native,
            )
            if options.stacks
            else None
        )
        self._unseen = Unseen(self._node, self._stacks, gpu_processes) if self._stacks else None
        self.samples = Samples(probes.processes, peek=probes.peek) if options.stacks else None
        self._symbol_of: dict[int, int] = {}
        self._next_prune_ns = 0

    def write(self, *, is_last: bool = False) -> None:
        """One second's worth: records, processes and their states, losses, the clock; then commit.

        is_last: no further record can complete an incomplete one.
        """
        now_ns = time.monotonic_ns()
        if is_last:
            self._splits.n_patience = 0
        self.next_ns = now_ns + _SECOND_NS
        self._take_records(now_ns)
        events, self._events = layout.joined(self._events), []
        counted = self._tallies.rows(now_ns)
        for table, rows in counted:
            self._append(table, rows)
        self._keep_states(events, now_ns)
        if self._driver_calls:
            self._keep_callers(self._driver_calls, dict(counted)[layout.OPERATIONS], now_ns)
        if self.samples and self._stacks:
            self._store.append(layout.SAMPLES, self.samples.taken(self._node, now_ns, self._stacks.number))
        self._append(layout.HOST_EVENTS, self._host.rows(events, self._processes.pids(), now_ns))
        self._keep_labels(self._labels.taken() if self._labels else [])
        for table, rows in self._gpus.taken() if self._gpus else ():
            self._append(table, rows)
        lost = self._keep_losses(now_ns)
        reading = clock.reading(self._node, wall_ns=self._options.wall_ns)
        kept = clock.kept()
        self._store.clock(reading, kept=kept)
        self._send(reading, is_synchronised=kept.is_synchronised if kept else None, lost=lost)
        self._store.end_session(self._session, now_ns)
        self._store.commit()
        if self._exports:
            latest = self._gpus.latest() if self._gpus else None
            self._exports.second(n_processes=self.tally.n_processes, gpus=latest)
        if now_ns >= self._next_prune_ns:
            self._next_prune_ns = now_ns + _PRUNE_EVERY_NS
            age_ns = self._options.max_age_s * _SECOND_NS
            self._store.prune(self._options.max_db_bytes, before_ns=now_ns - age_ns if age_ns else None)

    def take(self) -> None:
        """Between two write(): take the records only, send them to the hub, and write them with the next write()."""
        self._take_records(time.monotonic_ns())
        self._send(clock.reading(self._node, wall_ns=self._options.wall_ns))

    def status(self) -> str:
        """Counts of captured records and, with a hub, of records that it has acknowledged."""
        tally = line(self.tally)
        return f"{tally}; {self._to_hub.status()}" if self._to_hub else tally

    def _take_records(self, now_ns: int) -> None:
        self.next_send_ns = now_ns + _SEND_EVERY_NS
        arrivals, events, natives, python_stacks = self.collector.taken()
        if self._stacks:
            self._stacks.take(natives, python_stacks)
        self._events.append(events)
        self._keep_records(arrivals, events)

    def _send(
        self, reading: Clock, *, is_synchronised: bool | None = None, lost: dict[str, int] | None = None
    ) -> None:
        if self._to_hub is None:
            return
        tables = {name: layout.joined(rows) for name, rows in self._for_hub.items()}
        self._for_hub = {}
        self._to_hub.offer(tables, clock=reading, symbols=SYMBOLS, is_synchronised=is_synchronised, lost=lost)

    def _keep_records(self, arrivals: Array, events: Array) -> None:
        tables = records.tables(arrivals, events, node=self._node, splits=self._splits)
        for table in layout.EVENT_TABLES:
            if table.name in tables:
                self._append(table, tables[table.name])
        for pid, comm_hash, ended_ns in zip(*records.communicators_ended(events, self._splits), strict=True):
            self._store.communicator_ended(self._node, int(pid), int(comm_hash), ended_ns=int(ended_ns))
            if self._to_hub:
                self._to_hub.communicator_ended(int(pid), int(comm_hash), ended_ns=int(ended_ns))
        self._processes.joined(tables["communicators"])
        self.tally.add_rounds(tables["collectives"])
        for each in self._processes.located(tables["collectives"]):
            self._store.process_located(self._node, each.pid, each.device)
            if self._to_hub:
                self._to_hub.process_located(each.pid, each.device)
        if self._options.record_all:
            with raw_path(self._options.db).open("ab") as file:
                records.raw(events).tofile(file)

    def _keep_states(self, events: Array, now_ns: int) -> None:
        """A snapshot of each traced process; the start and the end of each process."""
        state = self._probes.processes()
        born = records.of_kind(events, Kind.PROCESS)
        first_ns = dict.fromkeys(state.pids.tolist(), now_ns)
        first_ns |= dict(zip(born["pid"].tolist(), born["ts_ns"].tolist(), strict=True))
        new = self._processes.first_seen(first_ns)
        self._append(layout.PROCESSES, new)
        if len(new):
            self._governor.renew()
        self._keep_labels(_belongings(new, self._processes))
        self._keep_places()
        self._append(layout.SNAPSHOTS, self._last.keep(snapshots(state, node=self._node)))
        if self._stacks:
            self._stacks.follow(state.pids.tolist())
            positions = self._stacks.of_silent(state, now_ns, members=self._processes.members())
            self._store.append(layout.POSITIONS, positions)
        if self._unseen:
            self._keep_unseen(self._unseen.examine(frozenset(state.pids.tolist()), now_ns), now_ns)
        exits = records.of_kind(events, Kind.EXIT, Kind.EXEC)
        exit_ns = dict(zip(exits["pid"].tolist(), exits["ts_ns"].tolist(), strict=True))
        if exit_ns:
            self._append(layout.MEMORY, self._tallies.ended(exit_ns, now_ns))
            self._probes.forget(exit_ns.keys())
        for pid in self._processes.gone(exit_ns):
            ended_ns = exit_ns.get(pid, now_ns)
            self._renumbering.forget(pid)
            if self._stacks:
                self._stacks.forget(pid)
            self._append(layout.SNAPSHOTS, self._last.at_end([pid], ended_ns))
            self._store.process_ended(self._node, pid, ended_ns)
            if self._to_hub:
                self._to_hub.process_ended(pid, ended_ns)
        self.tally.n_processes = len(self._processes)

    def _keep_unseen(self, seen: Examined, now_ns: int) -> None:
        """Ranks that have made no call yet, and their code locations."""
        self._append(layout.PROCESSES, self._processes.first_seen(dict.fromkeys(seen.pids, now_ns)))
        self._store.append(layout.SNAPSHOTS, seen.snapshots)
        self._store.append(layout.POSITIONS, seen.positions)

    def _keep_callers(self, calls: DriverCalls, counted: Array, now_ns: int) -> None:
        """Processes that call into the GPU driver without being traced: their labels, and their end."""
        calls.refresh()
        traced = frozenset(self._processes.pids())
        self._keep_labels(calls.named(counted["pid"][counted["op"] == Op.IOCTL].tolist(), traced, now_ns))
        if ended := self._tallies.strays(traced):
            self._append(layout.MEMORY, self._tallies.ended(ended, now_ns))
            self._probes.forget(ended)
            calls.forget(ended)

    def _keep_places(self) -> None:
        """Ranks that no launcher reported, but a communicator."""
        for each in self._processes.placed():
            self._store.process_placed(self._node, each.pid, each.rank, nranks=each.nranks)
            if self._to_hub:
                self._to_hub.process_placed(each.pid, each.rank, nranks=each.nranks)

    def _keep_labels(self, labels: list[Label]) -> None:
        rows = [(label.ts_ns, self._node, label.pid, label.label, label.value) for label in labels]
        if rows:
            self._store.insert("annotations", ("ts_ns", "node", "pid", "label", "value"), rows)

    def _keep_losses(self, now_ns: int) -> dict[str, int]:
        """Records lost since the last call, by kind; the trace gets them by CPU."""
        new = self._losses.new(self._probes.counters(), n_dropped=self.collector.n_dropped)
        self._store.lost(self._node, now_ns, new)
        if self._exports:
            for kind, _, n in new:
                self._exports.lost(kind, n)
        self.tally.n_lost = self._losses.n_lost
        by_kind: dict[str, int] = {}
        for kind, _, n in new:
            by_kind[kind] = by_kind.get(kind, 0) + n
        return by_kind

    def _append(self, table: Table, rows: Array) -> None:
        if not len(rows):
            return
        columns = rows.dtype.names or ()
        if table in _WITH_A_DEVICE:
            self._renumbering.renumber(rows)
        if "stack" in columns:
            numbers = self._stacks.numbers(rows["stack"]) if self._stacks else layout.UNKNOWN
            rows["stack"] = layout.UNKNOWN  # a stack number of this trace has no meaning for a hub
        if self._to_hub and table in layout.TABLES:
            is_changed = "symbol" in columns or "stack" in columns
            self._for_hub.setdefault(table.name, []).append(rows.copy() if is_changed else rows)
        if "symbol" in columns:
            rows["symbol"] = self._symbols(rows["symbol"])
        if "stack" in columns:
            rows["stack"] = numbers
        self._store.append(table, rows)
        self.tally.n_records += len(rows)
        if self._exports:
            self._exports.take(table, rows)

    def _symbols(self, numbers: Array) -> Array:
        """The trace's numbers for functions, from the table's numbers."""
        for number in set(numbers.tolist()) - self._symbol_of.keys():
            self._symbol_of[number] = self._store.symbol(SYMBOLS[number]) if number else 0
        return np.array([self._symbol_of[number] for number in numbers.tolist()], numbers.dtype)


def _labels(options: Options, status: StatusLine) -> Labels | None:
    """The socket for jobs' labels; the agent continues without it. Raises NotFound for an unknown group."""
    if options.annotate_socket is None:
        return None
    try:
        group = grp.getgrnam(options.annotate_group).gr_gid if options.annotate_group else None
    except KeyError:
        raise NotFound(
            f"group {options.annotate_group!r} does not exist: check --annotate-group, or create it (groupadd)"
        ) from None
    try:
        return Labels(options.annotate_socket, group)
    except CannotTrace as error:
        status.note(f"labels are not accepted: {error}")
        return None


def _cloud_facts(cloud: str) -> dict[str, str]:
    """The cloud's description of this machine; requested only if the user asked for it."""
    if not cloud:
        return {}
    from stallscope.capture.process.cloud import machine  # the standard library's HTTP uses megabytes

    return machine(cloud)


def _belongings(new: Array, processes: Processes) -> list[Label]:
    """The container, pod or job of each of these new processes, as labels."""
    return [
        Label(int(row["ts_ns"]), int(row["pid"]), name, value)
        for row in new
        for name, value in workload(int(row["pid"]), processes.started_with(int(row["pid"]))).items()
    ]


def _group_of_the_user() -> int | None:
    """The group of the user who called sudo, so that `explain` needs no root; None without sudo."""
    group = os.environ.get("SUDO_GID", "")
    return int(group) if group.isdecimal() else None
