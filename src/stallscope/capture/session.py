"""The public interface of the capture: probes in the kernel at one end, rows in a sink at the other.

    capture = Capture.open(Options(pids=(4711,)), note=print)
    capture.start(sink, node=0, wake_fd=descriptor)
    while ...:
        capture.poll()
        capture.wait(stop)
    capture.detach()
    capture.finish()
    capture.close()

open() needs all privileges. start() begins threads: one empties the kernel's rings when they fill, one governs
high-frequency probes, and one samples stacks. poll() attaches to new processes and delivers rows once a second; with
delivers_often, records several times a second.
"""

import grp
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.capture.gpu.driver_calls import DriverCalls
from stallscope.capture.gpu.drivers import Driver, majors
from stallscope.capture.gpu.gpu_watch import Gpus, watch_gpus
from stallscope.capture.gpu.kernel_records import KernelRecords
from stallscope.capture.gpu.plugin_windows import GpuTimes, PluginWindows
from stallscope.capture.owners.privacy import Privacy
from stallscope.capture.owners.schedulers import OwnerOptions, idle_gpus, opened_owners, owner_sources
from stallscope.capture.probes import clock, mmap_watch, preflight, privileges, program
from stallscope.capture.probes.attaching import Attacher
from stallscope.capture.probes.discovery import Discovery
from stallscope.capture.probes.governor import Governor
from stallscope.capture.probes.operations import SYMBOLS
from stallscope.capture.probes.optional_programs import IOCTL_WAYS
from stallscope.capture.probes.program import Program
from stallscope.capture.process.annotation_socket import Label, Labels
from stallscope.capture.process.machine_facts import boot_id, facts
from stallscope.capture.process.processes import still_runs
from stallscope.capture.process.status import StatusLine, status_line
from stallscope.capture.row_delivery import Delivery
from stallscope.capture.serving.engine_spans import EngineSpans
from stallscope.capture.sink import PartialSink, Sink, Sinks
from stallscope.errors import CannotTrace, NotFound
from stallscope.events.layout import Array

__all__ = [
    "SOURCE",
    "SYMBOLS",
    "Capture",
    "Driver",
    "GpuTimes",
    "Label",
    "Options",
    "OwnerOptions",
    "PartialSink",
    "Privacy",
    "Sink",
    "Sinks",
    "StatusLine",
    "boot_id",
    "clock",
    "majors",
    "owner_sources",
    "still_runs",
]

SOURCE = "live capture of real processes by eBPF"
_POLL_EVERY_S = 0.04
_SECOND_NS = 10**9
_OFTEN_NS = _SECOND_NS // 4
_PERF_NOTE = (
    "this kernel attaches probes one by one: only the functions in which jobs wait get probes, launches are "
    "not counted, and ending the trace takes 0.1 s per probe; Linux 6.6 and later attach all probes at once"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to capture.

    pids: these processes and their descendants; empty: all. probe_budget: share of a thread's time that high-frequency
    probes may cost; 0: no such probes. raw_file: also write every raw event of the ledger into this file: much data, to
    check the ledger with. stacks: capture the code locations of blocked threads. gpu_ioctls: count calls into the GPU
    driver; gpu_majors: finds its devices. annotate_socket: socket for jobs' labels; None: no labels. annotate_group:
    group of other users who may send labels. cloud: cloud whose metadata service describes this machine (aws, gcp,
    azure); empty: none. owners: schedulers that are asked for owners. delivers_often: deliver records several times
    a second. gpu_times: when NCCL's profiler plugin records in the traced processes. engine_metrics_s: interval of
    reads of the metrics of inference engines; 0: never. engine_spans_port: local port for their spans; 0: none.
    """

    pids: tuple[int, ...] = ()
    probe_budget: float = 0.005
    raw_file: Path | None = None
    stacks: bool = True
    gpu_ioctls: bool = False
    gpu_majors: Callable[[], Mapping[int, Driver]] = majors
    annotate_socket: Path | None = None
    annotate_group: str = ""
    cloud: str = ""
    owners: OwnerOptions = field(default_factory=OwnerOptions)
    delivers_often: bool = False
    gpu_times: GpuTimes = GpuTimes.SAMPLE
    engine_metrics_s: int = 0
    engine_spans_port: int = 0


class Capture:
    """A capture on this machine; its rows go to a sink. For one thread."""

    def __init__(self, options: Options, probes: Program, note: Callable[[str], None], stack: ExitStack):
        self._options, self._probes, self._note, self._stack = options, probes, note, stack
        self._driver_calls: DriverCalls | None = None
        self._gpus: Gpus | None = None
        self._kernels: KernelRecords | None = None
        self._delivery: Delivery | None = None
        self._followed: set[int] = set()
        self._next_ns = self._next_records_ns = 0
        self._has_new_records = False

    @classmethod
    def open(cls, options: Options, *, note: Callable[[str], None]) -> "Capture":
        """Load the probes; nothing is attached yet. note: prints a line for the user.

        Raises CannotTrace, NotFound (no such process).
        """
        preflight.check()
        preflight.check_pids(options.pids)
        kernel_side = program.Options(
            record_all=options.raw_file is not None,
            pids=frozenset(options.pids) if options.pids else None,
            own_pid=os.getpid(),
            ioctl_ways=tuple(IOCTL_WAYS) if options.gpu_ioctls else (),
        )
        with ExitStack() as stack:
            probes = stack.enter_context(Program.load(kernel_side))
            return cls(options, probes, note, stack.pop_all())

    def drop_privileges(self, *, written: Iterable[Path], listens: Iterable[str]) -> None:
        """Give up all privileges that the capture no longer needs, before the first thread starts.

        written: paths that the process writes later. listens: addresses that it will listen on.
        """
        socket = self._options.annotate_socket
        needed = privileges.needed_capabilities(
            privileges.held_capabilities(),
            self._probes.mode,
            written_paths=[*written, *([socket.parent] if socket else [])],
            ports=map(privileges.port, listens),
            chowns=bool(self._options.annotate_group),
        )
        privileges.drop_all_but(needed)

    def facts(self) -> dict[str, str]:
        """The machine and the state of the probes, as free text by name."""
        machine_facts = facts(self._probes.mode, unsupported=self._probes.missing)
        if self._options.gpu_ioctls:
            machine_facts["gpu_ioctls"] = self._probes.ioctl_way or "not on this kernel"
        return machine_facts | _cloud_facts(self._options.cloud)

    def start(self, sink: Sink, *, node: int, wake_fd: int) -> None:
        """Start the threads. node: the number of this machine in the rows. wake_fd: readable at a signal.

        Raises NotFound for an unknown group of annotate_group, BadInput if the port for spans is taken.
        """
        probes, options = self._probes, self._options
        self._explain_probes()
        self._driver_calls = self._open_driver_calls()
        labels = _labels(options, self._note)
        if labels:
            self._stack.enter_context(closing(labels))
        self._gpus = watch_gpus(node, self._note)
        if self._gpus:
            self._stack.enter_context(closing(self._gpus))
        self._mmap_events = mmap_watch.open_watch(wake_fd)
        self._discovery = Discovery(
            pids=frozenset(options.pids), ignored=frozenset({os.getpid()}), mapped=self._mmap_events
        )
        self._governor = Governor(probes, options.probe_budget)
        self._attacher = Attacher(
            self._discovery, probes.attach, governor=self._governor, essential_only=probes.mode == "perf"
        )
        self._owners = self._stack.enter_context(closing(opened_owners(options.owners, self._note)))
        self._kernels = KernelRecords(node, PluginWindows(options.gpu_times))
        self._stack.enter_context(closing(self._kernels))
        self._delivery = Delivery(
            probes,
            sink,
            node=node,
            governor=self._governor,
            gpu_processes=self._discovery.gpu_processes,
            note=self._note,
            has_stacks=options.stacks,
            labels=labels,
            gpus=self._gpus,
            driver_calls=self._driver_calls,
            running=self._discovery.in_scope,
            chosen=options.pids,
            raw_file=options.raw_file,
            owners=self._owners,
            idle_gpus=idle_gpus(options.owners, self._owners, node),
            kernels=self._kernels,
            metrics_every_s=options.engine_metrics_s,
            engine_spans=self._engine_spans(),
        )
        self._delivery.collector.start()
        self._governor.start()
        if self._delivery.samples:
            self._delivery.samples.start()

    def _engine_spans(self) -> EngineSpans | None:
        port = self._options.engine_spans_port
        return self._stack.enter_context(closing(EngineSpans(port))) if port else None

    def poll(self) -> bool:
        """Attach to new processes, and deliver the rows that are due. True after a full delivery, once a second."""
        delivery, now_ns = self._active_delivery(), time.monotonic_ns()
        for note in self._attacher.attach_new(now_ns) + self._governor.notes():
            self._note(note)
        if self._options.pids and (new_pids := self._discovery.in_scope() - self._followed):
            self._probes.follow(new_pids)
            self._followed |= new_pids
        if now_ns >= self._next_ns:
            self._next_ns, self._next_records_ns = now_ns + _SECOND_NS, now_ns + _OFTEN_NS
            delivery.deliver_second()
            self._attacher.drop_unused(now_ns)
            return True
        self._has_new_records = self._options.delivers_often and now_ns >= self._next_records_ns
        if self._has_new_records:
            self._next_records_ns = now_ns + _OFTEN_NS
            delivery.deliver_records()
        return False

    def has_new_records(self) -> bool:
        """Whether the last poll() delivered records only."""
        return self._has_new_records

    def wait(self, stop: threading.Event, *, until_ns: int | None = None) -> None:
        """Sleep until a process loads a library, a signal arrives, or rows are due; 40 ms on kernels without such
        notifications.
        """
        due_ns = min(self._next_ns, self._next_records_ns) if self._options.delivers_often else self._next_ns
        due_ns = due_ns if until_ns is None else min(due_ns, until_ns)
        if self._mmap_events:
            self._mmap_events.wait((due_ns - time.monotonic_ns()) / _SECOND_NS)
        else:
            stop.wait(_POLL_EVERY_S)

    def detach(self) -> None:
        """Remove the probes; finish() and close() follow."""
        delivery = self._active_delivery()
        self._governor.stop()
        if delivery.samples:
            delivery.samples.close()
        if self._mmap_events:
            self._mmap_events.close()
        self._probes.detach()
        delivery.collector.stop()

    def finish(self) -> None:
        """Deliver the remaining rows."""
        self._active_delivery().deliver_second(is_last=True)

    def close(self) -> None:
        """Unload the probes and end the threads."""
        self._stack.close()

    def status(self) -> str:
        """Counts of captured records."""
        return status_line(self._active_delivery().counts)

    @property
    def n_processes(self) -> int:
        """Traced processes at present."""
        return self._active_delivery().counts.n_processes

    def record_gpu_times(self) -> None:
        """Let NCCL's profiler plugin record soon, because the diagnosis is undecided. Safe from any thread."""
        if self._kernels is not None:
            self._kernels.request()

    def latest_gpus(self) -> Array | None:
        """The current rows of GPUS; None without GPU sampling."""
        return self._gpus.latest() if self._gpus else None

    def _active_delivery(self) -> Delivery:
        assert self._delivery is not None, "start() first"
        return self._delivery

    def _explain_probes(self) -> None:
        if self._probes.missing:
            self._note(f"this kernel does not provide: {', '.join(self._probes.missing)}")
        if self._probes.mode == "perf":
            self._note(_PERF_NOTE)

    def _open_driver_calls(self) -> DriverCalls | None:
        if not self._probes.ioctl_way:
            return None
        calls = DriverCalls(self._probes.know_drivers, self._probes.caller, self._options.gpu_majors)
        if remark := calls.refresh():
            self._note(remark)
        if self._probes.ioctl_way == "tracepoint":
            self._note(
                "calls into the GPU driver are counted by a tracepoint that slows every system call slightly"
            )
        return calls


def _labels(options: Options, note: Callable[[str], None]) -> Labels | None:
    """The socket for jobs' labels; the capture continues without it. Raises NotFound for an unknown group."""
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
        note(f"labels are not accepted: {error}")
        return None


def _cloud_facts(cloud: str) -> dict[str, str]:
    """The cloud's description of this machine; requested only if the user asked for it."""
    if not cloud:
        return {}
    from stallscope.capture.process.cloud import (
        machine_metadata,  # the standard library's HTTP uses megabytes
    )

    return machine_metadata(cloud)
