"""The reason for the delay of a late request: one rule for each, tried in order.

A rule names a reason if it covers at least HALF of the late interval. Rules on the machine come before rules on the
engine's code, and these before rules on other requests: a stopped process also queues its requests.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.buckets import text_of
from stallscope.diagnose.processes.code_locations import COMPILES, LOCKS, is_own, matches
from stallscope.diagnose.serving.engine_threads import BUSY, SENDS, WRITES, is_throttled_row, overlap_ns
from stallscope.diagnose.serving.late_delay import HALF, Delay
from stallscope.diagnose.serving.late_requests import MANY_WAITING, is_long_prompt, n_before
from stallscope.diagnose.serving.own_metrics import pressure
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category

_MOST = 0.75


@dataclass(frozen=True)
class Reason:
    """cause: of diagnose/causes. pid: the process that held the request; 0: none, as for a slow client."""

    cause: str
    pid: int
    evidence: CauseEvidence


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
    return _preempted_by_others(delay, delay.pid_of(foreign))


def preempted_holder(delay: Delay) -> Reason | None:
    """Another program had the CPU of the threads that held the request, one after the other.

    A thread that waits for the interpreter lock of a preempted thread waits for the CPU.
    """
    times = Counter[int]()
    for each in delay.path:
        if each.category == Category.PREEMPTED and each.by_pid > 0 and each.by_pid not in delay.threads.pids:
            times[each.pid] += each.ns
    if times.total() < delay.min_ns:
        times = delay.waits_for_cpu_ns
    if times.total() < delay.min_ns or delay.is_late_by_work:
        return None
    return _preempted_by_others(delay, times.most_common(1)[0][0])


def _preempted_by_others(delay: Delay, pid: int) -> Reason:
    foreign = delay.foreign
    names = Counter[str]()
    for row, ns in zip(foreign, overlap_ns(foreign, delay.begin_ns, delay.end_ns).tolist(), strict=True):
        names[text_of(row, "by_comm")] += ns if row["by_comm"] else 0
    by = [name for name, ns in names.most_common(3) if ns]
    return Reason("cpu_preemption", pid, CauseEvidence(by=by or None))


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
    preempted_holder,
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


def _writes_to_pipe(delay: Delay) -> bool:
    """Whether a pipe was full, by samples or because the socket of the request was still empty."""
    rows = delay.of_holder(Category.NET)
    is_before_response = delay.late.part == "first" and np.isin(rows["syscall_nr"], WRITES).any()
    return bool(delay.full_pipes) or bool(is_before_response)
