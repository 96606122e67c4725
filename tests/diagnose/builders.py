"""Jobs made by hand, every moment of which is known: a program of calls, ranks that run it, and what delays them.

The little machine behind it: before each call a rank works on the host; it enters; the collective ends when the
last member has entered and its GPU is free; where the program waits, the host goes on at that moment.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import N_CATEGORIES, Category, Datatype, Op
from stallscope.events.trace import Clock, Trace

MS = 1_000_000
START_NS = 10_000 * MS
EPOCH_NS = 1_700_000_000_000 * MS
TRANSFER_NS = 50_000
ENQUEUE_NS = 10_000
SYNC_NS = 300_000
P2P = (Op.SEND, Op.RECV)


@dataclass(frozen=True)
class Call:
    """One line of the program: each group of ranks enters a collective of its own.

    work_ns: host time before it, for all ranks or by rank. gpu_ns: GPU time before it. overlaps: the GPU does this work
    while the collective before it runs. waits: the host
    synchronises after it. after_ns: host work before that, with a jitter of 3 %. With op SEND a group is (source,
    destination): one sends, the other receives.
    """

    groups: tuple[tuple[int, ...], ...]
    op: Op = Op.ALL_REDUCE
    count: int = 1000
    work_ns: int | tuple[int, ...] = 2 * MS
    gpu_ns: int = 0
    overlaps: bool = False
    waits: bool = False
    after_ns: int = 0


@dataclass(frozen=True)
class Delay:
    """A rank spends `ns` more in a category before a call; n_syncs: synchronise calls that it makes in that time.

    is_before_wait: between the call and the wait after it instead.
    """

    rank: int
    step: int
    ns: int
    category: Category = Category.SLEEP
    call: int = 0
    n_syncs: int = 0
    is_before_wait: bool = False


@dataclass(frozen=True)
class Gone:
    """A rank that never makes a call; category: its state instead, NONE if its process has ended."""

    rank: int
    step: int
    call: int = 0
    category: Category = Category.SLEEP


@dataclass(frozen=True)
class Job:
    """The program of the job and its hosts. extra: calls made before the program in some steps.

    offset_ns: how far the clock of each host is ahead. gpu_late_ns: by (rank, step), GPU time before the first
    call. gpu_factor: by rank, how many times as long its GPU works. gpu_jitter: relative scatter of each piece of GPU
    work. slow_links: by group, from which step its transfers take how much longer. quiet_ns: how long the capture runs
    after the last call.
    """

    program: tuple[Call, ...]
    n_ranks: int = 4
    n_steps: int = 40
    delays: tuple[Delay, ...] = ()
    gone: tuple[Gone, ...] = ()
    extra: Mapping[int, tuple[Call, ...]] = field(default_factory=dict)
    node: tuple[int, ...] = ()
    offset_ns: tuple[int, ...] = (0,)
    gpu_late_ns: Mapping[tuple[int, int], int] = field(default_factory=dict)
    gpu_factor: Mapping[int, float] = field(default_factory=dict)
    gpu_jitter: float = 0.0
    slow_links: Mapping[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    has_gpu_times: bool = False
    jitter_ns: int = 20_000
    quiet_ns: int = 0
    seed: int = 0


def every(rank: int, period: int, ns: int, *, first: int = 5, until: int = 40, **rest: Any) -> list[Delay]:
    """The same delay every `period` steps."""
    return [Delay(rank, step, ns, **rest) for step in range(first, until, period)]


def data_parallel(n_ranks: int = 4, *, n_buckets: int = 3, **rest: Any) -> tuple[Call, ...]:
    """Forward pass, a few gradient all-reduces, and a wait for the last of them."""
    everyone = (tuple(range(n_ranks)),)
    return tuple(
        Call(everyone, count=1000 + i, waits=i == n_buckets - 1, **{"work_ns": 2 * MS, **rest})
        for i in range(n_buckets)
    )


def trace_of(job: Job) -> Trace:
    """The trace of a job."""
    return _Machine(job).run()


def dp_trace(delays: Iterable[Delay] = (), *, n_ranks: int = 4, **rest: Any) -> Trace:
    """A data-parallel job with these delays."""
    return trace_of(Job(data_parallel(n_ranks), n_ranks=n_ranks, delays=tuple(delays), **rest))


def comm_hash(group: Sequence[int]) -> int:
    """The communicator of a group of ranks."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(group)).encode(), digest_size=8).digest(), "little")


def where(trace: Trace, mask: Array) -> Trace:
    """The trace with only some of its collectives."""
    return replace(trace, collectives=trace.collectives[mask])


class _Machine:
    def __init__(self, job: Job):
        n = job.n_ranks
        self.job = job
        self.node = job.node or (0,) * n
        self.rng = np.random.default_rng(job.seed)
        self.now = [START_NS] * n
        self.gpu_free = [0] * n
        self.gpu_done = [0] * n
        self.ledger = np.zeros((n, N_CATEGORIES), np.int64)
        self.n_syncs = [0] * n
        self.last_wait = [(UNKNOWN, UNKNOWN)] * n
        self.n_rounds: dict[tuple[Any, ...], int] = {}
        self.stuck: dict[int, Category] = {}
        self.rows: list[dict[str, Any]] = []

    def run(self) -> Trace:
        for step in range(self.job.n_steps):
            for call in self.job.extra.get(step, ()):
                self._call(call, step, -1)
            for number, call in enumerate(self.job.program):
                self._call(call, step, number)
        return self._trace()

    def _call(self, call: Call, step: int, number: int) -> None:
        for rank in (r for group in call.groups for r in group):
            self._work(call, step, number, rank=rank)
        for group in call.groups:
            present = [rank for rank in group if rank not in self.stuck]
            rows = [self._enter(call, group, rank, step=step, number=number) for rank in present]
            if len(present) < len(group):
                self.stuck |= {rank: Category.WAIT_GPU for rank in present if call.waits}
                continue
            since, longer_ns = self.job.slow_links.get(group, (0, 0))
            transfer_ns = TRANSFER_NS + (longer_ns if step >= since else 0)
            end = max(row["gpu_start_ns"] for row in rows) + transfer_ns
            for rank, row in zip(present, rows, strict=True):
                row["gpu_end_ns"] = self.gpu_free[rank] = end
                if call.waits:
                    self._delay(rank, step, number, is_before_wait=True)
                    self._wait(rank, self._after(call, rank, end))

    def _work(self, call: Call, step: int, number: int, *, rank: int) -> None:
        if any((gone.rank, gone.step, gone.call) == (rank, step, number) for gone in self.job.gone):
            self.stuck[rank] = next(gone.category for gone in self.job.gone if gone.rank == rank)
        if rank in self.stuck:
            return
        work = call.work_ns if isinstance(call.work_ns, int) else call.work_ns[rank]
        self._spend(rank, Category.ON_CPU, work + int(self.rng.integers(0, self.job.jitter_ns + 1)))
        self._delay(rank, step, number, is_before_wait=False)

    def _delay(self, rank: int, step: int, number: int, *, is_before_wait: bool) -> None:
        for delay in self.job.delays:
            if (delay.rank, delay.step, delay.call) != (rank, step, number):
                continue
            if delay.is_before_wait == is_before_wait:
                self._spend(rank, delay.category, delay.ns)
                self.n_syncs[rank] += delay.n_syncs

    def _enter(
        self, call: Call, group: tuple[int, ...], rank: int, *, step: int, number: int
    ) -> dict[str, Any]:
        is_p2p = call.op in P2P
        members = tuple(range(self.job.n_ranks)) if is_p2p else group
        hash_ = comm_hash(members)
        key = (hash_, rank, *(group if is_p2p else ()))
        seq = self.n_rounds.get(key, 0)
        self.n_rounds[key] = seq + 1
        gpu_work = call.gpu_ns + (self.job.gpu_late_ns.get((rank, step), 0) if number == 0 else 0)
        enqueued = self.now[rank] + ENQUEUE_NS
        worked = self.gpu_done[rank] if call.overlaps else self.gpu_free[rank]
        self.gpu_done[rank] = max(enqueued if call.overlaps else 0, worked) + self._on_gpu(rank, gpu_work)
        peer = UNKNOWN if not is_p2p else group[1 - group.index(rank)]
        row = {
            "ts_ns": self.now[rank],
            "rank": rank,
            "comm_hash": hash_,
            "comm_rank": members.index(rank),
            "nranks": len(members),
            "seq": seq,
            "op": (Op.SEND if group[0] == rank else Op.RECV) if is_p2p else call.op,
            "datatype": Datatype.FLOAT32,
            "count": call.count,
            "count_bytes": 4 * call.count,
            "peer_rank": peer,
            "n_syncs": self.n_syncs[rank],
            "wait_enter_ns": self.last_wait[rank][0],
            "wait_leave_ns": self.last_wait[rank][1],
            "gpu_start_ns": max(enqueued, self.gpu_free[rank], self.gpu_done[rank]),
            "ledger_ns": self.ledger[rank].copy(),
        }
        self.rows.append(row)
        self._spend(rank, Category.ON_CPU, ENQUEUE_NS)
        return row

    def _on_gpu(self, rank: int, ns: int) -> int:
        """How long the rank's GPU works."""
        scatter = self.job.gpu_jitter * self.rng.standard_normal() if self.job.gpu_jitter else 0.0
        return int(ns * self.job.gpu_factor.get(rank, 1.0) * (1 + scatter))

    def _after(self, call: Call, rank: int, end_ns: int) -> int:
        """Do the host work before a wait; the wait ends no earlier than a synchronise call takes."""
        if not call.after_ns:
            return end_ns
        self._spend(rank, Category.ON_CPU, int(call.after_ns * (1 + 0.03 * self.rng.standard_normal())))
        return max(end_ns, self.now[rank] + SYNC_NS)

    def _wait(self, rank: int, end_ns: int) -> None:
        begin = self.now[rank]
        self._spend(rank, Category.WAIT_GPU, max(end_ns - begin, 0))
        self.n_syncs[rank] += 1
        self.last_wait[rank] = (begin, self.now[rank])

    def _spend(self, rank: int, category: Category, ns: int) -> None:
        self.now[rank] += ns
        self.ledger[rank, category - 1] += ns

    def _local(self, rank: int, ns: int) -> int:
        """A moment on the clock of the rank's host."""
        return ns if ns == UNKNOWN else ns + self.job.offset_ns[self.node[rank]]

    def _trace(self) -> Trace:
        job = self.job
        end_ns = max(self.now) + job.quiet_ns
        names = tuple(f"host-{'abcdefgh'[i]}" for i in range(max(self.node) + 1))
        collectives = layout.empty(layout.COLLECTIVES, len(self.rows))
        gpu_times = ("gpu_start_ns", "gpu_end_ns")
        for i, row in enumerate(self.rows):
            rank = row.pop("rank")
            for name, value in row.items():
                if name in gpu_times and not job.has_gpu_times:
                    continue
                collectives[name][i] = (
                    self._local(rank, value) if name.endswith("_ns") and (name != "ledger_ns") else value
                )
            collectives["pid"][i] = collectives["tid"][i] = 1000 + rank
            collectives["node"][i] = self.node[rank]
        return Trace(
            collectives=collectives[np.argsort(collectives["ts_ns"], kind="stable")],
            processes=self._processes(),
            snapshots=self._snapshots(end_ns),
            nodes=names,
            clocks=tuple(Clock(i, job.offset_ns[i], EPOCH_NS) for i in range(len(names))),
            ends_ns=tuple(end_ns + job.offset_ns[i] for i in range(len(names))),
            source="made by hand",
        )

    def _processes(self) -> Array:
        rows = layout.empty(layout.PROCESSES, self.job.n_ranks)
        for rank in range(self.job.n_ranks):
            rows["ts_ns"][rank] = self._local(rank, START_NS)
            rows["pid"][rank], rows["node"][rank] = 1000 + rank, self.node[rank]
            rows["rank"][rank] = rank
            if self.stuck.get(rank) == Category.NONE:
                rows["ended_ns"][rank] = self._local(rank, self.now[rank])
        rows["nranks"] = self.job.n_ranks
        return rows

    def _snapshots(self, end_ns: int) -> Array:
        rows = layout.empty(layout.SNAPSHOTS, self.job.n_ranks)
        for rank in range(self.job.n_ranks):
            state = self.stuck.get(rank, Category.ON_CPU)
            rows["ts_ns"][rank] = self._local(rank, end_ns)
            rows["pid"][rank], rows["node"][rank] = 1000 + rank, self.node[rank]
            rows["category"][rank], rows["alive"][rank] = state, state != Category.NONE
            if state == Category.WAIT_GPU:
                rows["in_call"][rank] = Op.SYNC
        return rows
