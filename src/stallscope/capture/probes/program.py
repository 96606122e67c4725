"""The loaded kernel side: attaches to libraries, reads records, and counts lost records and costs.

    with Program.load(Options()) as program:
        link = program.attach(path, operations.hooks(offsets))   # offsets: file offset by function name
        arrivals = program.arrivals.drain()                      # kernel.ARRIVAL
        events = program.events.drain()                          # kernel.EVENT, several kinds in one ring
        processes = program.processes()                          # kernel.PROCESS by pid, as they are now
        losses = program.losses()

Drain a ring when its `fd` becomes readable (epoll, edge-triggered), which happens when a quarter of it is in use, or
sooner: the rings hold 16,384 arrivals and 32,768 events. close() detaches everything, and so does the kernel when the
process dies. The attach method is found by trying: a session link (Linux 6.13), two multi links (6.6), perf-event links
(5.15; slow to detach: 0.1 s each).
"""

import ctypes
import os
import platform
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from stallscope.capture.probes import btf, maps, operations, preflight
from stallscope.capture.probes.libbpf import (
    UPROBE_MULTI,
    UPROBE_SESSION,
    KernelRefused,
    Library,
    MultiLink,
    Object,
    statistics_fd,
)
from stallscope.capture.probes.maps import Entries, Reader
from stallscope.capture.probes.operations import Hook
from stallscope.capture.probes.optional_programs import (
    FEATURES,
    IOCTL_WAYS,
    ON_REQUEST,
    SERVING,
    Feature,
    OptionalPrograms,
    driver_calls,
)
from stallscope.capture.probes.ring import Ring
from stallscope.errors import CannotTrace
from stallscope.events import kernel
from stallscope.events.kernel import HookGroup
from stallscope.events.layout import Array

OBJECT = Path(__file__).parent.parent / f"stallscope.{platform.machine()}.bpf.o"
RING_BYTES = 4 << 20
STACKS_BYTES = 1 << 20
REQUESTS_BYTES = 1 << 20
MODES = ("session", "multi", "perf")
N_OPERATIONS_WITH_IOCTLS = 16_384
"""Functions and ioctls of all processes: a job that uses CUDA makes some 40 kinds of ioctl."""

_TRACEPOINTS = ("on_waking", "on_wakeup", "on_tick", "on_exit", "on_exec")
_PARTS = ("nccl", "cuda", "counted", "graph", "gauge")
_SWITCHES = ("on_switch", "on_switch_5_15")
_COMM_BYTES = 16  # TASK_COMM_LEN, linux/sched.h
_PROCESSES_AT_ONCE = 32
"""Read by one system call, so with a single time stamp: it takes about 10 us."""
_N_READS = 4


class Options(NamedTuple):
    """Options of the kernel side, set at the load.

    record_all: also emit every call and switch (kinds from kernel.FIRST_RAW on), for checks of the ledger.
    slow_io_ns: requests to disks from this length on become events.
    slow_call_ns, slow_off_ns: calls and intervals off the CPU from this length on become events.
    pids: trace only these processes; None: all processes that make a traced call. own_pid: is left out.
    modes: the attach methods to try, best first.
    ioctl_ways: of optional_programs.IOCTL_WAYS, to trace calls into the GPU driver; empty: such calls are not traced.
    features: to load if the kernel supports them.
    """

    record_all: bool = False
    slow_call_ns: int = 1_000_000
    slow_off_ns: int = 1_000_000
    slow_io_ns: int = 10_000_000
    pids: frozenset[int] | None = None
    own_pid: int = os.getpid()
    ring_bytes: int = RING_BYTES
    modes: tuple[str, ...] = MODES
    ioctl_ways: tuple[str, ...] = ()
    features: tuple[Feature, ...] = FEATURES


class Cost(NamedTuple):
    """Cost of a program so far; n_runs and run_ns count only while statistics are on (see Program.measure)."""

    n_verified: int
    n_runs: int
    run_ns: int


class State(NamedTuple):
    """The traced processes at one moment: pids int64 (n,), rows kernel.PROCESS (n,), now_ns int64 (n,)."""

    pids: Array
    rows: Array
    now_ns: Array


@dataclass(eq=False)
class Link:
    """Probes in one file."""

    _object: Object
    _multi: list[MultiLink] = field(default_factory=list)
    _single: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Detach: 30 ms, or 0.1 s per probe where the kernel has no multi links."""
        while self._multi:
            self._multi.pop().close()
        while self._single:
            self._object.detach(self._single.pop())


class Program:
    """The loaded programs, attached to the scheduler; attach() adds probes on functions.

    mode: "session", "multi" or "perf". missing: events that this kernel cannot report, in words. ioctl_way: the way to
    trace calls into the GPU driver, of optional_programs.IOCTL_WAYS; empty: they are not traced.
    """

    def __init__(self, library: Library, loaded: Object, mode: str, options: Options):
        """Not to be called: see load()."""
        self.mode = mode
        self.missing: tuple[str, ...] = ()
        self.ioctl_way = ""
        self._library, self._object = library, loaded
        self._tracepoints: list[int] = []
        self._links: list[Link] = []
        self._statistics = -1
        self._is_open = True
        self._readers: dict[str, Reader] = {}
        self._tuning = np.zeros(2, np.uint32)
        self.arrivals = Ring(loaded.map_fd("arrivals"), kernel.ARRIVAL, options.ring_bytes)
        self.events = Ring(loaded.map_fd("events"), kernel.EVENT, options.ring_bytes)
        self.stacks = Ring(loaded.map_fd("stacks"), kernel.STACK, STACKS_BYTES)
        self.natives = Ring(loaded.map_fd("natives"), kernel.NATIVE, STACKS_BYTES)
        self.requests = Ring(loaded.map_fd("served_requests"), kernel.REQUEST, REQUESTS_BYTES)
        self.tokens = Ring(loaded.map_fd("served_tokens"), kernel.TOKEN, REQUESTS_BYTES)
        self._serving: list[int] = []

    @classmethod
    def load(cls, options: Options = Options(), path: Path = OBJECT) -> Self:
        """Load the object and attach to the scheduler, by the best method that this kernel supports.

        Raises CannotTrace if the object is missing or has an unexpected version, or if the kernel refuses.
        """
        types = _load_types(path)
        library = Library()
        attempts = [(mode, switch) for switch in _SWITCHES for mode in options.modes]
        refusals = []
        ioctls = (driver_calls(options.ioctl_ways),) if options.ioctl_ways else ()
        optional = OptionalPrograms((*options.features, *ioctls))
        for mode, switch in attempts:
            bpf_object = None
            while bpf_object is None:
                try:
                    bpf_object = _load_object(
                        library, path, types, options, mode, switch, optional.programs()
                    )
                except KernelRefused as refusal:
                    refusals.append(refusal)
                    if not optional.give_up([*library.failed_programs(), refusal.program]):
                        break
            if bpf_object is None:
                continue
            program = cls(library, bpf_object, mode, options)
            program._start(switch, optional, options.pids)
            ioctl_programs = [optional.programs_of(feature) for feature in ioctls]
            program.ioctl_way = next(
                (method for method, names in IOCTL_WAYS.items() if names in ioctl_programs), ""
            )
            return program
        preflight.check_age(platform.release())
        raise refusals[-1]

    def attach(self, path: str, hooks: Sequence[Hook], *, pid: int = 0) -> Link:
        """Attach probes to functions of a file, in all processes that map it now or later, or in one process.

        path: a path that opens the file now, such as /proc/PID/map_files/...; the link holds the file itself. If a file
        is attached twice, under any names, its calls are reported once but cost twice. Raises KernelRefused.
        """
        link = Link(self._object)
        try:
            for part in _PARTS:
                part_hooks = [hook for hook in hooks if hook.part == part]
                if part_hooks:
                    self._attach_hooks(link, part, path, part_hooks, pid)
        except KernelRefused:
            link.close()
            raise
        self._links.append(link)
        return link

    def release(self, link: Link) -> None:
        """Detach from one file."""
        link.close()
        with suppress(ValueError):
            self._links.remove(link)

    def follow(self, pids: Iterable[int]) -> None:
        """Also trace these processes, where Options.pids was given."""
        for pid in pids:
            self._update_map("targets", pid, np.ones(1, np.uint8))

    @property
    def records_requests(self) -> bool:
        """Whether this kernel supports record_requests()."""
        return all(name in self._object.programs and self._object.program_fd(name) >= 0 for name in SERVING)

    def record_requests(self, pids: Iterable[int]) -> None:
        """Record the requests to these processes, which belong to inference engines. Raises KernelRefused."""
        for pid in pids:
            self._update_map("engines", pid, np.ones(1, np.uint8))
        self.switch_requests(is_on=True)

    def switch_requests(self, *, is_on: bool) -> None:
        """Attach or detach the programs that record requests. Raises KernelRefused."""
        if is_on and not self._serving:
            self._serving = [self._object.attach(name) for name in SERVING]
        while not is_on and self._serving:
            self._object.detach(self._serving.pop())

    @property
    def is_recording_requests(self) -> bool:
        """Whether the programs that record requests are attached."""
        return bool(self._serving)

    def forget_engines(self, pids: Collection[int]) -> None:
        """Record no more requests to these processes."""
        maps.delete(self._library, self._object.map_fd("engines"), np.array(list(pids), np.uint32))

    def connections(self) -> Array:
        """The connections to inference engines: kernel.CONNECTION (n,). Raises CannotTrace."""
        return self.entries("connections", np.dtype("<u8"), kernel.CONNECTION).values

    def http2_connections(self) -> Array:
        """The HTTP/2 connections to inference engines: kernel.HTTP2 (n,). Raises CannotTrace."""
        return self.entries("http2s", np.dtype("<u8"), kernel.HTTP2).values

    def streams(self) -> Entries:
        """Their open requests: kernel.STREAM by kernel.STREAM_KEY. Raises CannotTrace."""
        return self.entries("streams", kernel.STREAM_KEY, kernel.STREAM)

    def walk_python(self, pid: int, python: Array) -> None:
        """Report the Python stacks of a process with its events from now on. python: one row of kernel.PYTHON."""
        self._update_map("pythons", pid, python)

    def know_drivers(self, majors: Mapping[int, int]) -> None:
        """Devices of these major numbers are the GPU driver's. majors: drivers.Driver by number."""
        for major, driver in majors.items():
            self._update_map("driver_majors", major, np.array([driver], np.uint8))

    def caller(self, pid: int) -> str:
        """The name of a process at its first call into the driver; empty if there was no call, or if it was long
        ago.
        """
        name = ctypes.create_string_buffer(_COMM_BYTES)
        fd, key = self._object.map_fd("driver_callers"), ctypes.c_uint32(pid)
        error = self._library.bpf_map_lookup_elem(fd, ctypes.byref(key), name)
        return "" if error else name.value.decode(errors="replace")

    def know_native(self, stack: int, shape: Array | None) -> None:
        """Attach this stack to later events, by its hash, if it has this shape (kernel.NATIVE_SHAPE); None: forget
        it.
        """
        fd, key = self._object.map_fd("native_shapes"), ctypes.c_uint64(stack)
        if shape is None:
            self._library.bpf_map_delete_elem(fd, ctypes.byref(key))
        else:
            self._library.bpf_map_update_elem(fd, ctypes.byref(key), shape.ctypes.data, 0)

    @property
    def peeks(self) -> bool:
        """Whether this kernel supports peek()."""
        return "peek" in self._object.programs and self._object.program_fd("peek") >= 0

    def peek(self, tid: int, address: int, n_pieces: int) -> bytes:
        """Registers and memory of a thread as bpf/peek.bpf.c writes them; empty without the thread or without kernel

        support.
        A row of kernel.PEEK_THREAD, up to n_pieces pieces of kernel.PEEK_BYTES of memory, the row again.
        """
        if not self.peeks:
            return b""
        self._update_map("peek_requests", 0, np.array([(address, tid, n_pieces)], kernel.PEEK_REQUEST))
        try:
            return self._object.thread_output("peek", tid)
        except KernelRefused:
            return b""

    def operations(self) -> Entries:
        """Statistics of all calls so far: kernel.OPERATION by process, function, direction. Raises CannotTrace."""
        return self.entries("operations", kernel.OPERATION_KEY, kernel.OPERATION)

    def balances(self) -> Entries:
        """The memory held by each process: kernel.BALANCE by process, device, kind. Raises CannotTrace."""
        return self.entries("balances", kernel.BALANCE_KEY, kernel.BALANCE)

    def forget(self, pids: Collection[int]) -> None:
        """Remove ended processes from the kernel's maps."""
        maps_by_process = (
            ("operations", kernel.OPERATION_KEY, kernel.OPERATION),
            ("balances", kernel.BALANCE_KEY, kernel.BALANCE),
            ("allocations", kernel.LIVE_KEY, kernel.LIVE),
        )
        for name, key, value in maps_by_process:
            keys = self.entries(name, key, value).keys
            maps.delete(self._library, self._object.map_fd(name), keys[np.isin(keys["tgid"], list(pids))])
        for name in ("pinned", "pythons"):
            maps.delete(self._library, self._object.map_fd(name), np.array(list(pids), np.uint32))

    def raise_thresholds(self, n_times: int) -> None:
        """From now on calls are slow from slow_call_ns * 2^n_times on."""
        self._tuning[0] = n_times
        self._update_map("tuning", 0, self._tuning)

    def close_group(self, group: HookGroup, *, is_closed: bool) -> None:
        """Whether probes of a group open no calls; to be set before the attach and before the detach."""
        bit = np.uint32(1 << group)
        self._tuning[1] = self._tuning[1] | bit if is_closed else self._tuning[1] & ~bit
        self._update_map("tuning", 0, self._tuning)

    def entries(self, map_name: str, key: np.dtype[Any], value: np.dtype[Any]) -> Entries:
        """Keys and values of a map at present; entries deleted during the reading may be missing. Raises
        CannotTrace.
        """
        return self._reader(map_name, key, value).entries()

    def _reader(
        self, map_name: str, key: np.dtype[Any], value: np.dtype[Any], n_at_once: int = 1024
    ) -> Reader:
        if map_name not in self._readers:
            fd = self._object.map_fd(map_name)
            self._readers[map_name] = Reader(self._library, fd, key, value, n_at_once)
        return self._readers[map_name]

    def losses(self) -> dict[str, int]:
        """Each Counter by its name in lower case, summed over the CPUs. Not every counter is a loss: see Counter."""
        return {
            counter.name.lower(): int(n)
            for counter, n in zip(kernel.Counter, self.counters().sum(axis=1), strict=True)
        }

    def counters(self) -> Array:
        """The counters: int64 (len(Counter), CPUs)."""
        per_cpu = np.dtype((np.int64, (self._library.libbpf_num_possible_cpus(),)))
        return self.entries("counters", np.dtype("<u4"), per_cpu).values

    def processes(self) -> State:
        """Every traced process at present; processes that end during the reading may be missing.

        A process that changes during the reading is read again a few times, then corrected by correct_torn_rows().
        """
        entries, calls = self._process_reader().timed_entries()
        now_ns = np.repeat(*np.array(calls, np.int64).T[::-1])
        state = State(entries.keys.astype(np.int64), entries.values, now_ns)
        for i in np.flatnonzero(state.rows["begun"] != state.rows["ended"]).tolist():
            self._read_again(state, i)
        return state._replace(rows=correct_torn_rows(state.rows, state.now_ns))

    def process_rows(self) -> Entries:
        """Every traced process, without its time on one clock: kernel.PROCESS (n,) by process. Raises CannotTrace."""
        return self._process_reader().entries()

    def uses_nccl(self) -> bool:
        """Whether any traced process has called NCCL. Raises CannotTrace."""
        return bool(self._process_reader().total(lambda rows: rows["uses_nccl"]))

    def entry_costs_ns(self) -> Array:
        """SLOT.way_ns summed over all present threads: (N_GROUPS,), by group of probes. Raises CannotTrace."""
        return self._process_reader().total(lambda rows: rows["slots"]["way_ns"].sum(axis=1, dtype=np.int64))

    def _process_reader(self) -> Reader:
        return self._reader("processes", np.dtype("<u4"), kernel.PROCESS, _PROCESSES_AT_ONCE)

    def _read_again(self, state: State, i: int) -> None:
        """Read the i-th process again, in place, until it is consistent; the row of an ended process stays
        unchanged.
        """
        fd, key = self._object.map_fd("processes"), ctypes.c_uint32(int(state.pids[i]))
        row = np.zeros(1, kernel.PROCESS)
        for _ in range(_N_READS):
            now_ns = time.monotonic_ns()
            if self._library.bpf_map_lookup_elem(fd, ctypes.byref(key), row.ctypes.data):
                return
            state.rows[i], state.now_ns[i] = row[0], now_ns
            if row["begun"][0] == row["ended"][0]:
                return

    def measure(self) -> None:
        """Count runs and time of the programs from now on (about 20 ns per run)."""
        if self._statistics < 0:
            self._statistics = statistics_fd(self._library)

    def costs(self) -> dict[str, Cost]:
        """The cost of each loaded program."""
        costs = {}
        for name in self._object.programs:
            fd = self._object.program_fd(name)
            if fd >= 0:
                text = Path(f"/proc/self/fdinfo/{fd}").read_text()
                fields = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
                costs[name] = Cost(
                    *(int(fields.get(key, 0)) for key in ("verified_insns", "run_cnt", "run_time_ns"))
                )
        return costs

    def detach(self) -> None:
        """Stop tracing; the records in the rings can still be drained."""
        for link in self._links:
            link.close()
        for tracepoint in (*self._tracepoints, *self._serving):
            self._object.detach(tracepoint)
        self._links, self._tracepoints, self._serving = [], [], []

    def close(self) -> None:
        """Detach everything and free it; further calls have no effect. Drain the rings first, or their records are
        lost.
        """
        if not self._is_open:
            return
        self._is_open = False
        self.detach()
        if self._statistics >= 0:
            os.close(self._statistics)
        self.arrivals.close()
        self.events.close()
        self.stacks.close()
        self.natives.close()
        self.requests.close()
        self.tokens.close()
        self._object.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, switch: str, optional: OptionalPrograms, pids: frozenset[int] | None) -> None:
        """Optional programs come first: the program at a process's end must find the process still known."""
        self.follow(pids or ())
        for name in optional.programs():
            if name in ON_REQUEST:
                continue
            try:
                self._tracepoints.append(self._object.attach(name))
            except KernelRefused:
                optional.give_up([name])
        self.missing = optional.missing()
        self._put_functions()
        try:
            for name in (switch, *_TRACEPOINTS):
                self._tracepoints.append(self._object.attach(name))
        except KernelRefused:
            self.close()
            raise

    def _put_functions(self) -> None:
        """Write the table that describes the arguments of each function."""
        for number, row in enumerate(operations.functions().reshape(-1, 1)):
            self._update_map("functions", number, row)

    def _update_map(self, map_name: str, key: int, value: Array) -> None:
        """value: one entry of the map, an array (1,) or anything with the same memory layout."""
        fd, data = self._object.map_fd(map_name), np.ascontiguousarray(value)
        self._library.bpf_map_update_elem(fd, ctypes.byref(ctypes.c_uint32(key)), data.ctypes.data, 0)

    def _attach_hooks(self, link: Link, part: str, path: str, hooks: Sequence[Hook], pid: int) -> None:
        if self.mode == "perf":
            for hook in hooks:
                for end, is_return in (("enter", False), ("return", True)):
                    link._single.append(
                        self._object.attach_uprobe(
                            f"{part}_{end}", path, hook.offset, hook.cookie, is_return=is_return
                        )
                    )
            return
        offsets, cookies = [hook.offset for hook in hooks], [hook.cookie for hook in hooks]
        for end in _probe_ends(self.mode):
            link._multi.append(
                self._object.multi_link(
                    f"{part}_{end}",
                    path,
                    offsets,
                    cookies,
                    is_session=end == "session",
                    is_return=end == "return",
                    pid=pid,
                )
            )


def states_of_slots(rows: Array) -> Array:
    """The category of each slot: uint8 (n, N_SLOTS). rows: kernel.PROCESS (n,)."""
    return rows["word"].astype("<u8").reshape(-1, 1).view(np.uint8)


def correct_torn_rows(rows: Array, now_ns: Array) -> Array:
    """Correct, in place, the rows of processes that were read in the middle of a change.

    rows: kernel.PROCESS (n,); now_ns: int64 (n,), when they were read. A half-done change leaves two accounts wrong by
    its time stamp. With now in its place they are wrong by at most the time for which the change has been waiting.
    """
    accounts = rows["ns"].view(np.int64)
    states = states_of_slots(rows).max(axis=1, initial=0)
    now = now_ns[:, None]
    so_far = accounts + np.where(np.arange(accounts.shape[1]) == states[:, None], now, 0)
    is_torn = (rows["begun"] != rows["ended"])[:, None] & (np.arange(accounts.shape[1]) > 0)
    accounts += np.where(is_torn & (so_far < 0), now, 0)
    accounts -= np.where(is_torn & (so_far > now - rows["born_ns"][:, None]), now, 0)
    return rows


def _load_types(path: Path) -> btf.Btf:
    """The types of the object, which must be the types that this version expects."""
    try:
        types = btf.Btf(path.read_bytes())
    except OSError as error:
        raise CannotTrace(f"{path}: {error.strerror}; build the BPF programs with `make bpf`") from None
    for name, dtype in kernel.STRUCTS.items():
        try:
            difference = btf.difference(dtype, types.dtype(name))
        except KeyError:
            difference = "which is missing"
        if difference:
            raise CannotTrace(
                f"{path} has another version: in struct {name}, {difference}; rebuild it with `make bpf`"
            )
    return types


def _load_object(
    library: Library,
    path: Path,
    types: btf.Btf,
    options: Options,
    mode: str,
    switch: str,
    optional: Sequence[str],
) -> Object:
    """The object, loaded for one attach method and tested by a link."""
    bpf_object = Object(library, path)
    legs = _probe_ends(mode)
    hook_programs = [f"{part}_{end}" for part in _PARTS for end in legs]
    try:
        bpf_object.choose([switch, *_TRACEPOINTS, *hook_programs, *optional])
        if mode != "perf":
            for name in hook_programs:
                bpf_object.expect(name, UPROBE_SESSION if mode == "session" else UPROBE_MULTI)
        for name, value in _constants(options).items():
            location = types.locations(".rodata")[name]
            bpf_object.set_constant(location.offset, value.to_bytes(location.n_bytes, "little"))
        for ring in ("arrivals", "events"):
            bpf_object.resize(ring, options.ring_bytes)
        if options.ioctl_ways:
            bpf_object.resize("operations", N_OPERATIONS_WITH_IOCTLS)
        bpf_object.load()
        if mode != "perf":
            _try_link(bpf_object, hook_programs[0], path, is_session=mode == "session")
        # Some kernels load programs that they cannot attach.
        for name in set(optional) & set(IOCTL_WAYS["function"]):
            bpf_object.detach(bpf_object.attach(name))
    except KernelRefused:
        bpf_object.close()
        raise
    return bpf_object


def _try_link(bpf_object: Object, program: str, path: Path, *, is_session: bool) -> None:
    """Link to an offset that no process runs: the object's own file. Raises KernelRefused where the kernel cannot."""
    bpf_object.multi_link(program, str(path), [64], [0], is_session=is_session, is_return=False).close()


def _constants(options: Options) -> dict[str, int]:
    return {
        "cfg_record_all": int(options.record_all),
        "cfg_only_targets": int(options.pids is not None),
        "cfg_self": options.own_pid,
        "cfg_slow_call_ns": options.slow_call_ns,
        "cfg_slow_off_ns": options.slow_off_ns,
        "cfg_slow_io_ns": options.slow_io_ns,
        "cfg_first_ioctl": operations.FIRST_IOCTL,
        "cfg_client_key": secrets.randbits(32),
    }


def _probe_ends(mode: str) -> tuple[str, ...]:
    return ("session",) if mode == "session" else ("enter", "return")
