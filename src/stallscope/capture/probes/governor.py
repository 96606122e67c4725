"""Keeps the overhead of probes on hot functions within a budget per thread, by switching them off part of the time.

Three groups are governed. HOT: launches, events, stream waits, asynchronous sets of memory. The ledger does not need
them. COPIES: asynchronous copies. The ledger needs them, so they stay on while the time in them could be a cause and
the probes cost little in comparison (docs/decisions/high-frequency-probes.md). WAITS: synchronise calls. They are
switched only if they exceed the whole budget, and only while no process uses NCCL and no requests to an inference
engine are recorded: the ledger of a process without peers is then estimated for the time without them
(unprobed_waits.py). The budget of copies excludes the cost of the permanent probes, the waits and the scheduler
programs, and the budget of hot functions also excludes the cost of copies, but at least a tenth remains.

A period begins when a group is switched on. The programs report the cost to the busiest process since then: they
measure the constant share of it that is their entry cost (COST_RATIO). The cost is summed over all threads, because
threads often work in turns (in PyTorch one goes forward, another backward). Once the cost reaches the budget of a whole
period, the group is off until the budget has paid for it. The first period takes a second, so that a busy job is
detected early; later periods take two, so that a count is never older than some seconds. Cheap probes are always on,
and their counts are exact. A separate thread does the switching, which takes 10 to 30 ms.

Two more groups are on unless they report nothing of their own at present (redundant.py).

When the ring of events fills, the thresholds of slow calls rise; then the hot probes are switched off.
"""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stallscope.capture.probes.elf import FileKey
from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.maps import Entries
from stallscope.capture.probes.operations import BUDGETED, GOVERNED, REDUNDANT, Hook
from stallscope.capture.probes.program import Link, Program
from stallscope.capture.probes.redundant import Redundant
from stallscope.capture.rows.call_statistics import ProbedInterval
from stallscope.capture.rows.unprobed_waits import UnprobedWaits
from stallscope.events.kernel import HookGroup
from stallscope.events.names import Op

AFTERMATH = 1.7
"""The job's loss, relative to the additional time of its calls: the job's own code has to return to the caches. In a
launch-bound PyTorch loop, probes on copies cost 2.0 +- 0.7 % while they were on, where the calls reported 1.1,
and probes on launches 12.6 +- 2.9 %, where the calls reported 4.6 (an H200's host). In a loop on the CPU the cost
was 8.0 +- 1.5 % where the calls reported 6.2.
"""
COST_RATIO = 16.0 * AFTERMATH
"""The job's loss by a probe with its return, in multiples of its program's entry cost.

The cost of a probe depends on the caches and on the CPU's other hyperthread: 0.9 to 7.9 us. But the entry cost is a
constant share of it: 1/14 to 1/19 (Xeon, Linux 6.18), 1/13.9 to 1/15.1 in twelve runs on a busy machine (EPYC, Linux
6.18). AFTERMATH is known less well, so nothing is gained by measuring the share on each machine.
"""
SCHEDULER_TIMES = 3.0
"""The job's loss when its threads leave the CPU and return, relative to the time that the programs there report
(SLOT.scheduler_ns): it includes the kernel's entry path, the programs at wakeups, and cache misses afterwards. A
PyTorch loop on the CPU that switches between two threads 31 times in 5 ms was 1.1 +- 0.1 % slower where the
programs reported 0.35 (Xeon, Linux 6.18).
"""

_FIRST_PERIOD_NS, _PERIOD_NS = 10**9, 2 * 10**9
_FULL_RING_NS = 10 * 10**9
"""Time without hot probes after the ring of events was full."""
_OVERDUE_NS = 20 * 10**9
_CHECK_EVERY_S = 0.2
_LAST_WAITS_NS = 10**9
"""The time for open waits of the runtime to end while their probes are still attached."""
_MAX_OFF_NS = 60 * 10**9
_RELEVANT_SHARE = 0.05
"""Share of a thread's time in asynchronous copies from which on they could be a cause ..."""
_MAX_ADDED_SHARE = 0.075
"""... if probes add no more than this share to them. Many short copies are copies on the device, which do not block
a thread.
"""
_MIN_SHARE = 0.1
"""Share of the budget that a group always has, regardless of the cost of the groups before it."""
_WAITS_SHARE = 0.2
"""Share of the budget that waits have once they have exceeded all of it. Probes on a wait after a millisecond of other
work cost about twice the estimate: requests with 0.26 probed waits were 3.7 +- 1.7 us slower, and the estimate was 1.5
(Xeon, Linux 6.18).
"""
_ALL_WAITS_NS = 5 * 10**9
"""The waits of a new process are all recorded for this long."""
_MAX_WAITS_OFF_NS = 10**10
"""Estimates of waits are not older than this."""
_LONG_WAIT_NS, _DRAINED_S = 50_000_000, 0.01
"""The probes on waits are detached when no call is open: they stay while a call is open for longer than this."""
_COPIES_BUDGET = 0.005
"""The budget of copies if hot probes have none."""
_QUIET_SHARE = 0.5
"""Share of the budget: at this cost, summed over all threads, no thread needs to be examined."""

_FULL, _EMPTY, _N_FULL, _N_EMPTY, _MAX_RAISES = 0.5, 0.1, 3, 150, 10

_FUNCTIONS = {
    HookGroup.HOT: "launches, events and stream waits",
    HookGroup.COPIES: "asynchronous copies",
    HookGroup.WAITS: "synchronise calls",
}


class Count(NamedTuple):
    """Counts of one group and thread: the entry cost of its programs (SLOT.way_ns), and the time inside.

    scheduler_ns: the time of the programs that run without a probe; part of the group that is always on.
    """

    way_ns: int = 0
    inside_ns: int = 0
    scheduler_ns: int = 0

    def lost_ns(self, before: "Count", cost_ratio: float) -> float:
        """The job's loss by the probes since the counts in `before`."""
        hooks_ns = (self.way_ns - before.way_ns) / 2 * cost_ratio
        return hooks_ns + (self.scheduler_ns - before.scheduler_ns) * SCHEDULER_TIMES


ThreadCounts = Mapping[tuple[int, int], Count]
"""Counts of the kernel side since the start, by process and thread."""


@dataclass
class Group:
    """One governed group: whether it is on, since when, and its measured cost.

    is_cycling: it was switched off in its last period, so its counts are scaled up.
    """

    is_on: bool = True
    is_cycling: bool = False
    period_ns: int = 0  # start of the period
    length_ns: int = _FIRST_PERIOD_NS
    next_on_ns: int = 0
    spent: float = 0.0  # ns that its busiest process has lost in this period
    inside_share: float = 0.0  # in this period so far, of the thread with the longest time inside
    added_share: float = 0.0  # share that probes add to its time inside
    on_ns: int = 0  # time on, up to on_since_ns
    on_since_ns: int = 0
    _before: ThreadCounts = field(default_factory=dict)
    _spent_by: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """By thread: ns lost, ns inside."""

    def add_counts(self, counts: ThreadCounts, now_ns: int, *, cost_ratio: float) -> None:
        """Add the counts since the last reading."""
        for thread, count in counts.items():
            before = self._before.get(thread, Count())
            if count.way_ns < before.way_ns or count.scheduler_ns < before.scheduler_ns:
                before = Count()
            spent, inside = self._spent_by.get(thread, (0.0, 0))
            lost_ns = count.lost_ns(before, cost_ratio)
            self._spent_by[thread] = spent + lost_ns, inside + max(count.inside_ns - before.inside_ns, 0)
        self._spent_by = {thread: spent for thread, spent in self._spent_by.items() if thread in counts}
        self._before = counts
        by_process: defaultdict[int, float] = defaultdict(float)
        for (pid, _), (spent, _) in self._spent_by.items():
            by_process[pid] += spent
        self.spent = max(by_process.values(), default=0.0)
        added, inside = max(self._spent_by.values(), key=lambda group: group[1], default=(0.0, 0))
        self.inside_share = inside / max(now_ns - self.period_ns, 1)
        self.added_share = added / max(inside, 1)

    def load(self, now_ns: int) -> float:
        """Share of a thread's time that its busiest process has lost in this period, over at least a second."""
        return self.spent / max(now_ns - self.period_ns, _FIRST_PERIOD_NS)

    def begin_period(self, now_ns: int) -> None:
        """A new period, with nothing spent."""
        self.period_ns, self.spent = now_ns, 0.0
        self.length_ns = min(2 * self.length_ns, _PERIOD_NS)
        self._spent_by.clear()

    def record_switch(self, now_ns: int, *, is_on: bool) -> None:
        """The group is on, or off, from now on."""
        if self.is_on and not is_on:
            self.on_ns += now_ns - self.on_since_ns
        if is_on and not self.is_on:
            self.on_since_ns = now_ns
        self.is_on = is_on

    def total_on_ns(self, now_ns: int) -> int:
        """The total time for which the group was on."""
        return self.on_ns + (now_ns - self.on_since_ns if self.is_on else 0)


def exceeds_budget(group: HookGroup, state: Group, budget: float) -> bool:
    """Whether a group has used up the budget of a whole period. budget: share of a thread's time."""
    if (
        group is HookGroup.COPIES
        and state.inside_share >= _RELEVANT_SHARE
        and state.added_share <= _MAX_ADDED_SHARE
    ):
        return False
    return state.spent > budget * state.length_ns


def off_until_ns(state: Group, budget: float) -> int:
    """The time at which the budget has paid for the cost of this period."""
    return state.period_ns + min(int(state.spent / max(budget, 1e-9)), _MAX_OFF_NS)


@dataclass
class Governor:
    """The groups of all files. Governs from start() to stop(); probed_interval() reports when probes were on.

    budget: share of a thread's time; 0: no hot probes. cost_ratio: tests set another.
    """

    program: Program
    budget: float
    cost_ratio: float = COST_RATIO
    clock_ns: Callable[[], int] = time.monotonic_ns
    groups: dict[HookGroup, Group] = field(default_factory=dict)
    _files: dict[FileKey, tuple[int, Mapping[HookGroup, Sequence[Hook]]]] = field(default_factory=dict)
    _links: dict[tuple[FileKey, HookGroup], Link] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _notes: list[str] = field(default_factory=list)
    _reported_until: dict[HookGroup, tuple[int, int]] = field(default_factory=dict)
    _renewed: set[HookGroup] = field(default_factory=set)
    _off: set[HookGroup] = field(default_factory=set)  # of REDUNDANT
    _waits_end_ns: int | None = None  # when RUNTIME_WAITS, which no longer opens waits, is detached
    _is_new_process: bool = False
    _noted: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None
    _n_raised: int = 0
    _always: Group = field(default_factory=Group)
    _always_load: float = 0.0  # over its last second
    _was_quiet: bool = False
    _way_ns: int = 0
    _quiet_ns: int = 0
    _n_full: int = 0
    _n_empty: int = 0

    def __post_init__(self) -> None:
        now_ns = self._quiet_ns = self.clock_ns()
        for group in BUDGETED:
            self.groups[group] = Group(period_ns=now_ns, on_since_ns=now_ns)
        self._reported_until = dict.fromkeys(HookGroup, (now_ns, 0))
        self._redundant = Redundant(now_ns)
        self._renewed_ns = now_ns
        self.unprobed_waits = UnprobedWaits(lambda: self.program.processes())
        self._always.begin_period(now_ns)
        if not self.has_hot_hooks:
            self.groups[HookGroup.HOT].record_switch(now_ns, is_on=False)

    @property
    def has_hot_hooks(self) -> bool:
        """Whether groups are used at all: not with perf-event links, which take 0.1 s per probe to switch off."""
        return self.budget > 0 and self.program.mode != "perf"

    def add(self, key: FileKey, path: str, hooks: Mapping[HookGroup, Sequence[Hook]]) -> None:
        """Govern the probes of a file. path: opens it now. Raises KernelRefused, OSError."""
        with self._lock:
            self._files[key] = (os.open(path, os.O_RDONLY | os.O_CLOEXEC), hooks)
            on = [group for group, state in self.groups.items() if state.is_on]
            for group in (*on, *(group for group in REDUNDANT if group not in self._off)):
                self._attach(key, group)

    def remove(self, key: FileKey) -> None:
        """The file is no longer used."""
        with self._lock:
            for group in GOVERNED:
                self._detach(key, group)
            if key in self._files:
                os.close(self._files.pop(key)[0])

    def start(self) -> None:
        """Start governing."""
        self._thread = threading.Thread(target=self._run, name="governor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop switching, and close the files; probes stay until the program detaches."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for fd, _ in self._files.values():
                os.close(fd)
            self._files.clear()

    def renew(self) -> None:
        """Switch on all groups: a new process is traced from its start, regardless of the cost of the other processes.

        Its counts are not scaled up by the time before its start, in which the probes were off.
        """
        with self._lock:
            for group, state in self.groups.items():
                state.next_on_ns, state.is_cycling = 0, False
                self._renewed.add(group)
            self._is_new_process, self._renewed_ns = True, self.clock_ns()

    def notes(self) -> list[str]:
        """Notes for the user since the last call. Raises the error that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def probed_interval(self, group: HookGroup, now_ns: int) -> ProbedInterval | None:
        """The time since the last result that was not None; None while a period of a cycling group continues."""
        with self._lock:
            since_ns, last_on_ns = self._reported_until[group]
            state = self.groups.get(group)
            if state is None:
                self._reported_until[group] = (now_ns, 0)
                return ProbedInterval(now_ns - since_ns, now_ns - since_ns)
            is_overdue = now_ns - since_ns > _OVERDUE_NS or self._stop.is_set()
            on_ns = state.total_on_ns(now_ns)
            if group in self._renewed and on_ns == last_on_ns:
                self._reported_until[group] = (now_ns, on_ns)
            self._renewed.discard(group)
            if on_ns == last_on_ns or (state.is_cycling and state.is_on and not is_overdue):
                return None
            self._reported_until[group] = (now_ns, on_ns)
            return ProbedInterval(now_ns - since_ns, on_ns - last_on_ns)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._next_check_s()):
                self.govern()
        except BaseException as error:  # noqa: BLE001 (it is raised again in the main thread, by notes())
            self._failure = error

    def _next_check_s(self) -> float:
        """The next check: sooner while a group that is on may have to be switched off; later at low hit rates.

        A burst that begins between two checks costs a thread at most 0.2 s x the probes' share of its time, about 60 %:
        the budget pays for that by 24 s without probes.
        """
        is_costly = any(
            state.is_on and (state.is_cycling or state.length_ns < _PERIOD_NS)
            for state in self.groups.values()
        )
        return _CHECK_EVERY_S / 4 if is_costly else _CHECK_EVERY_S

    def govern(self) -> None:
        """Check once, and switch the groups that are due."""
        now_ns = self.clock_ns()
        with self._lock:
            self._restore_redundant(now_ns)
            self._detach_runtime_waits(now_ns)
        self._was_quiet = self._is_quiet(now_ns)
        if self._was_quiet:
            with self._lock:
                self._limit_records(now_ns)
            return
        is_on = [group for group, state in self.groups.items() if state.is_on]
        processes = self.program.process_rows()
        counts = counts_by_group(processes, [HookGroup.ALWAYS, *is_on])
        with self._lock:
            self._drop_redundant(processes, now_ns)
            self._count_always(counts.pop(HookGroup.ALWAYS), now_ns)
            for group, thread_counts in counts.items():
                if self.groups[group].is_on:
                    self.groups[group].add_counts(thread_counts, now_ns, cost_ratio=self.cost_ratio)
            budget = self.budget or _COPIES_BUDGET
            remaining = self._govern_waits(processes, budget, now_ns) - self._always_load
            for group in (HookGroup.COPIES, HookGroup.HOT):
                load = self.groups[group].load(now_ns)
                if group is HookGroup.COPIES or self.has_hot_hooks:
                    self._switch(group, max(remaining, budget * _MIN_SHARE), now_ns)
                remaining -= load
            self._limit_records(now_ns)

    def _govern_waits(self, processes: Entries, budget: float, now_ns: int) -> float:
        """Switch the waits if they are due. Returns the remaining budget: nothing where the waits are switched."""
        state = self.groups[HookGroup.WAITS]
        load = state.load(now_ns)
        driver_reports_all = HookGroup.RUNTIME_WAITS in self._off or not self._redundant.has_runtime_waits
        may_be_off = (
            driver_reports_all
            and not processes.values["uses_nccl"].any()
            and not self.program.is_recording_requests
            and now_ns - self._renewed_ns >= _ALL_WAITS_NS
        )
        if may_be_off:
            share = _WAITS_SHARE if state.is_cycling else 1.0
        else:
            share, state.next_on_ns = math.inf, 0
        self._switch(HookGroup.WAITS, budget * share, now_ns)
        return 0.0 if state.is_cycling else budget - load

    def _restore_redundant(self, now_ns: int) -> None:
        """Attach the groups that may report something again."""
        restored: set[HookGroup] = set()
        if self._is_new_process:
            self._is_new_process, restored = False, set(self._off)
            self._redundant.renew(now_ns)
        elif HookGroup.GRAPH_LAUNCHES in self._off and self.program.uses_nccl():
            restored = {HookGroup.GRAPH_LAUNCHES}
        for group in restored:
            if group is HookGroup.RUNTIME_WAITS:
                self._waits_end_ns = None
            self.program.close_group(group, is_closed=False)
            self._off.discard(group)
            self._attach_all(group)

    def _drop_redundant(self, processes: Entries, now_ns: int) -> None:
        """Detach the groups that report nothing of their own; waits of the runtime that are open may end before."""
        if self.program.mode == "perf":
            return
        for group in self._redundant.groups(processes, now_ns) - self._off:
            self._off.add(group)
            if group is HookGroup.RUNTIME_WAITS:
                self.program.close_group(group, is_closed=True)
                self._waits_end_ns = now_ns + _LAST_WAITS_NS
            else:
                self._detach_all(group)

    def _detach_runtime_waits(self, now_ns: int) -> None:
        if self._waits_end_ns is not None and now_ns >= self._waits_end_ns:
            self._waits_end_ns = None
            self._detach_all(HookGroup.RUNTIME_WAITS)

    def _detach_all(self, group: HookGroup) -> None:
        for key in self._files:
            self._detach(key, group)

    def _close_waits(self) -> bool:
        """Let the probes on waits ignore new calls. False: a call stays open, and nothing has changed.

        A wait of any length then has its return probed.
        """
        if self._has_open_wait(time.monotonic_ns() - _LONG_WAIT_NS):
            return False
        self.program.close_group(HookGroup.WAITS, is_closed=True)
        closed_ns = time.monotonic_ns()
        while self._has_open_wait(closed_ns):
            if time.monotonic_ns() - closed_ns > _LONG_WAIT_NS:
                self.program.close_group(HookGroup.WAITS, is_closed=False)
                return False
            time.sleep(_DRAINED_S)
        return True

    def _has_open_wait(self, before_ns: int) -> bool:
        """Whether a thread is inside a synchronise call that began before a time on the kernel's clock."""
        slots = self.program.process_rows().values["slots"]
        is_open = (slots["tid"] > 0) & (slots["class_op"] == Op.SYNC)
        return bool((is_open & (slots["class_since_ns"] <= before_ns)).any())

    def _attach_all(self, group: HookGroup) -> None:
        for key in list(self._files):
            try:
                self._attach(key, group)
            except KernelRefused as refusal:
                self._note_once(f"probes on high-frequency functions stay off: {refusal}")

    def _count_always(self, counts: ThreadCounts, now_ns: int) -> None:
        self._always.add_counts(counts, now_ns, cost_ratio=self.cost_ratio)
        if now_ns - self._always.period_ns >= _FIRST_PERIOD_NS:
            self._always_load = self._always.load(now_ns)
            self._always.begin_period(now_ns)

    def _is_quiet(self, now_ns: int) -> bool:
        """Whether no group can be due: all are on, no period is over, and the probes were hit rarely.

        Rarely means within the budget even if a single thread had all hits. Saves 0.1 % of a core with 64 threads
        (bench/bench_governor.py).
        """
        is_steady = all(
            state.is_on and not state.is_cycling and now_ns - state.period_ns < state.length_ns
            for state in self.groups.values()
        )
        if not is_steady or self.program.events.fill() > _EMPTY:
            return False
        total_ns = int(self.program.entry_costs_ns()[list(self.groups)].sum())
        way_ns, self._way_ns = total_ns - self._way_ns, total_ns
        elapsed_ns, self._quiet_ns = now_ns - self._quiet_ns, now_ns
        return way_ns >= 0 and way_ns / 2 * self.cost_ratio < _QUIET_SHARE * self.budget * elapsed_ns

    def _switch(self, group: HookGroup, budget: float, now_ns: int) -> None:
        state = self.groups[group]
        if self.program.mode == "perf":
            return
        if state.is_on and exceeds_budget(group, state, budget):
            if not self._set_on(group, is_on=False):
                return
            state.next_on_ns = off_until_ns(state, budget)
            if group is HookGroup.WAITS:
                state.next_on_ns = min(state.next_on_ns, now_ns + _MAX_WAITS_OFF_NS)
            state.is_cycling = True
            self._note_estimate(group, state, now_ns)
        elif state.is_on and now_ns - state.period_ns >= state.length_ns:
            state.begin_period(now_ns)
            state.is_cycling = False
        elif not state.is_on and now_ns >= state.next_on_ns:
            state.begin_period(now_ns)
            self._set_on(group, is_on=True)

    def _set_on(self, group: HookGroup, *, is_on: bool) -> bool:
        """Attach or detach the group's probes. It counts as on from the last attach to the first detach.

        False: waits are open, so their probes stay.
        """
        state, is_waits = self.groups[group], group is HookGroup.WAITS
        if not is_on:
            if is_waits and not self._close_waits():
                return False
            state.record_switch(self.clock_ns(), is_on=False)
            if is_waits:
                self.unprobed_waits.switch(are_probed=False)
            self._detach_all(group)
        else:
            if is_waits:
                self.program.close_group(group, is_closed=False)
            self._attach_all(group)
            state.record_switch(self.clock_ns(), is_on=True)
            if is_waits:
                self.unprobed_waits.switch(are_probed=True)
        return True

    def _attach(self, key: FileKey, group: HookGroup) -> None:
        fd, hooks = self._files[key]
        if hooks.get(group) and (key, group) not in self._links:
            self._links[key, group] = self.program.attach(f"/proc/self/fd/{fd}", hooks[group])

    def _detach(self, key: FileKey, group: HookGroup) -> None:
        if link := self._links.pop((key, group), None):
            self.program.release(link)

    def _limit_records(self, now_ns: int) -> None:
        """Reduce the records when the ring fills: first by higher thresholds, then without hot probes for a while."""
        fill = self.program.events.fill()
        self._n_full = self._n_full + 1 if fill > _FULL else 0
        self._n_empty = self._n_empty + 1 if fill < _EMPTY else 0
        if self._n_full >= _N_FULL:
            self._n_full = 0
            self._set_thresholds(min(self._n_raised + 1, _MAX_RAISES))
            hot = self.groups[HookGroup.HOT]
            if hot.is_on and self._n_raised > 1:
                hot.next_on_ns, hot.is_cycling = now_ns + _FULL_RING_NS, True
                self._set_on(HookGroup.HOT, is_on=False)
        elif self._n_empty >= _N_EMPTY and self._n_raised:
            self._n_empty = 0
            self._set_thresholds(self._n_raised - 1)

    def _set_thresholds(self, n_times: int) -> None:
        self._n_raised = n_times
        self.program.raise_thresholds(n_times)
        self._notes.append(
            f"the threshold of slow calls was raised to {1 << n_times} times its default: too many slow calls to record"
            if n_times
            else "the threshold of slow calls is back to its default"
        )

    def _note_estimate(self, group: HookGroup, state: Group, now_ns: int) -> None:
        functions = _FUNCTIONS[group]
        share = state.spent / max(now_ns - state.period_ns, 1)
        self._note_once(
            f"counts of {functions} are estimates: counting all of them would cost {share:.1%} of a thread's time"
        )

    def _note_once(self, text: str) -> None:
        subject = text.partition(":")[0]
        if subject not in self._noted:
            self._noted.add(subject)
            self._notes.append(text)


def counts_by_group(processes: Entries, groups: Sequence[HookGroup]) -> dict[HookGroup, ThreadCounts]:
    """Counts of each group so far, by process and thread. processes: kernel.PROCESS by process.

    groups: without GRAPH_LAUNCHES, which are not counted.
    """
    slots = processes.values["slots"]
    tids = slots["tid"]
    process_index, slot = np.nonzero(tids)
    threads = list(
        zip(processes.keys[process_index].tolist(), tids[process_index, slot].tolist(), strict=True)
    )
    columns = [slots[name][process_index, slot].tolist() for name in ("way_ns", "inside_ns", "scheduler_ns")]
    permanent = (HookGroup.ALWAYS, HookGroup.RUNTIME_WAITS)
    return {
        group: {
            thread: Count(sum(way_ns[member] for member in permanent), inside_ns[group], scheduler_ns)
            if group is HookGroup.ALWAYS
            else Count(way_ns[group], inside_ns[group])
            for thread, way_ns, inside_ns, scheduler_ns in zip(threads, *columns, strict=True)
        }
        for group in groups
    }
