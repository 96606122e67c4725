"""Advances all ranks through a planned step, one instruction after the other, and records every arrival.

A synchronising collective starts when the last member's stream has reached it and ends for all together. A
broadcast lets its root go on, a reduction its leaves; a receive waits for its send, and a send's kernel for
its receive, while the sender's other kernels go on. Not modelled: contention between streams, the fabric's
own jitter.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stallscope.events.layout import Array
from stallscope.events.names import Category, Op
from stallscope.synth.groups import Groups
from stallscope.synth.hosts import NEVER, Hosts
from stallscope.synth.simulated_job import Family, Job
from stallscope.synth.simulated_program import Instruction, Kind
from stallscope.synth.step_plan import Mismatch, Plan


@dataclass(frozen=True)
class Arrivals:
    """The arrivals of one instruction: arrays by rank of `ranks`, true time; time on the CPU not yet in.

    ready_ns: its kernel starts; end_ns: it ends, NEVER when it hangs. waits: (2, n) begin and end of the
    last wait; calls: (4, n); ledger: (categories, n).
    """

    made: Instruction
    step: int
    ranks: Array
    ts_ns: Array
    seq: Array
    ready_ns: Array
    end_ns: Array
    waits: Array
    calls: Array
    ledger: Array
    mismatch: Mismatch | None = None


Note = Callable[[Arrivals], None]


class Machine:
    """All hosts and devices of a job, and the number of uses of each communicator."""

    def __init__(self, job: Job, groups: dict[Family, Groups], hosts: Hosts) -> None:
        """hosts: their state, which is advanced in place."""
        self.hosts, self.groups = hosts, groups
        self.seq = {family: np.zeros(job.nranks, np.int64) for family in groups}
        self._hops = {
            (op, towards): np.zeros(job.nranks, np.int64) for op in (Op.SEND, Op.RECV) for towards in (1, -1)
        }
        self._sent: dict[tuple[int, int], deque[tuple[Array, Array]]] = {}

    def run(self, plan: Plan, note: Note) -> None:
        """Advance every rank through one step; `note` is called with the arrivals in program order."""
        for at in range(len(plan.program)):
            for stall in plan.stalls.get(at, ()):
                self.hosts.stall(stall)
            if at in plan.vanishing:
                gone = plan.vanishing[at]
                self.hosts.is_dead[gone.ranks] |= gone.is_dead
                self.hosts.block(gone.ranks, gone.category, Op.NONE)
            self._execute(at, plan, note)

    def _execute(self, at: int, plan: Plan, note: Note) -> None:
        made, hosts = plan.program[at], self.hosts
        cost, device = plan.host[at, made.ranks], plan.device[at, made.ranks]
        if made.kind is Kind.WORK:
            hosts.spend(made.category, made.ranks, cost)
            hosts.calls[2, made.ranks] += made.category is Category.COPY
            return
        if made.kind is Kind.SYNC:
            hosts.synchronise(made.ranks, cost)
            return
        hosts.wait_for_queue(made.ranks)
        if made.kind is Kind.COMPUTE:
            launches = made.launches * plan.launches_by_rank(made.ranks)
            hosts.launch(made.ranks, cost, device, launches=launches, after_comm=made.after_comm)
        elif made.kind is Kind.COLLECTIVE:
            self._collective(at, plan, note)
        else:
            self._hop(made, plan, cost, device, note)

    def _collective(self, at: int, plan: Plan, note: Note) -> None:
        made, hosts = plan.program[at], self.hosts
        family, ranks = made.family or Family.WORLD, made.ranks
        if at in plan.crossings:
            self._enter_early(at, plan, note)
        arrived = self._arrive(made, plan.step, self.seq[family], plan.host[at, ranks])
        np.maximum(arrived.ready_ns, hosts.comm[ranks], out=arrived.ready_ns)
        arrived.end_ns[:] = self._end(made, arrived.ready_ns, plan.device[at, ranks])
        mismatch = plan.mismatches.get(at)
        if mismatch is not None:
            hangs = self._is_with(family, mismatch.ranks)[ranks]
            arrived.end_ns[hangs] = NEVER
        hosts.comm[ranks] = arrived.end_ns
        if made.holds:
            hosts.compute[ranks] = np.maximum(hosts.compute[ranks], arrived.end_ns)
        note(_without(arrived, plan.early(at), mismatch))

    def _arrive(self, made: Instruction, step: int, seq: Array, cost: Array) -> Arrivals:
        """Enter a call after its preceding cost: record the time ledger, count the call, add the cost."""
        hosts, ranks = self.hosts, made.ranks
        ts_ns = hosts.now[ranks] + (cost * made.before).astype(np.int64)
        hosts.now[ranks] += cost
        ready = np.maximum(hosts.now[ranks], hosts.compute[ranks])
        arrived = Arrivals(
            made,
            step,
            np.arange(ranks.start, ranks.stop),
            ts_ns,
            seq[ranks].copy(),
            ready,
            np.full(len(ts_ns), NEVER, np.int64),
            hosts.waits[:, ranks].copy(),
            hosts.calls[:, ranks].copy(),
            hosts.ledger[:, ranks].copy(),
        )
        seq[ranks] += 1
        hosts.n_enqueued[ranks] += ts_ns < NEVER
        hosts.calls[3, ranks] += made.launches * hosts.times_launches
        hosts.has_enqueued[ranks] = True
        return arrived

    def _end(self, made: Instruction, ready: Array, device: Array) -> Array:
        """The end of the collective, by member."""
        groups = self.groups[made.family or Family.WORLD]
        last = groups.over_members(ready, np.maximum)
        if made.op in (Op.BROADCAST, Op.REDUCE):
            is_root = groups.comm_rank[made.ranks] == 0
            root = groups.over_members(np.where(is_root, ready, 0), np.maximum)
            waits_for = np.maximum(ready, root) if made.op is Op.BROADCAST else ready
            last = np.where(is_root, ready if made.op is Op.BROADCAST else last, waits_for)
        ends: Array = np.minimum(last + groups.over_members(device, np.maximum), NEVER)
        return ends

    def _is_with(self, family: Family, culprits: Array) -> Array:
        """Whether a rank shares a group of the family with a culprit."""
        group_of = self.groups[family].group_of
        shares: Array = np.isin(group_of, group_of[culprits])
        return shares

    def _enter_early(self, at: int, plan: Plan, note: Note) -> None:
        """Some ranks enter a later collective first. Their peers wait in this collective, and they in the later."""
        crossing = plan.crossings[at]
        made = plan.program[crossing.partner]
        family, hosts = made.family or Family.WORLD, self.hosts
        others = np.setdiff1d(np.arange(len(hosts.now)), crossing.ranks)
        seq = self.seq[family].copy()
        held = hosts.now[others].copy(), hosts.n_enqueued[others].copy(), hosts.calls[:, others].copy()
        arrived = self._arrive(made, plan.step, self.seq[family], plan.host[crossing.partner, made.ranks])
        hosts.now[others], hosts.n_enqueued[others], hosts.calls[:, others] = held
        hosts.n_enqueued[crossing.ranks] -= 1  # counted at its own turn
        self.seq[family][:] = seq
        hosts.comm[crossing.ranks] = NEVER
        note(_without(arrived, others, None))

    def _hop(self, made: Instruction, plan: Plan, cost: Array, device: Array, note: Note) -> None:
        """A send or a receive between neighbouring stages, for all ranks of the stage."""
        arrived = self._arrive(made, plan.step, self._hops[made.op, made.towards], cost)
        if made.kind is Kind.SEND:
            queue = self._sent.setdefault((made.ranks.start, made.towards), deque())
            queue.append((arrived.ready_ns, arrived.end_ns))
        else:
            self._receive(made, arrived, device)
        note(arrived)

    def _receive(self, made: Instruction, arrived: Arrivals, device: Array) -> None:
        """Fills in the end times of the receive and its send; the receiver's kernels wait for it."""
        ranks = made.ranks
        shift = made.towards * (ranks.stop - ranks.start)
        source = slice(ranks.start + shift, ranks.stop + shift)
        sender_ready, sender_end = self._sent[source.start, -made.towards].popleft()
        ready = np.maximum(arrived.ready_ns, sender_ready)
        sender_end[:] = arrived.end_ns[:] = np.minimum(ready + device, NEVER)
        sends = self.hosts.sends[-made.towards]
        sends[source] = np.maximum(sends[source], sender_end)
        self.hosts.compute[ranks] = np.maximum(self.hosts.compute[ranks], arrived.end_ns)


def _without(arrived: Arrivals, ranks: Array | None, mismatch: Mismatch | None) -> Arrivals:
    """The arrivals without some ranks."""
    fields = arrived.__dict__ | {"mismatch": mismatch}
    if ranks is not None:
        keep = ~np.isin(arrived.ranks, ranks)
        for name in ("ranks", "ts_ns", "seq", "ready_ns", "end_ns", "waits", "calls", "ledger"):
            fields[name] = fields[name][..., keep]
    elif mismatch is None:
        return arrived
    return Arrivals(**fields)
