"""The agent: a capture on one machine, with its sinks: the node trace, a hub, metrics. Wiring only.

The main thread sleeps until a process loads a library, or until a second is over; then it delivers and commits the new
rows. With a hub, another thread sends, and records are delivered several times a second. The agent runs next to a job
and must stay small: it loads neither DuckDB nor pyarrow. A wake-up costs a virtual machine 0.15 ms, so no thread polls
if the kernel can notify it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stallscope import __version__
from stallscope.agent_sinks import HealthSink, HubSink, MetricsSink, NodeSink
from stallscope.capture.session import (
    SOURCE,
    Capture,
    Driver,
    GpuTimes,
    OwnerOptions,
    Sink,
    Sinks,
    StatusLine,
    boot_id,
    clock,
    majors,
    still_runs,
)
from stallscope.capture.session import Options as CaptureOptions
from stallscope.ending import ASKS, set_by_signals, signal_descriptor
from stallscope.events import layout
from stallscope.exporters.event_socket import EventSocket
from stallscope.exporters.exporters import Outputs, outputs
from stallscope.exporters.incident_finder import incident_finder
from stallscope.exporters.node_health import Machine, NodeHealth
from stallscope.exporters.verdict_journal import VerdictJournal
from stallscope.serve.sidecar import serving_process
from stallscope.store.node import NodeTrace
from stallscope.store.writer_lock import only_writer, set_aside_if_of_another_boot

if TYPE_CHECKING:  # imports gRPC, which only an agent with a hub needs
    from stallscope.exporters.hub_output import HubOutput

_SECOND_NS = 10**9
_PRUNE_EVERY_NS = 30 * _SECOND_NS
_SIGNALS = (*ASKS, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A hub to send to. address: HOST:PORT. insecure: without TLS. client_cert, client_key: for mutual TLS.

    hosts: other permitted hosts of hubs, see exporters/hub_owners.py.
    """

    address: str
    token_file: Path
    cluster: str = "default"
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure: bool = False
    hosts: tuple[str, ...] = ()
    max_spool_bytes: int = 200_000_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to trace, and the outputs.

    pids: these processes and their descendants; empty: all. duration_s: None continues until a signal.
    probe_budget: share of a thread's time that high-frequency probes may cost; 0: no such probes.
    record_all: store every raw event of the ledger in `raw_path(db)`: much data, to check the
    ledger with. prometheus: address for serving metrics; otlp: URL for sending metrics; empty: none.
    serve: listen address for other machines and assistants, with serve_words for `stallscope serve`.
    wall_ns: the wall clock of this machine. notes_only: print events, but no status line every second.
    stacks: store the code locations of blocked threads.
    gpu_ioctls: count calls into the GPU driver; gpu_majors: finds its devices.
    annotate_socket: socket for jobs' labels; None: no labels. annotate_group: group of other users who may send labels.
    cloud: cloud whose metadata service describes this machine (aws, gcp, azure); empty: none.
    owners: schedulers that are asked for owners, and the treatment of private labels.
    gpu_times: when NCCL's profiler plugin records in the traced processes.
    engine_metrics_s: interval at which the metrics of inference engines are read; 0: never.
    engine_spans_port: local port for the spans of inference engines; 0: none.
    confined: give up all privileges that are no longer needed; for a process that only traces.
    thresholds: of diagnose/thresholds.py, and usd_per_gpu_hour: for the continuous diagnosis of this trace, in a
    separate process. alerts: the file of alerts. event_socket: where
    local programs receive changes of incidents. prints_verdicts: print a line for each incident that opens or closes.
    max_db_bytes, max_age_s: limits of the trace, 0: none. owner_max_age_s: of owners; 0: with the other rows.
    ready: called once, when new processes are traced.
    """

    db: Path
    node: str
    max_db_bytes: int = 10_000_000_000
    max_age_s: int = 0
    owner_max_age_s: int = 0
    pids: tuple[int, ...] = ()
    duration_s: float | None = None
    probe_budget: float = 0.005
    record_all: bool = False
    notes_only: bool = False
    stacks: bool = True
    gpu_ioctls: bool = False
    gpu_majors: Callable[[], Mapping[int, Driver]] = majors
    annotate_socket: Path | None = None
    annotate_group: str = ""
    cloud: str = ""
    owners: OwnerOptions = field(default_factory=OwnerOptions)
    gpu_times: GpuTimes = GpuTimes.SAMPLE
    engine_metrics_s: int = 0
    engine_spans_port: int = 0
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
    probes are removed and all rows captured before are in the trace. Processes of earlier sessions that no longer run
    are recorded as ended.
    """
    stop = stop or threading.Event()
    status = StatusLine(out, notes_only=options.notes_only)
    with ExitStack() as stack:
        stack.enter_context(set_by_signals(stop, _SIGNALS))
        capture = stack.enter_context(closing(Capture.open(_captured(options), note=status.note)))
        stack.enter_context(closing(status))
        if aside := set_aside_if_of_another_boot(options.db, boot_id(), time.time_ns()):
            status.note(f"the trace from before the last boot is kept as {aside}")
        stack.enter_context(only_writer(options.db, _group_of_the_user()))
        store = stack.enter_context(closing(NodeTrace(options.db)))
        ended = store.end_unobserved(store.node(options.node), still_runs)
        store.commit()
        journal = VerdictJournal(status.note if options.prints_verdicts else None)
        stack.callback(lambda: journal.write(store.insert))
        if options.confined:
            capture.drop_privileges(
                written=[options.db, options.db.absolute().parent],
                listens=(options.prometheus, options.serve),
            )
        exports = stack.enter_context(
            outputs(prometheus=options.prometheus, otlp=options.otlp, node=options.node, note=status.note)
        )
        events = (
            stack.enter_context(closing(EventSocket(options.event_socket))) if options.event_socket else None
        )
        output = stack.enter_context(closing(_line_to_hub(options.hub, options))) if options.hub else None
        hub = HubSink(output) if output else None
        if hub and len(ended):
            hub.append(layout.PROCESSES, ended)
        if hub:  # the incidents that close at the end of the trace
            stack.callback(lambda: hub.send(clock.reading(0, wall_ns=options.wall_ns)))
        stack.enter_context(
            incident_finder(
                options.db,
                lambda line: _report(line, journal, exports, events, capture, hub),
                options.thresholds,
                options.usd_per_gpu_hour,
                options.alerts,
            )
        )
        if options.serve:
            stack.enter_context(
                serving_process(
                    options.db, options.serve, node=options.node, words=options.serve_words, note=status.note
                )
            )
        status.note(f"tracing into {options.db}; Ctrl-C ends it")
        health = None
        if options.hub and output:
            machine = Machine(options.node, options.hub.cluster, options.db)
            meter = exports.updates.meter if exports else None
            health = NodeHealth(machine, output.report_health, note=status.note, meter=meter)
            stack.enter_context(closing(health))
        wake_fd = stack.enter_context(signal_descriptor())
        writer = _Writer(options, store, capture, hub, exports, health)
        capture.start(writer.sink, node=writer.node, wake_fd=wake_fd)
        options.ready()
        _run(options, capture, writer, lambda: journal.write(store.insert), status=status, stop=stop)


def _captured(options: Options) -> CaptureOptions:
    """The options of the capture."""
    return CaptureOptions(
        pids=options.pids,
        probe_budget=options.probe_budget,
        raw_file=raw_path(options.db) if options.record_all else None,
        stacks=options.stacks,
        gpu_ioctls=options.gpu_ioctls,
        gpu_majors=options.gpu_majors,
        annotate_socket=options.annotate_socket,
        annotate_group=options.annotate_group,
        cloud=options.cloud,
        owners=options.owners,
        gpu_times=options.gpu_times,
        engine_metrics_s=options.engine_metrics_s,
        engine_spans_port=options.engine_spans_port,
        delivers_often=options.hub is not None,
    )


def _report(
    line: dict[str, Any],
    journal: VerdictJournal,
    exports: Outputs | None,
    events: EventSocket | None,
    capture: Capture,
    hub: HubSink | None,
) -> None:
    """Pass on a change of an incident, in the thread that reads the diagnosis."""
    if line.get("needs_gpu_times"):
        capture.record_gpu_times()
    journal.take(line)
    if events:
        events.take(line)
    if hub:
        hub.incident(line)
    if exports:
        exports.incident(line)


def _line_to_hub(hub: Hub, options: Options) -> "HubOutput":
    """The output to the hub; it connects later. Raises BadInput, NotFound, StorageFailed."""
    from stallscope.exporters.hub_output import HubOutput, Target
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
        hosts=hub.hosts,
        about={"agent": f"stallscope {__version__}"},
    )
    return HubOutput.open(target, spool_path(options.db), max_spool_bytes=hub.max_spool_bytes)


def _run(
    options: Options,
    capture: Capture,
    writer: "_Writer",
    write_verdicts: Callable[[], None],
    *,
    status: StatusLine,
    stop: threading.Event,
) -> None:
    """Capture and write until stopped; then once more, without probes."""
    begin_ns = time.monotonic_ns()
    end_ns = begin_ns + int(options.duration_s * _SECOND_NS) if options.duration_s is not None else None
    try:
        while not stop.is_set() and (end_ns is None or time.monotonic_ns() < end_ns):
            if capture.poll():
                write_verdicts()
                writer.commit()
                if news := writer.hub_news():
                    status.note(news)
                status.show(writer.status())
            elif capture.has_new_records():
                writer.send()
            capture.wait(stop, until_ns=end_ns)
    finally:
        capture.detach()
    capture.finish()
    writer.commit()
    status.show(writer.status())


class _Writer:
    """Commits the rows of one second to the node trace, and sends the rows of a hub more often."""

    def __init__(
        self,
        options: Options,
        store: NodeTrace,
        capture: Capture,
        hub: HubSink | None,
        exports: Outputs | None,
        health: NodeHealth | None,
    ):
        self.node = store.node(options.node)
        self._options, self._store, self._capture, self._hub = options, store, capture, hub
        self._exports, self._health = exports, health
        self._session = store.session(
            self.node, SOURCE, started_ns=time.monotonic_ns(), facts=capture.facts()
        )
        wanted = (hub, exports and MetricsSink(exports), health and HealthSink(health))
        others: list[Sink] = [sink for sink in wanted if sink]
        self.sink = Sinks(NodeSink(store, self.node), *others)
        self._next_prune_ns = 0

    def commit(self) -> None:
        """Write the clock and commit; delete old rows from time to time."""
        now_ns = time.monotonic_ns()
        reading = clock.reading(self.node, wall_ns=self._options.wall_ns)
        synchronisation = clock.synchronisation()
        self._store.clock(reading, kernel_clock=synchronisation)
        if self._hub:
            self._hub.send(
                reading, is_synchronised=synchronisation.is_synchronised if synchronisation else None
            )
        if self._health:
            self._health.second()
        self._store.end_session(self._session, now_ns)
        self._store.commit()
        if self._exports:
            self._exports.second(n_processes=self._capture.n_processes, gpus=self._capture.latest_gpus())
        if now_ns >= self._next_prune_ns:
            self._next_prune_ns = now_ns + _PRUNE_EVERY_NS
            before_ns, owners_before_ns = (
                now_ns - age_s * _SECOND_NS if age_s else None
                for age_s in (self._options.max_age_s, self._options.owner_max_age_s)
            )
            self._store.prune(
                self._options.max_db_bytes, before_ns=before_ns, owners_before_ns=owners_before_ns
            )

    def send(self) -> None:
        """Between two commits: send the records to the hub."""
        if self._hub:
            self._hub.send(clock.reading(self.node, wall_ns=self._options.wall_ns))

    def hub_news(self) -> str:
        """A line when the hub begins to refuse data, or takes data again; otherwise empty."""
        return self._hub.news() if self._hub else ""

    def status(self) -> str:
        """Counts of captured records and, with a hub, of records that it has acknowledged."""
        tally = self._capture.status()
        return f"{tally}; {self._hub.status()}" if self._hub else tally


def _group_of_the_user() -> int | None:
    """The group of the user who called sudo, so that `explain` needs no root; None without sudo."""
    group = os.environ.get("SUDO_GID", "")
    return int(group) if group.isdecimal() else None
