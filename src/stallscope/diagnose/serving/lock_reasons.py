"""A late request waits for a lock: the interpreter lock, a lock of the process, a lock on a file."""

from collections import Counter

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.code_locations import LOCKS
from stallscope.diagnose.serving.engine_threads import BUSY, FILE_LOCKS, Running
from stallscope.diagnose.serving.late_delay import Delay, RunningThread
from stallscope.diagnose.serving.late_reason import Reason
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category

_MOST = 0.75
"""Where another program had the CPU for this share of the wait for a lock, the lock is not the reason."""


def interpreter_lock(delay: Delay) -> Reason | None:
    """A thread waits for a lock while another Python thread of its process runs.

    The thread that holds the lock runs for half of the delay, and less at other times; only the loop of an engine also
    runs at other times. A lock that other requests do not wait for delays a request only if its own thread waits.
    """
    rows = delay.of_holder(Category.LOCK)
    if delay.longest_ns(rows) < delay.min_ns:
        if not delay.is_path_known and delay.has_others_in_time:
            return None
        rows = delay.of_others(Category.LOCK)
    if not len(rows):
        return None
    pid = delay.pid_of(rows)
    waiting = np.unique(rows["tid"]).tolist()
    if delay.longest_ns(delay.foreign) > _MOST * delay.longest_ns(rows):
        return None
    ran = (
        _on_path(delay, pid, waiting)
        or delay.thread_that_ran([pid], without=waiting, is_sampled=True)
        or _sampled_at_work(delay, pid, waiting)
    )
    if not ran:
        return None
    return Reason("gil", pid, CauseEvidence(line=ran.line, holder=ran.line, waits_at=delay.line(rows)))


def _on_path(delay: Delay, pid: int, waiting: list[int]) -> RunningThread | None:
    """The thread that released the lock, if it had the lock for half of the delay and was sampled at work for as long.

    Other threads may run at the same time without the lock, in native code.
    """
    span, times = (delay.begin_ns, delay.end_ns), Counter[int]()
    for each in delay.path:
        if each.pid == pid and each.tid not in waiting and each.category in (Category.ON_CPU, Category.NONE):
            times[each.tid] += each.ns
    if not times:
        return None
    tid, ns = times.most_common(1)[0]
    sampled = delay.threads.sampled(*span)
    is_busy = (sampled["owner_pid"] == pid) & (sampled["tid"] == tid) & np.isin(sampled["category"], BUSY)
    if min(ns, int(sampled["ns"][is_busy].sum())) < delay.min_ns:
        return None
    line = delay.threads.frequent_line(*span, pid=pid, tids=[tid], category=Category.ON_CPU, is_sampled=True)
    return RunningThread(pid, line) if line else None


def _sampled_at_work(delay: Delay, pid: int, waiting: list[int]) -> Running | None:
    """The code of a thread that ran instead, by samples: of the loop of an engine if no other thread explains it.

    Many threads that run the same function, each for a short time, do not hold the lock.
    """
    span, threads = (delay.begin_ns, delay.end_ns), delay.threads
    loops = threads.always_busy(pid)
    sampled = threads.sampled(*span)
    tids = np.setdiff1d(sampled["tid"][sampled["pid"] == pid], [*waiting, *loops]).tolist()
    each_running = [threads.running(*span, pid=pid, only=[tid]) for tid in tids]
    running = max(filter(None, each_running), key=lambda each: each.excess_ns, default=None)
    if running and running.excess_ns >= delay.min_ns:
        return running
    busy = [tid for tid in loops if threads.busy_ns(*span, pid=pid, tid=tid) >= delay.min_ns]
    return threads.running(*span, pid=pid, without=waiting, only=busy)


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
    at_lock = delay.of_engine(Category.LOCK)
    tids = [each.tid for each in waits if each.pid == pid]
    has_waited_for_lock = bool(np.isin(at_lock["tid"], tids).any())
    own = delay.own_running_thread
    if not has_waited_for_lock or (delay.longest_ns(foreign) >= delay.min_ns and not own):
        return None
    ran = delay.thread_that_ran([pid], without={each.tid for each in waits}) or own
    if not ran or ran.pid != pid or not ran.line:
        return None
    return Reason("gil", pid, CauseEvidence(line=ran.line, holder=ran.line))


def file_lock(delay: Delay) -> Reason | None:
    """The thread with the request waited for a lock on a file that a process outside the engine held.

    The process that ended the wait held the lock. If this process is unknown, a sample of the wait must name the lock.
    """
    on_path = [each.tid for each in delay.path if each.category == Category.OTHER_OFF]
    rows = delay.of_engine(Category.OTHER_OFF)
    rows = rows[np.isin(rows["syscall_nr"], FILE_LOCKS) & ~np.isin(rows["waker_pid"], delay.threads.pids)]
    rows = rows[np.isin(rows["tid"], on_path)] if delay.is_path_known else delay.without_habits(rows)
    with_object = [tid for tid in np.unique(rows["tid"]) if delay.object_of(rows[rows["tid"] == tid])]
    rows = rows[(rows["waker_pid"] != UNKNOWN) | np.isin(rows["tid"], with_object)]
    if delay.longest_ns(rows) < delay.min_ns:
        return None
    name = delay.object_of(rows)
    return Reason("file_lock", delay.pid_of(rows), CauseEvidence(line=delay.line(rows), lock=name or None))


def lock(delay: Delay) -> Reason | None:
    """A thread waited for a lock, and no thread that would hold it ran."""
    rows = delay.of_others(Category.LOCK)
    rows = rows[rows["stack"] != UNKNOWN]
    line = delay.line(rows)
    if not line or LOCKS.search(line):
        return None
    return Reason("lock_contention", delay.pid_of(rows), CauseEvidence(line=line))
