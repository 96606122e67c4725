"""The state of all ranks: host clocks, device streams, and the time ledger of each host.

Each rank has two timelines. The host enqueues and goes on; the device has a stream for kernels, one for collectives
and one for sends in each direction, and each works in order. Times are true time in ns from the job's start;
a rank that never continues is at NEVER. Time on the CPU is not stored: it is the remainder of the other categories.
n_completed counts the work that a capture can know: enqueued before the last synchronise call that returned.
"""

from collections import deque

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import N_CATEGORIES, Category, Op
from stallscope.synth.simulated_job import Job, Timing
from stallscope.synth.step_plan import Stall

NEVER = 1 << 60

Ranks = slice | Array


class Hosts:
    """Arrays by rank. may_hang: some rank can reach NEVER (checked only then, for speed). times_launches: the
    capture counts and times launches; otherwise launch time is time on the CPU.
    """

    def __init__(
        self, job: Job, timing: Timing, start_ns: Array, *, may_hang: bool, times_launches: bool = False
    ) -> None:
        """start_ns: (ranks,) the time of each process's first record."""
        n = job.nranks
        self.may_hang, self.times_launches = may_hang, times_launches
        self.start_ns = start_ns
        self.now = start_ns.copy()
        self.compute, self.comm = start_ns.copy(), start_ns.copy()
        self.sends = {1: start_ns.copy(), -1: start_ns.copy()}
        self.ledger = np.zeros((N_CATEGORIES, n), np.int64)
        self.waits = np.full((2, n), UNKNOWN, np.int64)
        self.calls = np.zeros((4, n), np.int64)  # syncs, allocations, copies, launches
        self.has_enqueued = np.zeros(n, bool)
        self.n_enqueued = np.zeros(n, np.int64)
        self.n_completed = np.zeros(n, np.int64)
        self.queued_ns = np.zeros(n, np.int64)
        self.blocked_since = np.full(n, NEVER, np.int64)
        self.blocked_in = np.zeros(n, np.uint8)
        self.blocked_call = np.zeros(n, np.uint16)
        self.is_dead = np.zeros(n, bool)
        self._depth = max(timing.queue_launches // timing.layer_launches, 1) * job.pp
        self._is_bounded = job.sync_every > 1
        self._queue: deque[Array] = deque()

    def spend(self, category: Category, ranks: Ranks, ns: Array) -> None:
        """Advance hosts by ns, all of it in one category."""
        if category is not Category.ON_CPU:
            self._account(category, ranks, ns)
        self.now[ranks] += ns

    def _account(self, category: Category, ranks: Ranks, ns: Array) -> None:
        if self.may_hang:
            ns = np.where(self.now[ranks] < NEVER, ns, 0)
        self.ledger[category - 1, ranks] += ns

    def stall(self, stall: Stall) -> None:
        """Delay some hosts."""
        if stall.drains:
            self.synchronise(stall.ranks, np.zeros(len(stall.ranks), np.int64))
        for category, share in stall.shares.items():
            if category is not Category.ON_CPU:
                self._account(category, stall.ranks, (stall.ns * share).astype(np.int64))
        self.now[stall.ranks] += stall.ns
        self.calls[0, stall.ranks] += stall.n_syncs
        self.calls[1, stall.ranks] += stall.n_allocs
        self.calls[2, stall.ranks] += stall.n_copies

    def launch(self, ranks: Ranks, cost: Array, device: Array, *, launches: Array, after_comm: bool) -> None:
        """Kernels begin once the first is enqueued, and end no earlier than shortly after the last is."""
        begin = self.now[ranks].copy()
        if self.times_launches:
            self._account(Category.LAUNCH, ranks, cost)
            self.calls[3, ranks] += launches
        self.now[ranks] += cost
        if after_comm:
            np.maximum(begin, self.comm[ranks], out=begin)
        np.maximum(begin, self.compute[ranks], out=begin)
        last = self.now[ranks] + device // np.maximum(launches, 1)
        self.compute[ranks] = np.maximum(begin + device, last)

    def wait_for_queue(self, ranks: slice) -> None:
        """A host runs ahead of its device by a bounded number of launches; further launches block it.

        If launches are not timed, this is time on the CPU: the driver polls.
        """
        if not self._is_bounded:
            return
        self._queue.append(np.maximum(self.compute, self.comm))
        if len(self._queue) <= self._depth:
            return
        free = self._queue.popleft()[ranks]
        if self.may_hang:
            self.block(np.flatnonzero(free >= NEVER) + ranks.start, Category.ON_CPU, Op.LAUNCH)
        behind = np.maximum(np.minimum(free, NEVER) - self.now[ranks], 0)
        if self.times_launches:
            self._account(Category.LAUNCH, ranks, behind)
        self.now[ranks] += behind
        self.queued_ns[ranks] += behind

    def synchronise(self, ranks: Ranks, cost: Array) -> None:
        """Wait for all work that the ranks have enqueued: for other ranks if a collective is part of it."""
        begin = self.now[ranks].copy()
        done = np.maximum(self.compute[ranks], self.comm[ranks])
        for sent in self.sends.values():
            np.maximum(done, sent[ranks], out=done)
        leave = np.maximum(begin + cost, done + cost // 2)
        for_others = self.has_enqueued[ranks].copy()
        if self.may_hang:
            stuck = leave >= NEVER
            category = np.where(for_others, Category.WAIT_GPU, Category.DEVICE)[stuck]
            self.block(np.arange(len(self.now))[ranks][stuck], category, Op.SYNC)
            self.now[ranks] = np.where(stuck, self.now[ranks], leave)
            self.n_completed[ranks] = np.where(stuck, self.n_completed[ranks], self.n_enqueued[ranks])
            leave, for_others = np.where(stuck, begin, leave), for_others & ~stuck
        else:
            self.now[ranks] = leave
            self.n_completed[ranks] = self.n_enqueued[ranks]
        spent = leave - begin
        self.ledger[Category.WAIT_GPU - 1, ranks] += spent * for_others
        self.ledger[Category.DEVICE - 1, ranks] += spent * ~for_others
        self.waits[0, ranks] = np.where(for_others, begin, self.waits[0, ranks])
        self.waits[1, ranks] = np.where(for_others, leave, self.waits[1, ranks])
        self.calls[0, ranks] += 1
        self.has_enqueued[ranks] = False

    def block(self, ranks: Array, category: int | Array, call: Op) -> None:
        """The hosts never continue from here; hosts that are already at NEVER do not change."""
        fresh = self.now[ranks] < NEVER
        at = ranks[fresh]
        self.blocked_since[at] = self.now[at]
        self.blocked_in[at] = category[fresh] if isinstance(category, np.ndarray) else category
        self.blocked_call[at] = call
        self.now[at] = NEVER
