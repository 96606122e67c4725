"""A late request waits for the other end of a socket or a pipe: its client, a log reader, another service."""

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.serving.engine_threads import POLLS, RECEIVES, SENDS, WRITES
from stallscope.diagnose.serving.late_delay import Delay
from stallscope.diagnose.serving.late_reason import Reason
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category


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
    """The thread with the request wrote to a full pipe, or a thread of the engine that the request waited for."""
    rows = delay.of_holder(Category.NET, Category.IO)
    rows = rows[np.isin(rows["syscall_nr"], SENDS)]
    if delay.longest_ns(rows) < delay.min_ns or not _writes_to_pipe(delay):
        rows = _writes_of_others(delay)
    if delay.longest_ns(rows) < delay.min_ns:
        return None
    pipes = delay.full_pipes
    reader = pipes[0].decode("utf-8", "replace").removeprefix("full pipe read by ") if pipes else None
    return Reason("full_pipe", delay.pid_of(rows), CauseEvidence(line=delay.line(rows), reader=reader))


def _writes_of_others(delay: Delay) -> Array:
    """Writes of other threads, in processes that were seen at a full pipe and whose threads write no responses."""
    rows = delay.of_others(Category.NET)
    rows = rows[np.isin(rows["syscall_nr"], WRITES)]
    if delay.full_pipes:
        return rows
    writers = np.union1d(delay.requests["tid"], delay.requests["writer_tid"])
    return rows[np.isin(rows["pid"], delay.threads.at_full_pipes) & ~np.isin(rows["tid"], writers)]


def other_service(delay: Delay) -> Reason | None:
    """The thread with the request waited for an answer of a process outside the engine: of a store, or of a transfer.

    The thread of an event loop waits in epoll also while no request waits, so such a wait is not evidence.
    """
    if delay.late.part == "pickup":
        return None
    rows = delay.of_engine(Category.NET)
    rows = rows[~np.isin(rows["waker_pid"], delay.threads.pids)]
    on_path = [each.tid for each in delay.path if each.category == Category.NET]
    receives = np.isin(rows["syscall_nr"], RECEIVES) & np.isin(rows["tid"], on_path)
    polls = np.isin(rows["syscall_nr"], POLLS) & np.isin(rows["tid"], delay.holder_tids)
    rows = rows[receives | polls]
    if delay.longest_ns(rows) < delay.min_ns and not delay.is_path_known:
        others = delay.of_others(Category.NET)
        is_answer = np.isin(others["syscall_nr"], (*RECEIVES, *WRITES))
        is_answer &= ~np.isin(others["waker_pid"], delay.threads.pids)
        rows = others[is_answer]
    if delay.longest_ns(rows) < delay.min_ns:
        return None
    peer = delay.object_of(rows)
    return Reason("network_wait", delay.pid_of(rows), CauseEvidence(line=delay.line(rows), peer=peer or None))


def _writes_to_pipe(delay: Delay) -> bool:
    """Whether a pipe was full, by samples or because the socket of the request was still empty."""
    rows = delay.of_holder(Category.NET)
    is_before_response = delay.late.part == "first" and np.isin(rows["syscall_nr"], WRITES).any()
    return bool(delay.full_pipes) or bool(is_before_response)
