"""Code of the engine delays a late request: computation, a sleep, a compilation, a program that it starts."""

from collections import Counter

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.code_locations import COMPILES, matches
from stallscope.diagnose.serving.engine_threads import BUSY
from stallscope.diagnose.serving.late_delay import Delay
from stallscope.diagnose.serving.late_reason import Reason
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category


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
    rows = rows[2 * rows["duration_ns"] >= rows["duration_ns"].max()]
    return Reason("host_sleep", delay.pid_of(rows), CauseEvidence(line=delay.line(rows)))


def computation(delay: Delay) -> Reason | None:
    """The thread that serves the request was on the CPU."""
    threads, tids = delay.threads, delay.holder_tids
    pid, span = int(delay.late.request["pid"]), (delay.begin_ns, delay.end_ns)
    if not delay.is_holder_known or (delay.running_ns < delay.min_ns and not delay.is_late_by_work):
        return None
    # A thread for each connection is sampled rarely, the loop of the engine always.
    running = (
        threads.running(*span, pid=pid, only=tids)
        or threads.running(*span, pid=pid, without=threads.always_busy(pid))
        or threads.running(*span, pid=pid)
    )
    line = (
        running.line
        if running
        else threads.frequent_line(*span, pid=pid, tids=tids, category=Category.ON_CPU)
    )
    return Reason("host_compute", pid, CauseEvidence(line=line or None))


def computation_elsewhere(delay: Delay) -> Reason | None:
    """Another thread or process of the engine computed while the request waited for it.

    The ledger knows exactly how long the threads ran that it follows; samples are few in each second.
    """
    if not delay.is_handed_over:
        return None
    if ran := delay.thread_that_ran(delay.threads.pids, without=delay.holder_tids, is_sampled=True):
        return Reason("host_compute", ran.pid, CauseEvidence(line=ran.line))
    for pid in delay.threads.pids:
        running = delay.threads.running(delay.begin_ns, delay.end_ns, pid=pid, without=delay.holder_tids)
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
    if not (ran := delay.thread_that_ran(others, without=())):
        return None
    return Reason("host_compute", ran.pid, CauseEvidence(line=ran.line))
