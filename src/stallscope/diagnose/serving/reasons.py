"""The reason for the delay of a late request: one rule for each, tried in order.

A rule names a reason if it covers at least HALF of the late interval. Rules on the machine come before rules on the
engine's code, and these before rules on other requests: a stopped process also queues its requests.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.buckets import text_of
from stallscope.diagnose.processes.code_locations import COMPILES, LOCKS, is_own, matches
from stallscope.diagnose.serving.engine_threads import (
    BUSY,
    SENDS,
    WRITES,
    Threads,
    is_throttled_row,
    most_of_a_thread,
    overlap_ns,
)
from stallscope.diagnose.serving.late_requests import MANY_WAITING, Late, is_long_prompt, n_before
from stallscope.diagnose.serving.own_metrics import pressure
from stallscope.diagnose.serving.request_path import Part, Segment, parts, path
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category

HALF, _MOST = 0.5, 0.75
_PIPE = b"full pipe"


@dataclass(frozen=True)
class Reason:
    """cause: of diagnose/causes. pid: the process that held the request; 0: none, as for a slow client."""

    cause: str
    pid: int
    evidence: CauseEvidence


@dataclass(frozen=True)
class Delay:
    """A late request with its context. requests: of the same engine. off: of its threads, in the late interval.

    late_spans: all late intervals, disjoint: int64 (n, 2).
    """

    late: Late
    threads: Threads
    requests: Array
    off: Array
    late_spans: Array = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def begin_ns(self) -> int:
        return self.late.begin_ns

    @property
    def end_ns(self) -> int:
        return self.late.end_ns

    @property
    def min_ns(self) -> float:
        return HALF * self.late.excess_ns

    @cached_property
    def running_ns(self) -> int:
        """Time that the thread which writes the response spent on the CPU."""
        row = self.late.request
        tid = row["writer_tid"] or row["tid"]
        off = self.off[(self.off["pid"] == row["pid"]) & (self.off["tid"] == tid)]
        return max(self.end_ns - self.begin_ns - self.longest_ns(off), 0)

    @cached_property
    def is_holder_known(self) -> bool:
        """Whether the thread that writes the response was off the CPU at times in the late interval, or was sampled.

        A thread without rows may still wait: a wait has its row when the thread is woken.
        """
        row = self.late.request
        tid = row["writer_tid"] or row["tid"]
        off, sampled = self.off, self.threads.sampled(self.begin_ns, self.end_ns)
        is_off = (off["pid"] == row["pid"]) & (off["tid"] == tid)
        is_sampled = (sampled["owner_pid"] == row["pid"]) & (sampled["tid"] == tid)
        busy_ns = int(sampled["ns"][is_sampled & np.isin(sampled["category"], BUSY)].sum())
        return bool(is_off.any() or 4 * busy_ns >= self.min_ns)

    @cached_property
    def path(self) -> list[Segment]:
        """The threads that held the request in the late interval, one after the other."""
        row = self.late.request
        tid = row["tid"] if self.late.part == "pickup" else row["writer_tid"] or row["tid"]
        thread = int(row["pid"]), int(tid)
        return path(self.threads.waits, self.threads.pids, thread, self.begin_ns, self.end_ns)

    @property
    def leaves_front_end(self) -> bool:
        """Whether the process with the connection hands the request over to another process."""
        return any(each.pid != self.late.request["pid"] for each in self.path)

    @property
    def holder_pid(self) -> int:
        """The process that held the request for most of the late interval."""
        times = Counter({int(self.late.request["pid"]): 0})
        for each in self.path:
            times[each.pid] += each.ns
        return times.most_common(1)[0][0]

    def parts(self, *, has_front_end: bool) -> list[Part]:
        """The parts of the late interval, and the states of the threads that held the request in each."""
        front_pid = int(self.late.request["pid"]) if has_front_end else 0
        served_ns = self._served_ns if self.late.part == "first" else None
        return parts(self.path, front_pid, part=self.late.part, served_ns=served_ns, sends=SENDS)

    @property
    def _served_ns(self) -> int:
        """The engine began to work on the request: at once, or after the earlier requests had their first token."""
        rows, row = self.requests, self.late.request
        waiting = rows[(rows["ts_ns"] < row["ts_ns"]) & (rows["first_ns"] > self.begin_ns)]
        if not len(waiting):
            return self.begin_ns
        first_ns = waiting["first_ns"][waiting["first_ns"] < self.end_ns].max(initial=self.begin_ns)
        return max(int(first_ns), self.end_ns - self.late.typical_ns)

    @property
    def is_late_by_work(self) -> bool:
        """Whether the request would be late on an idle machine: its thread has that much work to do."""
        return self.is_holder_known and self.running_ns - self.late.typical_ns >= self.late.min_late_ns

    def of_holder(self, *categories: Category) -> Array:
        """Intervals off the CPU of the threads that read the request or write the response."""
        row = self.late.request
        is_holder = (self.off["pid"] == row["pid"]) & np.isin(
            self.off["tid"], (row["tid"], row["writer_tid"])
        )
        return self.off[is_holder & np.isin(self.off["category"], categories)]

    @cached_property
    def is_handed_over(self) -> bool:
        """Whether the threads of the request wait for another thread or process: for a message, or for a lock."""
        waits = self.of_holder(Category.NET, Category.LOCK)
        return self.longest_ns(waits[~np.isin(waits["syscall_nr"], SENDS)]) >= self.min_ns

    def of_others(self, *categories: Category) -> Array:
        """Intervals of the other threads that begin and end within the late interval; none if the holder works.

        An idle thread waits from before the late interval until after it, or waits as often at other times.
        """
        if not self.is_handed_over:
            return self.off[:0]
        rows = self.off[np.isin(self.off["category"], categories)]
        slack_ns = int((1 - HALF) * (self.end_ns - self.begin_ns) / 2)
        is_inside = (rows["ts_ns"] >= self.begin_ns - slack_ns) & (
            rows["ts_ns"] + rows["duration_ns"] <= self.end_ns + slack_ns
        )
        rows = rows[is_inside]
        is_cause = np.zeros(len(rows), bool)
        for tid in np.unique(rows["tid"]):
            own = rows["tid"] == tid
            longest = rows[own][rows[own]["duration_ns"].argmax()]
            if self.longest_ns(rows[own]) >= self.min_ns:
                is_cause |= own & (not self.threads.is_habit(longest, self.late_spans))
        return rows[is_cause]

    def of_engine(self, *categories: Category) -> Array:
        return self.off[np.isin(self.off["category"], categories)]

    @cached_property
    def foreign(self) -> Array:
        """Intervals in which another program had the CPU of a thread of the engine."""
        rows = self.of_engine(Category.PREEMPTED)
        return rows[~np.isin(rows["by_pid"], self.threads.pids)]

    @cached_property
    def full_pipes(self) -> list[bytes]:
        """The full pipes of the samples in the late interval, each with its reader."""
        rows = self.threads.sampled(self.begin_ns, self.end_ns)
        return [text for text in rows["object"].tolist() if text.startswith(_PIPE)]

    def longest_ns(self, rows: Array) -> int:
        return most_of_a_thread(rows, self.begin_ns, self.end_ns)

    def line(self, rows: Array) -> str | None:
        """The line of code of these intervals: by their stacks, otherwise by samples of their threads."""
        line = self.threads.line_of(rows, lambda row: int(row["duration_ns"]))
        return line or self.threads.sampled_line(self.begin_ns, self.end_ns, rows) or None

    def pid_of(self, rows: Array) -> int:
        """The process with most of the time of these rows."""
        times = Counter[int]()
        for pid, ns in zip(
            rows["pid"].tolist(), overlap_ns(rows, self.begin_ns, self.end_ns).tolist(), strict=True
        ):
            times[pid] += ns
        return times.most_common(1)[0][0]


def stopped(delay: Delay) -> Reason | None:
    rows = delay.of_engine(Category.STOPPED)
    if delay.longest_ns(rows) < delay.min_ns:
        return None
    return Reason("process_stopped", delay.pid_of(rows), CauseEvidence())


def quota(delay: Delay) -> Reason | None:
    """The control group had used up its CPU quota."""
    rows = delay.of_engine(Category.PREEMPTED)
    throttled = rows[is_throttled_row(rows)]
    if delay.longest_ns(throttled) >= delay.min_ns or (
        delay.longest_ns(rows) >= delay.min_ns and delay.threads.is_throttled(delay.begin_ns, delay.end_ns)
    ):
        return Reason("cpu_quota", delay.pid_of(rows), CauseEvidence())
    return None


def preemption(delay: Delay) -> Reason | None:
    """Another program had the CPU. Threads of the engine that compete with each other are not a reason."""
    foreign = delay.foreign
    if delay.longest_ns(foreign) < delay.min_ns or delay.is_late_by_work:
        return None
    names = Counter[str]()
    for row, ns in zip(foreign, overlap_ns(foreign, delay.begin_ns, delay.end_ns).tolist(), strict=True):
        names[text_of(row, "by_comm")] += ns if row["by_comm"] else 0
    by = [name for name, ns in names.most_common(3) if ns]
    return Reason("cpu_preemption", delay.pid_of(foreign), CauseEvidence(by=by or None))


def slow_client(delay: Delay) -> Reason | None:
    """The client does not read the response, or sends its request slowly."""
    row = delay.late.request
    sending = int(row["complete_ns"] - row["read_ns"]) if row["complete_ns"] != UNKNOWN else 0
    waits = [int(row["blocked_ns"])] if delay.late.part != "pickup" else []
    waits += [sending] if delay.late.part == "first" else []
    blocked = delay.of_holder(Category.NET)
    blocked = blocked[np.isin(blocked["syscall_nr"], SENDS)]
    if not _writes_to_pipe(delay):
        waits.append(delay.longest_ns(blocked))
    return Reason("slow_client", 0, CauseEvidence()) if max(waits, default=0) >= delay.min_ns else None


def full_pipe(delay: Delay) -> Reason | None:
    rows = delay.of_holder(Category.NET, Category.IO)
    rows = rows[np.isin(rows["syscall_nr"], SENDS)]
    if delay.longest_ns(rows) < delay.min_ns or not _writes_to_pipe(delay):
        return None
    pipes = delay.full_pipes
    reader = pipes[0].decode("utf-8", "replace").removeprefix("full pipe read by ") if pipes else None
    return Reason("full_pipe", delay.pid_of(rows), CauseEvidence(line=delay.line(rows), reader=reader))


def disk(delay: Delay) -> Reason | None:
    rows = delay.of_engine(Category.IO)
    if delay.longest_ns(rows) < delay.min_ns:
        return None
    return Reason("block_io", delay.pid_of(rows), CauseEvidence(line=delay.line(rows)))


def page_faults(delay: Delay) -> Reason | None:
    rows = delay.of_engine(Category.FAULT)
    if delay.longest_ns(rows) < delay.min_ns:
        return None
    return Reason("page_fault", delay.pid_of(rows), CauseEvidence(line=delay.line(rows)))


def compilation(delay: Delay) -> Reason | None:
    """A process of the engine compiled code: for a new shape, or for the first request with an option."""
    rows = delay.threads.sampled(delay.begin_ns, delay.end_ns)
    rows = rows[np.isin(rows["category"], (*BUSY, Category.CHILD)) & (rows["stack"] != UNKNOWN)]
    stacks = delay.threads.trace.stacks
    times = Counter[int]()
    for row in rows:
        if matches(stacks.get(int(row["stack"]), ()), COMPILES):
            times[int(row["owner_pid"])] += int(row["ns"])
    if not times or times.total() < delay.min_ns:
        return None
    return Reason("recompilation", times.most_common(1)[0][0], CauseEvidence())


def sleep(delay: Delay) -> Reason | None:
    rows = delay.of_holder(Category.SLEEP)
    if delay.longest_ns(rows) < delay.min_ns:
        rows = delay.of_others(Category.SLEEP)
    if not len(rows):
        return None
    return Reason("host_sleep", delay.pid_of(rows), CauseEvidence(line=delay.line(rows)))


def long_prompt(delay: Delay) -> Reason | None:
    """Another request with a much longer prompt was worked on before its first token."""
    rows, own = delay.requests, delay.late.request
    others = rows[is_long_prompt(rows) & (rows["first_ns"] != UNKNOWN)]
    others = others[(others["ts_ns"] != own["ts_ns"]) | (others["pid"] != own["pid"])]
    shared = np.minimum(others["first_ns"], delay.end_ns) - np.maximum(others["read_ns"], delay.begin_ns)
    if not len(others) or shared.max() < delay.min_ns:
        return None
    longest = others[shared.argmax()]
    text = f"{longest['path'].decode('utf-8', 'replace')} with {int(longest['request_bytes']):,} bytes"
    running = delay.threads.running(delay.begin_ns, delay.end_ns, pid=delay.holder_pid)
    line = running.line if running and is_own(running.line) else None
    return Reason("long_prompt", delay.holder_pid, CauseEvidence(work=text, line=line))


def kv_cache(delay: Delay) -> Reason | None:
    """The engine's own metrics show that its KV cache was full while the request waited."""
    rows, own = delay.threads.trace.engine_metrics, delay.late.request
    rows = rows[(rows["node"] == own["node"]) & np.isin(rows["pid"], delay.threads.pids)]
    state = pressure(rows, delay.begin_ns, delay.end_ns)
    if not state or not state.is_full:
        return None
    return Reason("kv_cache", int(rows["pid"][-1]), CauseEvidence(work=state.text()))


def capacity(delay: Delay) -> Reason | None:
    """The request waited behind several earlier requests while the engine completed responses at a steady rate."""
    rows, own = delay.requests, delay.late.request
    if delay.late.part == "gap" or n_before(rows, np.array([own["ts_ns"]]))[0] < MANY_WAITING:
        return None
    done_ns = np.sort(rows["end_ns"][(rows["end_ns"] > delay.begin_ns) & (rows["end_ns"] < delay.end_ns)])
    pauses_ns = np.diff(np.concatenate([[delay.begin_ns], done_ns, [delay.end_ns]]))
    if len(done_ns) < MANY_WAITING or pauses_ns.max() > HALF * (delay.end_ns - delay.begin_ns):
        return None
    rate = round(len(done_ns) / (delay.end_ns - delay.begin_ns) * 1e9, 2)
    return Reason("capacity", int(own["pid"]), CauseEvidence(calls_per_second=rate))


def interpreter_lock(delay: Delay) -> Reason | None:
    """A thread waits for a lock while another Python thread of its process runs."""
    rows = delay.of_holder(Category.LOCK)
    if delay.longest_ns(rows) < delay.min_ns:
        rows = delay.of_others(Category.LOCK)
    if not len(rows):
        return None
    pid = delay.pid_of(rows)
    waiting = np.unique(rows["tid"]).tolist()
    running = delay.threads.running(delay.begin_ns, delay.end_ns, pid=pid, without=waiting)
    if not running or delay.longest_ns(delay.foreign) > _MOST * delay.longest_ns(rows):
        return None
    evidence = CauseEvidence(line=running.line, holder=running.line, waits_at=delay.line(rows))
    return Reason("gil", pid, evidence)


def computation(delay: Delay) -> Reason | None:
    """The thread that serves the request was on the CPU."""
    row, threads = delay.late.request, delay.threads
    pid, span = int(row["pid"]), (delay.begin_ns, delay.end_ns)
    if not delay.is_holder_known or (delay.running_ns < delay.min_ns and not delay.is_late_by_work):
        return None
    # A thread for each connection is sampled rarely, the loop of the engine always.
    running = (
        threads.running(*span, pid=pid, only=(int(row["tid"]), int(row["writer_tid"])))
        or threads.running(*span, pid=pid, without=threads.always_busy(pid))
        or threads.running(*span, pid=pid)
    )
    tids = {int(row["tid"]), int(row["writer_tid"])}
    line = (
        running.line
        if running
        else threads.frequent_line(*span, pid=pid, tids=tids, category=Category.ON_CPU)
    )
    return Reason("host_compute", pid, CauseEvidence(line=line or None))


def computation_elsewhere(delay: Delay) -> Reason | None:
    """Another thread or process of the engine computed while the request waited for it."""
    if not delay.is_handed_over:
        return None
    row = delay.late.request
    for pid in delay.threads.pids:
        waiting = (int(row["tid"]), int(row["writer_tid"]))
        running = delay.threads.running(delay.begin_ns, delay.end_ns, pid=pid, without=waiting)
        if running and running.excess_ns >= delay.min_ns:
            return Reason("host_compute", pid, CauseEvidence(line=running.line))
    return None


_ON_PATH = {
    Category.ON_CPU: "host_compute",
    Category.SLEEP: "host_sleep",
    Category.STOPPED: "process_stopped",
    Category.IO: "block_io",
    Category.FAULT: "page_fault",
    Category.CHILD: "child_program",
}


def held(delay: Delay) -> Reason | None:
    """A process of the engine that held the request for most of the delay, in one state."""
    times = Counter[tuple[int, Category]]()
    for each in delay.path:
        if each.category in _ON_PATH:
            times[each.pid, each.category] += each.ns
    if not times:
        return None
    (pid, category), ns = times.most_common(1)[0]
    if ns < delay.min_ns:
        return None
    tids = {each.tid for each in delay.path if (each.pid, each.category) == (pid, category)}
    line = delay.threads.frequent_line(delay.begin_ns, delay.end_ns, pid=pid, tids=tids, category=category)
    return Reason(_ON_PATH[category], pid, CauseEvidence(line=line or None))


def other_thread(delay: Delay) -> Reason | None:
    """A thread of another process of the engine ran for most of the delay, and runs less at other times.

    The path ends at a thread that the ledger does not follow, as in a server with more threads than it follows.
    """
    if not any(each.category == Category.NONE for each in delay.path):
        return None
    others = [pid for pid in delay.threads.pids if pid != delay.late.request["pid"]]
    if not (found := _thread_that_ran(delay, others, without=())):
        return None
    return Reason("host_compute", found[0], CauseEvidence(line=found[1]))


def own_thread(delay: Delay) -> Reason | None:
    """A thread of the process that held the request ran, while the holder waited for the lock, and then for a CPU.

    With a few CPUs, the thread that has the interpreter lock also takes the CPU of the thread that waits for it.
    """
    waits = [
        each
        for each in delay.path
        if each.category in (Category.LOCK, Category.PREEMPTED) and not each.is_pickup
    ]
    times = Counter[int]()
    for each in waits:
        times[each.pid] += each.ns
    if not times or times.total() < delay.min_ns:
        return None
    pid = times.most_common(1)[0][0]
    foreign = delay.foreign[delay.foreign["by_pid"] != UNKNOWN]
    has_waited_for_lock = any(each.category == Category.LOCK for each in waits if each.pid == pid)
    if not has_waited_for_lock or delay.longest_ns(foreign) >= delay.min_ns:
        return None
    found = _thread_that_ran(delay, [pid], without={each.tid for each in waits})
    return Reason("gil", pid, CauseEvidence(line=found[1], holder=found[1])) if found else None


def _thread_that_ran(
    delay: Delay, pids: Collection[int], *, without: Collection[int]
) -> tuple[int, str] | None:
    """Process and line of the thread that ran most in the delay, for most of it, and runs less at other times."""
    waits, span = delay.threads.waits, (delay.begin_ns, delay.end_ns)
    running = {
        (pid, tid): waits.running_ns(tid, *span)
        for pid, tid, (since_ns, until_ns) in waits.threads()
        if pid in pids and tid not in without and since_ns < span[0] and until_ns > span[1]
    }
    for pid, tid in sorted(running, key=lambda key: -running[key]):
        line = delay.threads.frequent_line(*span, pid=pid, tids=[tid], category=Category.ON_CPU)
        share = running[pid, tid] / (span[1] - span[0])
        if running[pid, tid] >= delay.min_ns and line and _share_outside(delay, tid) < HALF * share:
            return pid, line
    return None


def _share_outside(delay: Delay, tid: int) -> float:
    """The share of the time outside the late intervals in which a thread runs."""
    waits = delay.threads.waits
    since_ns, until_ns = next(span for _, each, span in waits.threads() if each == tid)
    late = np.clip(delay.late_spans, since_ns, until_ns)
    inside_ns = sum(waits.running_ns(tid, begin, end) for begin, end in late.tolist() if end > begin)
    outside_ns = waits.running_ns(tid, since_ns, until_ns) - inside_ns
    return outside_ns / max(until_ns - since_ns - int((late[:, 1] - late[:, 0]).sum()), 1)


def lock(delay: Delay) -> Reason | None:
    """A thread waited for a lock, and no thread that would hold it ran."""
    rows = delay.of_others(Category.LOCK)
    rows = rows[rows["stack"] != UNKNOWN]
    line = delay.line(rows)
    if not line or LOCKS.search(line):
        return None
    return Reason("lock_contention", delay.pid_of(rows), CauseEvidence(line=line))


RULES: tuple[Callable[[Delay], Reason | None], ...] = (
    stopped,
    quota,
    slow_client,
    full_pipe,
    disk,
    page_faults,
    compilation,
    sleep,
    long_prompt,
    kv_cache,
    capacity,
    interpreter_lock,
    own_thread,
    preemption,
    computation,
    computation_elsewhere,
    held,
    other_thread,
    lock,
)


def reason_of(delay: Delay) -> Reason:
    """The reason for a delay; the cause "unknown" where no rule applies."""
    for rule in RULES:
        if reason := rule(delay):
            return reason
    return Reason("unknown", delay.holder_pid, CauseEvidence())


def merged(spans: list[tuple[int, int]]) -> Array:
    """The union of intervals: disjoint intervals in order, int64 (n, 2)."""
    out: list[list[int]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return np.array(out, np.int64).reshape(-1, 2)


def _writes_to_pipe(delay: Delay) -> bool:
    """Whether a pipe was full, by samples or because the socket of the request was still empty."""
    rows = delay.of_holder(Category.NET)
    is_before_response = delay.late.part == "first" and np.isin(rows["syscall_nr"], WRITES).any()
    return bool(delay.full_pipes) or bool(is_before_response)
