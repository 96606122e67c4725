"""Host threads that execute programs: they enqueue GPU work, wait for it, and keep the kernel's time ledger.

Each host runs until it waits for GPU work whose end is not known yet; the device continues it. Times are true time,
int ns. At most QUEUE launches are enqueued ahead of the GPU; then a launch blocks. The state of a process is written
down when a collective is entered, once a second, and at the end: exactly as the agent does.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from generator.device import Device, Meeting, Work
from generator.program import OFF_CPU, Collective, Host, Instruction, Join, Kernel, Mark, Program, Stop, Sync
from stallscope.events.names import N_CATEGORIES, Category, Op

QUEUE = 1024
SLOW_NS = 1_000_000
"""Calls and off-CPU intervals from this length on have rows of their own."""
SNAPSHOT_NS = 1_000_000_000
_ENTRY_SHARE = 0.3
_WAIT, _DEVICE, _CPU = Category.WAIT_GPU - 1, Category.DEVICE - 1, Category.ON_CPU - 1
_P2P = (Op.SEND, Op.RECV)
_SENDS = 1000
"""Sends have streams of their own, so that a send does not wait for a receive."""


@dataclass(frozen=True)
class Group:
    """A communicator: its members (process indices) in the order of their ranks in it."""

    members: tuple[int, ...]
    comm_hash: int
    parent: int = 0

    def rank_of(self, process: int) -> int:
        return self.members.index(process)


@dataclass
class Log:
    """The events, one tuple each; times are true times. See records for the columns."""

    arrivals: list[tuple[Any, ...]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    calls: list[tuple[int, int, int, int]] = field(default_factory=list)
    off_cpu: list[tuple[int, int, int, int]] = field(default_factory=list)
    snapshots: list[tuple[Any, ...]] = field(default_factory=list)
    marks: list[tuple[int, int, int]] = field(default_factory=list)


class HostState:
    """One process: its host thread's time and ledger, its streams, its launch queue."""

    __slots__ = (
        "block_call",
        "block_category",
        "block_ns",
        "calls",
        "done",
        "inside_ns",
        "is_dead",
        "joined",
        "last",
        "ledger",
        "n_completed",
        "n_enqueued",
        "n_launched",
        "now_ns",
        "pending",
        "position",
        "program",
        "queue",
        "seq",
        "snapshot_ns",
        "start_ns",
        "step",
        "step_begins_ns",
        "wait",
    )  # fmt: skip

    def __init__(self, program: Program, start_ns: int) -> None:
        self.program, self.start_ns, self.now_ns = program, start_ns, start_ns
        self.step = self.position = 0
        self.ledger = [0] * N_CATEGORIES
        self.calls = [0, 0, 0, 0]
        self.last: dict[int, Work] = {}
        self.joined: list[Work] = []
        self.queue: deque[tuple[int, Work]] = deque()
        self.n_launched = self.n_enqueued = self.n_completed = 0
        self.pending = self.done = self.is_dead = False
        self.seq: dict[tuple[int, int, int], int] = {}
        self.wait = (-1, -1)
        self.inside_ns = -1
        self.snapshot_ns = start_ns + SNAPSHOT_NS
        self.block_category = self.block_call = 0
        self.block_ns = -1
        self.step_begins_ns: list[int] = []

    def move(self, start_ns: int) -> None:
        """Let a process that has not run begin later."""
        self.start_ns = self.now_ns = start_ns
        self.snapshot_ns = start_ns + SNAPSHOT_NS


class Machine:
    """Executes the programs of all processes. start_ns: by process; watched_ns: how long a hang is watched."""

    def __init__(self, groups: Sequence[Group], programs: Sequence[Program], start_ns: Sequence[int]) -> None:
        self.groups = groups
        self.hosts = [HostState(program, at) for program, at in zip(programs, start_ns, strict=True)]
        self.device, self.log = Device(), Log()
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._rank_in = [{process: i for i, process in enumerate(group.members)} for group in groups]

    def run(self, processes: Sequence[int]) -> int:
        """Run some processes to their end, or until none can continue; the true time of the last event."""
        self.device.ready.extend(processes)
        while self.device.ready:
            self._continue(self.device.ready.pop())
        return max(self.hosts[i].now_ns for i in processes)

    def watch(self, processes: Sequence[int], until_ns: int) -> None:
        """Write snapshots of processes that never continue, once a second."""
        for i in processes:
            host = self.hosts[i]
            if host.done and not host.is_dead:
                continue
            if host.is_dead:
                self.log.snapshots.append((i, host.now_ns, 0, 0, 0, -1, *self._state(host)))
                continue
            since, category = host.block_ns, host.block_category
            for at_ns in range(host.snapshot_ns, until_ns + 1, SNAPSHOT_NS):
                self._note(i, host, category, at_ns, at_ns - since)

    def stopped_ns(self) -> int:
        """When a process stopped permanently; 0 if none did."""
        return max((host.now_ns for host in self.hosts if not host.done), default=0)

    def _continue(self, i: int) -> None:
        host = self.hosts[i]
        while host.step < len(host.program):
            step = host.program[host.step]
            if len(host.step_begins_ns) == host.step:
                host.step_begins_ns.append(host.now_ns)
            while host.position < len(step):
                if not self._execute(i, host, step[host.position]):
                    return
                host.position += 1
            host.step += 1
            host.position = 0
        host.done = True
        self.log.snapshots.append((i, host.now_ns, 1, Category.ON_CPU, Op.NONE, -1, *self._state(host)))

    def _execute(self, i: int, host: HostState, made: Instruction) -> bool:
        """Execute one instruction; False where the host has to wait for work whose end is not known."""
        if type(made) is Kernel:
            return self._launch(i, host, made)
        if type(made) is Host:
            return self._spend_in(i, host, made)
        if type(made) is Collective:
            return self._enter(i, host, made)
        if type(made) is Sync:
            return self._synchronise(i, host, made)
        if type(made) is Join:
            work = host.last.get(1 + made.group)
            if work is not None:
                host.joined.append(work)
            return True
        if type(made) is Mark:
            self.log.marks.append((i, host.now_ns, made.step))
            return True
        assert type(made) is Stop
        self._block(host, made.category, Op.NONE)
        host.is_dead = made.is_dead
        return False

    def _spend(self, i: int, host: HostState, column: int, ns: int) -> None:
        end_ns = host.now_ns + ns
        while end_ns >= host.snapshot_ns:
            self._note(i, host, column + 1, host.snapshot_ns, host.snapshot_ns - host.now_ns)
        host.ledger[column] += ns
        host.now_ns = end_ns

    def _note(self, i: int, host: HostState, category: int, at_ns: int, partial_ns: int) -> None:
        """A snapshot: the ledger with the part of the state in progress."""
        ledger = host.ledger.copy()
        ledger[category - 1] += partial_ns
        call = host.block_call or (Op.SYNC if category in (Category.WAIT_GPU, Category.DEVICE) else Op.NONE)
        since_ns = at_ns - partial_ns if call else -1
        self.log.snapshots.append(
            (i, at_ns, 1, category, call, since_ns, host.n_enqueued, host.n_completed, ledger)
        )
        host.snapshot_ns = at_ns + SNAPSHOT_NS

    def _state(self, host: HostState) -> tuple[int, int, list[int]]:
        return host.n_enqueued, host.n_completed, host.ledger.copy()

    def _block(self, host: HostState, category: int, call: int) -> None:
        host.block_ns, host.block_category, host.block_call = host.now_ns, category, call

    def _spend_in(self, i: int, host: HostState, made: Host) -> bool:
        begin_ns = host.now_ns
        column = made.category - 1
        if made.drains:
            end_ns = self._known_end(i, host, list(host.last.values()), made.category, Op.ALLOC)
            if end_ns is None:
                return False
            self._spend(i, host, column, max(end_ns - host.now_ns, 0))
        self._spend(i, host, column, made.ns)
        for k in range(3):
            host.calls[k] += made.calls[k]
        if host.now_ns - begin_ns >= SLOW_NS:
            if made.category in OFF_CPU:
                self.log.off_cpu.append((i, begin_ns, host.now_ns, made.category))
            elif made.category in (Category.ALLOC, Category.COPY):
                op = Op.ALLOC if made.category == Category.ALLOC else Op.COPY
                self.log.calls.append((i, begin_ns, host.now_ns, op))
        return True

    def _launch(self, i: int, host: HostState, made: Kernel) -> bool:
        if not self._has_room(i, host, made.launches):
            return False
        first_ns = host.now_ns + made.host_ns // made.launches
        self._spend(i, host, _CPU, made.host_ns)
        work = Work(first_ns, made.gpu_ns, host.now_ns + made.gpu_ns // made.launches)
        after = [host.last.get(-made.stream)]
        if host.joined:
            after += host.joined
            host.joined = []
        self.device.enqueue(work, after)
        host.last[-made.stream] = work
        self._queued(host, made.launches, work)
        return True

    def _has_room(self, i: int, host: HostState, launches: int) -> bool:
        """Wait for a free entry of the launch queue: the driver polls, on the CPU."""
        queue = host.queue
        while queue and host.n_launched + launches - queue[0][0] > QUEUE:
            work = queue[0][1]
            if work.end_ns is None:
                work.waiting.append(i)
                self._block(host, Category.ON_CPU, Op.LAUNCH)
                return False
            queue.popleft()
            behind_ns = work.end_ns - host.now_ns
            if behind_ns > 0:
                begin_ns = host.now_ns
                self._spend(i, host, _CPU, behind_ns)
                if behind_ns >= SLOW_NS:
                    self.log.calls.append((i, begin_ns, host.now_ns, Op.LAUNCH))
        host.block_call = 0
        return True

    def _queued(self, host: HostState, launches: int, work: Work) -> None:
        host.queue.append((host.n_launched, work))
        host.n_launched += launches

    def _enter(self, i: int, host: HostState, made: Collective) -> bool:
        if not self._has_room(i, host, 1):
            return False
        self._spend(i, host, _CPU, int(made.host_ns * _ENTRY_SHARE))
        group, rank_in = self.groups[made.group], self._rank_in[made.group]
        own = rank_in[i]
        is_p2p = made.op in _P2P
        pair = (own, made.peer) if made.op == Op.SEND else (made.peer, own) if is_p2p else (-1, -1)
        seq = host.seq.get((made.group, *pair), 0)
        host.seq[made.group, *pair] = seq + 1
        key = (made.group, *pair, seq)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(2 if is_p2p else len(group.members))
        log = self.log
        log.arrivals.append(
            (i, host.now_ns, made.group, own, seq, made.op, made.count, made.datatype, made.is_backward,
             made.peer, *host.wait, *host.calls, *host.ledger)
        )  # fmt: skip
        self._spend(i, host, _CPU, made.host_ns - int(made.host_ns * _ENTRY_SHARE))
        work = Work(host.now_ns, made.gpu_ns, 0, meeting)
        stream = _SENDS + made.group if made.op == Op.SEND else 1 + made.group
        self.device.enqueue(work, (host.last.get(stream), host.last.get(0)))
        host.last[stream] = work
        log.works.append(work)
        self._queued(host, 1, work)
        host.pending = True
        host.n_enqueued += 1
        return True

    def _known_end(
        self, i: int, host: HostState, works: Sequence[Work], category: int, call: int
    ) -> int | None:
        """When all of some work ends; None, with the host waiting for it, where that is not known."""
        for work in works:
            if work.end_ns is None:
                work.waiting.append(i)
                self._block(host, category, call)
                return None
        host.block_call = 0
        return max((work.end_ns or 0 for work in works), default=0)

    def _synchronise(self, i: int, host: HostState, made: Sync) -> bool:
        works = (
            [host.last[0], *host.joined]
            if made.is_compute_only and 0 in host.last
            else list(host.last.values())
        )
        category = Category.WAIT_GPU if host.pending else Category.DEVICE
        end_ns = self._known_end(i, host, works, category, Op.SYNC)
        if end_ns is None:
            return False
        begin_ns = host.now_ns
        leave_ns = max(begin_ns + 4_000, end_ns + made.leave_ns)
        self._spend(i, host, category - 1, leave_ns - begin_ns)
        if host.pending:
            host.wait = (begin_ns, leave_ns)
        host.calls[0] += 1
        host.calls[2] += made.copies
        host.n_completed = host.n_enqueued
        host.pending = False
        if leave_ns - begin_ns >= SLOW_NS:
            self.log.calls.append((i, begin_ns, leave_ns, Op.SYNC))
        return True
