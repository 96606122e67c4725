"""The machine delays a late request: stopped processes, quotas, other programs, disks, page faults."""

from collections import Counter

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.buckets import text_of
from stallscope.diagnose.serving.engine_threads import is_throttled_row, overlap_ns
from stallscope.diagnose.serving.late_delay import Delay
from stallscope.diagnose.serving.late_reason import Reason
from stallscope.events.names import Category


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
    if times.total() < delay.min_ns or delay.is_late_by_work or delay.own_running_thread:
        return None
    return _preempted_by_others(delay, times.most_common(1)[0][0])


def preemption(delay: Delay) -> Reason | None:
    """Another program had the CPU. Threads of the engine that compete with each other are not a reason."""
    foreign = delay.foreign
    if delay.longest_ns(foreign) < delay.min_ns or delay.is_late_by_work or delay.own_running_thread:
        return None
    return _preempted_by_others(delay, delay.pid_of(foreign))


def _preempted_by_others(delay: Delay, pid: int) -> Reason:
    foreign = delay.foreign
    names = Counter[str]()
    for row, ns in zip(foreign, overlap_ns(foreign, delay.begin_ns, delay.end_ns).tolist(), strict=True):
        names[text_of(row, "by_comm")] += ns if row["by_comm"] else 0
    by = [name for name, ns in names.most_common(3) if ns]
    return Reason("cpu_preemption", pid, CauseEvidence(by=by or None))
