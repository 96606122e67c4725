"""The first rank whose process failed while the other ranks were running, and how its process ended.

Launchers end all other ranks shortly afterwards and often restart the job. No rank waits long enough for a hang, but
the job loses its progress. No rank is named if the job was ended intentionally, if several ranks failed together, or if
others still run or ended with status 0: a hang has its own verdict.
"""

import signal
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import Array, process_keys
from stallscope.events.names import BY_SIGNAL, HostKind
from stallscope.events.trace import Trace

_AT_ONCE_NS = 500_000_000
"""Ranks that fail within this time of each other failed together: an interpreter takes part of this time to exit."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a rank's process ended. is_own: by itself, or by a signal that only it received. at_ns: wall time, if a clock
    was recorded.
    """

    node: int
    pid: int
    rank: int
    at_ns: int
    status: int
    is_own: bool


def first_failed(trace: Trace) -> ProcessEnd | None:
    """The rank that failed before all others; None if no rank failed, or several at the same time."""
    ranks = arrived_ranks(trace)
    ended = sorted((_end(trace, row, ranks) for row in _exits(trace, ranks)), key=lambda end: end.at_ns)
    if len(ended) < max(len(ranks), 2) or not ended[0].is_own or ended[0].status == 0:
        return None
    first, *later = ended
    together = [end for end in later if end.is_own and end.at_ns - first.at_ns < _AT_ONCE_NS]
    return None if together or any(end.status == 0 for end in later) else first


def arrived_ranks(trace: Trace) -> dict[tuple[int, int], int]:
    """The rank of each process that has made a collective."""
    with_collectives = set(np.unique(process_keys(trace.collectives)).tolist())
    return {
        (node, pid): rank
        for (node, pid), rank in trace.launcher_ranks().items()
        if node << 32 | pid in with_collectives
    }


def _exits(trace: Trace, ranks: dict[tuple[int, int], int]) -> list[Array]:
    """The last exit of each rank's process, as rows of HOST_EVENTS."""
    rows = trace.host_events[trace.host_events["kind"] == HostKind.EXIT]
    last = {(int(row["node"]), int(row["pid"])): row for row in rows}
    return [row for process, row in last.items() if process in ranks]


def _end(trace: Trace, row: Array, ranks: dict[tuple[int, int], int]) -> ProcessEnd:
    node, pid, status = int(row["node"]), int(row["pid"]), int(row["value"])
    at_ns = wall_ns(trace, node, int(row["ts_ns"]))
    return ProcessEnd(
        node,
        pid,
        ranks[node, pid],
        int(row["ts_ns"]) if at_ns is None else at_ns,
        status,
        is_own=not _was_requested(trace.host_events, row),
    )


def _was_requested(events: Array, end: Array) -> bool:
    """Whether a process ended on request, or its killer also killed other processes, as a launcher or a person does."""
    status, here = int(end["value"]), events["node"] == end["node"]
    if status - BY_SIGNAL in exit_reason.ASK:
        return True
    near = here & (events["kind"] == HostKind.SIGNAL)
    near &= np.abs(events["ts_ns"] - end["ts_ns"]) < exit_reason.JUST_BEFORE_NS
    sent = events[near & (events["pid"] == end["pid"])]
    if np.isin(sent["value"], exit_reason.ASK).any():
        return True
    if status != BY_SIGNAL + signal.SIGKILL:
        return False
    killers = sent["by_pid"][sent["value"] == signal.SIGKILL]
    killed = events[near & (events["value"] == signal.SIGKILL) & np.isin(events["by_pid"], killers)]
    return len(np.unique(killed["pid"])) > 1


def last_arrival_ns(trace: Trace, end: ProcessEnd) -> int:
    """The last arrival of the process, on its node's clock."""
    rows = trace.collectives
    return int(rows["ts_ns"][(rows["node"] == end.node) & (rows["pid"] == end.pid)].max(initial=0))
