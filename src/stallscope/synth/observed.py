"""Converts simulated events to the records of a capture on each node: rows on node clocks.

Lost records, and records before an agent attached, are left out here and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, CollectiveFlag, Op
from stallscope.synth.groups import Groups
from stallscope.synth.hosts import NEVER, Hosts
from stallscope.synth.simulated_clocks import GpuClocks, NodeClocks
from stallscope.synth.simulated_job import Family, Job
from stallscope.synth.simulated_machine import Arrivals
from stallscope.synth.simulated_program import Instruction, Phase

FIRST_PID = 4100
_PID_STRIDE = 64
_AUTOGRAD_TID = 40
_FIRST_STEPS_NS, _SHORT_STEP_NS = 2_300_000_000, 4_000_000  # bursts fall into the steps of a short job
_REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The quality of the capture.

    lost: share of the records lost at random; n_bursts of burst_ns each, per node, in which all are lost.
    late_nodes: agents there attach late_ns after the job's start, and count seq from then on.
    has_gpu_times: the GPU's own clock provides the start and end of a collective's kernel.
    times_launches: launches are counted and timed (off by default in the agent: it costs).
    snapshot_ns: the interval of process snapshots; watched_ns: how long a hung job is observed.
    """

    lost: float = 0.0
    n_bursts: int = 0
    burst_ns: int = 50_000_000
    late_nodes: tuple[int, ...] = ()
    late_ns: int = 3_000_000_000
    has_gpu_times: bool = False
    times_launches: bool = False
    snapshot_ns: int = 1_000_000_000
    watched_ns: int = 30_000_000_000


class Agents:
    """The agents of all nodes: they turn arrivals into rows, and count lost records."""

    def __init__(
        self,
        job: Job,
        capture: Capture,
        groups: dict[Family, Groups],
        clocks: NodeClocks,
        gpus: GpuClocks,
        start_ns: Array,
        rng: np.random.Generator,
    ) -> None:
        """start_ns: (ranks,) true time of each process's first record, with an agent present."""
        self.job, self.capture, self.groups, self.clocks, self.gpus = job, capture, groups, clocks, gpus
        self.node, self.rng = job.node_of, rng
        self.local = np.arange(job.nranks) % job.ranks_per_node
        self.pid = FIRST_PID + _PID_STRIDE * self.local
        self.is_late = np.isin(self.node, capture.late_nodes)
        self.seen_ns = np.where(self.is_late, NEVER, start_ns)
        self.n_lost = 0
        self._base_ledger = np.zeros((len(Category) - 1, job.nranks), np.int64)
        self._base_calls = np.zeros((4, job.nranks), np.int64)
        self._calls: dict[int, tuple[Instruction, Array]] = {}
        self._base_seq: dict[tuple[Family, Op, int], Array] = {}
        self._bursts = rng.random((job.n_nodes, capture.n_bursts))

    def rows(self, arrivals: Sequence[Arrivals]) -> Array:
        """The `collectives` rows of these arrivals, in the given order; each rank's rows in time order."""
        kept = [part for part in map(self._attached, arrivals) if len(part.ranks)]
        if not kept:
            return layout.empty(layout.COLLECTIVES)
        ends = np.cumsum([len(part.ranks) for part in kept])
        rows = layout.empty(layout.COLLECTIVES, int(ends[-1]))
        for part, end in zip(kept, ends, strict=True):
            rows[end - len(part.ranks) : end] = self._call(part)
        self._fill_times(rows, kept)
        return self._delivered(rows)

    def _attached(self, part: Arrivals) -> Arrivals:
        """The arrivals that happen while an agent is attached; seq as counted by that agent."""
        happens = part.ts_ns < NEVER
        late = self.is_late[part.ranks]
        if not late.any():
            return part if happens.all() else _chosen(part, happens)
        begins = happens & late & (self.seen_ns[part.ranks] == NEVER) & (part.ts_ns >= self.capture.late_ns)
        new = part.ranks[begins]
        self.seen_ns[new] = part.ts_ns[begins]
        self._base_ledger[:, new] = part.ledger[:, begins]
        self._base_calls[:, new] = part.calls[:, begins]
        is_recorded = happens & (part.ts_ns >= self.seen_ns[part.ranks])
        return _chosen(self._renumbered(part, is_recorded & late), is_recorded)

    def _renumbered(self, part: Arrivals, counts: Array) -> Arrivals:
        family = part.made.family or Family.WORLD
        key = (family, part.made.op if family is Family.PIPELINE else Op.NONE, part.made.towards)
        base = self._base_seq.setdefault(key, np.full(self.job.nranks, UNKNOWN, np.int64))
        first = counts & (base[part.ranks] == UNKNOWN)
        base[part.ranks[first]] = part.seq[first]
        seq = np.where(counts, part.seq - base[part.ranks], part.seq)
        return Arrivals(**(part.__dict__ | {"seq": seq}))

    def _fill_times(self, rows: Array, kept: Sequence[Arrivals]) -> None:
        """Every column on a clock, and the time ledger."""
        rank = np.concatenate([part.ranks for part in kept])
        ts = np.concatenate([part.ts_ns for part in kept])
        node = self.node[rank]
        rows["ts_ns"] = self.clocks.reading(node, ts)
        rows["seq"] = np.concatenate([part.seq for part in kept])
        waits = np.concatenate([part.waits for part in kept], axis=1)
        for name, when in zip(("wait_enter_ns", "wait_leave_ns"), waits, strict=True):
            known = (when >= 0) & (when >= self.seen_ns[rank])
            rows[name] = np.where(known, self.clocks.reading(node, when), UNKNOWN)
        calls = np.concatenate([part.calls for part in kept], axis=1) - self._base_calls[:, rank]
        for name, n in zip(("n_syncs", "n_allocs", "n_copies", "n_launches"), calls, strict=True):
            rows[name] = n
        ledger = np.concatenate([part.ledger for part in kept], axis=1) - self._base_ledger[:, rank]
        rows["ledger_ns"] = self.account(rank, ledger, rows["ts_ns"])
        if self.capture.has_gpu_times:
            self._fill_gpu_times(rows, rank, kept)

    def first_seen_ns(self) -> Array:
        """True time of each process's first record; the attach time for a process without calls after a late attach."""
        return np.where(self.seen_ns < NEVER, self.seen_ns, self.capture.late_ns)

    def account(self, rank: Array, ledger: Array, ts_ns: Array) -> Array:
        """(n, categories) on the node's clock; the CPU has the remainder, so that the sums fill time exactly."""
        node = self.node[rank]
        measured = self.clocks.length(node, ledger)
        on_cpu = ts_ns - self.clocks.reading(node, self.seen_ns[rank])
        measured[Category.ON_CPU - 1] = 0
        measured[Category.ON_CPU - 1] = on_cpu - measured.sum(axis=0)
        return measured.T

    def _fill_gpu_times(self, rows: Array, rank: Array, kept: Sequence[Arrivals]) -> None:
        for name, field in (("gpu_start_ns", "ready_ns"), ("gpu_end_ns", "end_ns")):
            when = np.concatenate([getattr(part, field) for part in kept])
            rows[name] = np.where(when < NEVER, self.gpus.reading(rank, when), UNKNOWN)

    def _call(self, part: Arrivals) -> Array:
        """The constant columns of the rows: call and process; equal in every step, so computed once."""
        known = self._calls.get(id(part.made))
        if known is None or known[0] is not part.made:
            known = self._calls[id(part.made)] = part.made, self._called(part.made)
        rows = known[1]
        if len(part.ranks) != len(rows):
            rows = rows[part.ranks - part.made.ranks.start]
        if part.mismatch is not None:
            rows = rows.copy()
            part.mismatch.fill(rows, np.isin(part.ranks, part.mismatch.ranks))
        return rows

    def _called(self, made: Instruction) -> Array:
        rank = np.arange(made.ranks.start, made.ranks.stop)
        rows = layout.empty(layout.COLLECTIVES, len(rank))
        groups = self.groups[made.family or Family.WORLD]
        is_hop = made.towards != 0
        rows["node"], rows["pid"], rows["device"] = self.node[rank], self.pid[rank], self.local[rank]
        rows["tid"] = self.pid[rank] + (_AUTOGRAD_TID if made.phase is Phase.BACKWARD else 0)
        rows["comm_hash"], rows["comm_rank"] = groups.comm_hash[rank], groups.comm_rank[rank]
        rows["nranks"], rows["op"], rows["datatype"] = groups.size, made.op, made.datatype
        rows["reduce_op"] = made.op in _REDUCING
        rows["count"], rows["count_bytes"] = made.count, made.count_bytes
        rows["flags"] = self.is_late[rank] * CollectiveFlag.LATE_ATTACH + is_hop * CollectiveFlag.GROUPED
        rows["stream"] = 0x7000 + 16 * list(Family).index(groups.family)
        if is_hop:
            rows["peer_rank"] = groups.comm_rank[rank] + made.towards
        elif made.op in (Op.BROADCAST, Op.REDUCE):
            rows["peer_rank"] = 0
        return rows

    def _delivered(self, rows: Array) -> Array:
        """The records that remain after losses."""
        if not self.capture.lost and not self.capture.n_bursts:
            return rows
        kept = self.rng.random(len(rows)) >= self.capture.lost
        begin = _FIRST_STEPS_NS + self._bursts * self.job.steps * _SHORT_STEP_NS
        since = rows["ts_ns"] - self.clocks.offset_ns[rows["node"]]
        for burst in begin.T:
            first = burst[rows["node"]]
            kept &= (since < first) | (since >= first + self.capture.burst_ns)
        self.n_lost += int(len(rows) - kept.sum())
        return rows[kept]

    def snapshots(self, hosts: Hosts, at_ns: Array, ranks: Array) -> Array:
        """`snapshots` rows of some ranks at true times at_ns, which must not precede their hosts' own times."""
        ranks, at_ns = _recorded(ranks, at_ns, self.seen_ns)
        rows = layout.empty(layout.SNAPSHOTS, len(ranks))
        is_blocked = hosts.blocked_since[ranks] < NEVER
        ledger = hosts.ledger[:, ranks] - self._base_ledger[:, ranks]
        stood = np.where(is_blocked, at_ns - np.minimum(hosts.blocked_since[ranks], at_ns), 0)
        category = np.where(is_blocked, hosts.blocked_in[ranks], Category.ON_CPU)
        ledger[category - 1, np.arange(len(ranks))] += stood
        rows["ts_ns"] = self.clocks.reading(self.node[ranks], at_ns)
        rows["node"], rows["pid"], rows["alive"] = self.node[ranks], self.pid[ranks], 1
        rows["category"] = category
        rows["n_collectives"], rows["n_completed"] = hosts.n_enqueued[ranks], hosts.n_completed[ranks]
        rows["in_call"] = np.where(is_blocked, hosts.blocked_call[ranks], Op.NONE)
        since = self.clocks.reading(self.node[ranks], np.where(is_blocked, hosts.blocked_since[ranks], 0))
        rows["in_call_since_ns"] = np.where(rows["in_call"] > 0, since, UNKNOWN)
        rows["syscall_nr"] = _syscalls(category, is_blocked)
        rows["ledger_ns"] = self.account(ranks, ledger, rows["ts_ns"])
        return rows


_SYSCALLS = {Category.SLEEP: 230, Category.LOCK: 202, Category.NET: 232, Category.IO: 0, Category.DRIVER: 16}
"""x86-64 numbers of the system call that blocks a thread in each category."""


def _syscalls(category: Array, is_blocked: Array) -> Array:
    numbers = np.full(len(category), UNKNOWN, np.int32)
    for known, number in _SYSCALLS.items():
        numbers[is_blocked & (category == known)] = number
    return numbers


def _recorded(ranks: Array, at_ns: Array, seen_ns: Array) -> tuple[Array, Array]:
    keep = at_ns >= seen_ns[ranks]
    return ranks[keep], at_ns[keep]


def _chosen(part: Arrivals, keep: Array) -> Arrivals:
    arrays = ("ranks", "ts_ns", "seq", "ready_ns", "end_ns", "waits", "calls", "ledger")
    return Arrivals(**(part.__dict__ | {name: getattr(part, name)[..., keep] for name in arrays}))
