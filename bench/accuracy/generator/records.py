"""Rows as the agents of the nodes write them: on each node's clock, with what each agent saw and lost.

An agent that attaches late knows a communicator by its address only: no hash, no rank in it, and seq counts from then
on; ledgers and counts start at the first call it sees.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from generator.builder import Builder
from generator.faults import Fault
from generator.machine import SLOW_NS, Machine
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import DATATYPE_BYTES, Category, CollectiveFlag, HostKind, OffCpuFlag, Op
from stallscope.events.trace import Clock, Trace

EPOCH_NS = 1_785_000_000_000_000_000
_SYSCALL = {
    Category.LOCK: 202, Category.SLEEP: 230, Category.NET: 7, Category.CHILD: 202, Category.IO: 17,
    Category.DRIVER: 16, Category.OTHER_OFF: 61, Category.FAULT: -1, Category.PREEMPTED: -1, Category.STOPPED: -1,
}  # fmt: skip
SYMBOLS = ("", "cudaStreamSynchronize", "cudaLaunchKernel", "cudaFree", "cudaMemcpyAsync")
_SYMBOL_OF = {Op.SYNC: 1, Op.LAUNCH: 2, Op.ALLOC: 3, Op.COPY: 4}
_GPU_MHZ = 1980
_AUTOGRAD_TID = 45


@dataclass(frozen=True)
class Clocks:
    """Each node's monotonic clock (offset at true time 0, drift) and the error of its wall clock."""

    offset_ns: Array
    drift: Array
    wall_error_ns: Array

    def read(self, node: Array, true_ns: Array) -> Array:
        read: Array = self.offset_ns[node] + true_ns + np.floor(true_ns * self.drift[node]).astype(np.int64)
        return read

    def length(self, node: Array, ns: Array) -> Array:
        measured: Array = ns + np.floor(ns * self.drift[node]).astype(np.int64)
        return measured


def clocks(n_nodes: int, rng: np.random.Generator) -> Clocks:
    """Boot times days apart, drifts of some ppm, wall clocks kept by NTP to about half a millisecond."""
    return Clocks(
        rng.integers(10**12, 3 * 10**15, n_nodes),
        rng.normal(0, 6e-6, n_nodes),
        rng.normal(0, 400_000, n_nodes).astype(np.int64),
    )


@dataclass(frozen=True)
class View:
    """The interval in which each node's agent records, in true time. has_gpu_times: a profiler recorded the kernels."""

    begins_ns: Array
    ends_ns: Array
    has_gpu_times: bool


def trace(
    b: Builder, machine: Machine, fault: Fault | None, view: View, rng: np.random.Generator, *, end_ns: int
) -> Trace:
    """The trace of a job that the machine has executed."""
    node = np.array(b.node_of)
    n_nodes = int(node.max()) + 1
    times = clocks(n_nodes, rng)
    pid = _pids(b, rng)
    writer = _Writer(b, machine, view, times, node, pid)
    collectives = writer.collectives(rng)
    ends_ns = np.minimum(view.ends_ns, end_ns)
    nodes = np.arange(n_nodes)
    return Trace(
        collectives=collectives,
        calls=writer.calls(),
        offcpu=writer.off_cpu(),
        snapshots=writer.snapshots(),
        communicators=writer.communicators(),
        processes=writer.processes(),
        annotations=writer.annotations(),
        host_events=writer.host_events(),
        gpus=writer.gpus(fault, end_ns),
        nodes=tuple(f"gpu-{k:02d}" for k in nodes),
        symbols=SYMBOLS,
        clocks=_readings(times, view.begins_ns, ends_ns),
        ends_ns=tuple(times.read(nodes, ends_ns).tolist()),
        source="a generated job",
    )


def _pids(b: Builder, rng: np.random.Generator) -> Array:
    first = rng.integers(2_000, 60_000, len(b.node_of))
    pid = np.zeros(len(b.node_of), np.int64)
    for generation, members in enumerate(b.generations):
        for i in members:
            pid[i] = int(first[b.node_of[i]]) + 700 * generation + 67 * b.local_of[i]
    return pid


def _readings(times: Clocks, begins_ns: Array, ends_ns: Array) -> tuple[Clock, ...]:
    """Each agent compares its clocks at the start, every 10 s, and at the end."""
    made = []
    for k in range(len(times.offset_ns)):
        at = np.append(np.arange(begins_ns[k], ends_ns[k], 10_000_000_000), ends_ns[k])
        monotonic = times.read(np.full(len(at), k), at)
        wall = EPOCH_NS + at + times.wall_error_ns[k]
        made += [Clock(k, int(a), int(w), 250) for a, w in zip(monotonic, wall, strict=True)]
    return tuple(made)


class _Writer:
    """Turns the log of a machine into tables."""

    def __init__(
        self, b: Builder, machine: Machine, view: View, times: Clocks, node: Array, pid: Array
    ) -> None:
        self.b, self.log, self.view, self.times, self.node, self.pid = b, machine.log, view, times, node, pid
        self.hosts, self.groups = machine.hosts, machine.groups
        self.start_ns = np.array([host.start_ns for host in machine.hosts])
        self.local = np.array(b.local_of)
        self.is_late = view.begins_ns[node] > self.start_ns
        self.seen_ns = np.where(self.is_late, view.begins_ns[node], self.start_ns)
        self.base = np.zeros((len(node), 16), np.int64)
        self.base_calls = np.zeros((len(node), 4), np.int64)

    def _kept(self, i: Array, at_ns: Array) -> Array:
        kept: Array = (at_ns >= self.seen_ns[i]) & (at_ns <= self.view.ends_ns[self.node[i]])
        return kept

    def _rows(self, table: layout.Table, i: Array, at_ns: Array) -> Array:
        rows = layout.empty(table, len(i))
        rows["node"], rows["pid"] = self.node[i], self.pid[i]
        rows["ts_ns"] = self.times.read(self.node[i], at_ns)
        return rows

    def collectives(self, rng: np.random.Generator) -> Array:
        raw = np.array(self.log.arrivals, dtype=np.int64).reshape(-1, 32)
        works = self.log.works
        order = np.argsort(raw[:, 1], kind="stable")
        raw = raw[order]
        begin = np.array([work.begin_ns for work in works])[order]
        end = np.array([-1 if work.end_ns is None else work.end_ns for work in works])[order]
        keep = self._kept(raw[:, 0], raw[:, 1])
        raw, begin, end = raw[keep], begin[keep], end[keep]
        i, at_ns, group = raw[:, 0], raw[:, 1], raw[:, 2]
        self._rebase(raw)
        rows = self._rows(layout.COLLECTIVES, i, at_ns)
        rows["tid"] = self.pid[i] + np.where(raw[:, 8] == 1, _AUTOGRAD_TID, 0)
        rows["op"], rows["datatype"], rows["count"] = raw[:, 5], raw[:, 7], raw[:, 6]
        rows["count_bytes"] = raw[:, 6] * np.array(DATATYPE_BYTES)[raw[:, 7]]
        rows["reduce_op"] = np.isin(raw[:, 5], (Op.ALL_REDUCE, Op.REDUCE_SCATTER))
        rows["device"], rows["stream"] = self.local[i], 0x55AA00 + 64 * group
        rows["comm_handle"] = (self.pid[i] << 20) + 4096 * (group + 1)
        rows["peer_rank"] = raw[:, 9]
        late = self.is_late[i]
        hashes = np.array([made.comm_hash for made in self.groups])
        sizes = np.array([len(made.members) for made in self.groups])
        rows["comm_hash"] = np.where(late, 0, hashes[group])
        rows["comm_rank"] = np.where(late, UNKNOWN, raw[:, 3])
        rows["nranks"] = np.where(late, UNKNOWN, sizes[group])
        rows["seq"] = raw[:, 4] - self._base_seq(raw)
        rows["flags"] = late * CollectiveFlag.LATE_ATTACH
        for name, column in (("wait_enter_ns", 10), ("wait_leave_ns", 11)):
            known = raw[:, column] >= self.seen_ns[i]
            rows[name] = np.where(known, self.times.read(self.node[i], raw[:, column]), UNKNOWN)
        for k, name in enumerate(("n_syncs", "n_allocs", "n_copies", "n_launches")):
            rows[name] = raw[:, 12 + k] - self.base_calls[i, k]
        rows["ledger_ns"] = self._ledger(i, raw[:, 16:32], rows["ts_ns"])
        if self.view.has_gpu_times:
            self._gpu_times(rows, i, begin, end, rng)
        return rows

    def _gpu_times(self, rows: Array, i: Array, begin: Array, end: Array, rng: np.random.Generator) -> None:
        """On the clock of each GPU."""
        offset = rng.normal(0, 200_000, len(self.node)).astype(np.int64)
        drift = rng.normal(0, 6e-6, len(self.node))
        for name, at in (("gpu_start_ns", begin), ("gpu_end_ns", end)):
            read = EPOCH_NS + at + offset[i] + np.floor(at * drift[i]).astype(np.int64)
            rows[name] = np.where(end >= 0, read, UNKNOWN)

    def _rebase(self, raw: Array) -> None:
        """Ledgers and counts of a process that was seen late begin at its first row."""
        for i in np.flatnonzero(self.is_late).tolist():
            own = np.flatnonzero(raw[:, 0] == i)
            if len(own):
                self.base[i], self.base_calls[i] = raw[own[0], 16:32], raw[own[0], 12:16]
                self.seen_ns[i] = raw[own[0], 1]

    def _base_seq(self, raw: Array) -> Array:
        base = np.zeros(len(raw), np.int64)
        if not self.is_late.any():
            return base
        key = raw[:, [0, 2, 5, 9]].copy()
        key[~np.isin(key[:, 2], (Op.SEND, Op.RECV)), 2:] = 0
        _, first, index = np.unique(key, axis=0, return_index=True, return_inverse=True)
        late: Array = np.where(self.is_late[raw[:, 0]], raw[first[index.reshape(-1)], 4], 0)
        return late

    def _ledger(self, i: Array, ledger: Array, ts_ns: Array) -> Array:
        """On the node's clock; time on the CPU is the rest, so that the sums fill the time exactly."""
        node = self.node[i]
        measured = self.times.length(node[:, None], np.maximum(ledger - self.base[i], 0))
        cpu = Category.ON_CPU - 1
        measured[:, cpu] = 0
        measured[:, cpu] = ts_ns - self.times.read(node, self.seen_ns[i]) - measured.sum(axis=1)
        return measured

    def calls(self) -> Array:
        raw = np.array(self.log.calls, dtype=np.int64).reshape(-1, 4)
        raw = raw[self._kept(raw[:, 0], raw[:, 1]) & self._kept(raw[:, 0], raw[:, 2])]
        rows = self._rows(layout.CALLS, raw[:, 0], raw[:, 1])
        rows["duration_ns"], rows["tid"], rows["op"] = raw[:, 2] - raw[:, 1], rows["pid"], raw[:, 3]
        rows["symbol"] = [_SYMBOL_OF[Op(op)] for op in raw[:, 3].tolist()]
        rows["result"], rows["device"] = 0, self.local[raw[:, 0]]
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def off_cpu(self) -> Array:
        raw = np.array([(*made, 0) for made in self.log.off_cpu] + self._handed_over(), np.int64).reshape(
            -1, 5
        )
        raw = raw[self._kept(raw[:, 0], raw[:, 1]) & self._kept(raw[:, 0], raw[:, 2])]
        rows = self._rows(layout.OFFCPU, raw[:, 0], raw[:, 1])
        category = raw[:, 3]
        rows["duration_ns"], rows["category"] = raw[:, 2] - raw[:, 1], category
        rows["tid"] = rows["pid"] + _AUTOGRAD_TID * raw[:, 4].astype(np.uint32)
        rows["syscall_nr"] = [_SYSCALL.get(Category(c), UNKNOWN) for c in category.tolist()]
        preempted = category == Category.PREEMPTED
        rows["flags"] = (
            np.where(preempted, OffCpuFlag.PREEMPTED, 0)
            | np.where(category == Category.IO, OffCpuFlag.IOWAIT, 0)
            | np.where(category == Category.CHILD, OffCpuFlag.WOKEN_BY_CHILD, 0)
            | np.where(category == Category.LOCK, OffCpuFlag.WOKEN_BY_SELF, 0)
        )
        rows["runnable_ns"] = np.where(preempted, rows["duration_ns"], 8_000)
        rows["by_pid"] = np.where(preempted, 991, UNKNOWN)
        rows["by_comm"] = np.where(preempted, b"stress-ng", b"")
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def _handed_over(self) -> list[tuple[int, int, int, int, int]]:
        """Main and autograd thread take turns: the other thread is blocked in a futex.

        The ledger is the process's, so these intervals have no part in it.
        """
        raw = np.array(self.log.arrivals, dtype=np.int64).reshape(-1, 32)[:, [0, 1, 8]]
        raw = raw[np.lexsort((raw[:, 1], raw[:, 0]))]
        step = np.concatenate(
            [
                np.searchsorted(host.step_begins_ns, raw[raw[:, 0] == i, 1], side="right")
                for i, host in enumerate(self.hosts)
            ]
        )
        edge = np.flatnonzero(np.diff((raw[:, 0] << 32) + 2 * step + raw[:, 2], prepend=-1, append=-1))
        runs = [(*raw[a].tolist(), int(raw[b - 1, 1])) for a, b in pairwise(edge.tolist())]
        made = []
        for (i, begin_ns, is_backward, end_ns), after in zip(runs, [*runs[1:], None], strict=True):
            if is_backward and end_ns - begin_ns >= SLOW_NS:
                made.append((i, begin_ns, end_ns, int(Category.LOCK), 0))
            if is_backward and after and after[0] == i and after[1] - end_ns >= SLOW_NS:
                made.append((i, end_ns, after[1], int(Category.LOCK), 1))
        return made

    def snapshots(self) -> Array:
        raw = list(self.log.snapshots)
        if not raw:
            return layout.empty(layout.SNAPSHOTS)
        i, at_ns = np.array([made[0] for made in raw]), np.array([made[1] for made in raw])
        keep = np.flatnonzero(self._kept(i, at_ns))
        i, at_ns, raw = i[keep], at_ns[keep], [raw[k] for k in keep.tolist()]
        rows = self._rows(layout.SNAPSHOTS, i, at_ns)
        rows["alive"], rows["category"] = [made[2] for made in raw], [made[3] for made in raw]
        rows["in_call"] = [made[4] for made in raw]
        since = np.array([made[5] for made in raw], np.int64)
        rows["in_call_since_ns"] = np.where(since >= 0, self.times.read(self.node[i], since), UNKNOWN)
        rows["n_collectives"], rows["n_completed"] = [made[6] for made in raw], [made[7] for made in raw]
        rows["syscall_nr"] = [_SYSCALL.get(made[3], UNKNOWN) if not made[4] else UNKNOWN for made in raw]
        ledger = np.array([made[8] for made in raw], np.int64).reshape(-1, 16)
        rows["ledger_ns"] = self._ledger(i, ledger, rows["ts_ns"])
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def processes(self) -> Array:
        i = np.arange(len(self.node))
        rows = self._rows(layout.PROCESSES, i, self.seen_ns)
        rows["rank"], rows["local_rank"], rows["device"] = self.b.rank_of, self.local, self.local
        rows["comm"] = b"python3"
        for members in self.b.generations:
            rows["nranks"][members] = len(members)
        ended = [host.done or host.is_dead for host in self.hosts]
        last = np.array([host.now_ns for host in self.hosts])
        is_seen = np.array(ended) & (last <= self.view.ends_ns[self.node])
        rows["ended_ns"] = np.where(is_seen, self.times.read(self.node, last), UNKNOWN)
        return rows

    def communicators(self) -> Array:
        made = [(i, k, own) for k, group in enumerate(self.groups) for own, i in enumerate(group.members)]
        made = [row for row in made if not self.is_late[row[0]]]
        i = np.array([row[0] for row in made], np.int64)
        rows = self._rows(layout.COMMUNICATORS, i, self.start_ns[i] if len(i) else i)
        rows["comm_hash"] = [self.groups[k].comm_hash for _, k, _ in made]
        rows["comm_rank"] = [own for _, _, own in made]
        rows["nranks"] = [len(self.groups[k].members) for _, k, _ in made]
        return rows

    def annotations(self) -> Array:
        raw = np.array(self.log.marks, dtype=np.int64).reshape(-1, 3)
        raw = raw[self._kept(raw[:, 0], raw[:, 1])]
        rows = self._rows(layout.ANNOTATIONS, raw[:, 0], raw[:, 1])
        rows["label"], rows["value"] = b"step", [str(k).encode() for k in raw[:, 2].tolist()]
        return rows

    def host_events(self) -> Array:
        """Ends of processes, as the kernel reports them."""
        made = [
            (i, host.now_ns, 137 if host.is_dead else 0)
            for i, host in enumerate(self.hosts)
            if host.done or host.is_dead
        ]
        raw = np.array(made, dtype=np.int64).reshape(-1, 3)
        raw = raw[self._kept(raw[:, 0], raw[:, 1])]
        rows = self._rows(layout.HOST_EVENTS, raw[:, 0], raw[:, 1])
        rows["kind"], rows["value"], rows["comm"], rows["duration_ns"] = (
            HostKind.EXIT,
            raw[:, 2],
            b"python3",
            0,
        )
        return rows

    def gpus(self, fault: Fault | None, end_ns: int) -> Array:
        """The driver's readings of each GPU once a second: clocks, held down if a GPU is slow."""
        slow = fault.slow_gpus if fault else ()
        parts = []
        for i in range(len(self.node)):
            begin_ns = int(max(self.seen_ns[i], 0))
            at_ns = np.arange(begin_ns, int(min(end_ns, self.view.ends_ns[self.node[i]])), 1_000_000_000)
            rows = layout.empty(layout.GPUS, len(at_ns))
            rows["ts_ns"], rows["node"], rows["gpu"] = (
                self.times.read(np.full(len(at_ns), self.node[i]), at_ns),
                self.node[i],
                self.local[i],
            )
            rows["name"], rows["utilization_percent"] = b"NVIDIA H100 80GB HBM3", 97
            rows["uuid"] = f"GPU-{self.node[i]:04d}-{self.local[i]:02d}".encode()
            rows["sm_max_mhz"], rows["clock_reasons"] = _GPU_MHZ, 0
            rows["sm_mhz"] = _GPU_MHZ - 15 * np.random.default_rng(i).integers(0, 3, len(at_ns))
            if i in slow and fault:
                held = self._is_slow(i, at_ns, fault.slow_steps)
                rows["sm_mhz"] = np.where(held, int(_GPU_MHZ / fault.slow_factor), rows["sm_mhz"])
                rows["clock_reasons"] = np.where(held, 0x40, 0)
            parts.append(rows)
        rows = np.concatenate(parts)
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def _is_slow(self, i: int, at_ns: Array, steps: tuple[int, ...]) -> Array:
        begins = np.array(self.hosts[i].step_begins_ns)
        number = np.searchsorted(begins, at_ns, side="right") - 1
        slow: Array = np.isin(number, steps)
        return slow
