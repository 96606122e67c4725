"""A rank whose process broke while the others had more to do: the first to end, by itself or killed, and how.

Launchers end all other ranks within a moment and often start the job anew: nobody waits long enough for a hang, and yet
the whole job was lost until then. Nothing is said where somebody has ended the job on purpose, where all ended alike,
or where others live on or ended well: a hang is told elsewhere.
"""

import signal
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import Array
from stallscope.events.names import BY_SIGNAL, HostKind
from stallscope.events.trace import Trace

_AT_ONCE_NS = 500_000_000
"""Ranks that break by themselves within this time of each other broke alike: an interpreter needs some of it to end."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a rank's process ended. is_own: by itself, or by a signal that only it was sent. at_ns: wall time, where a
    clock was recorded.
    """

    node: int
    pid: int
    rank: int
    at_ns: int
    status: int
    is_own: bool


def first_broken(trace: Trace) -> ProcessEnd | None:
    """The rank that broke before all others; None where none did, or several at once."""
    ranks = arrived_ranks(trace)
    ended = sorted((_end(trace, row, ranks) for row in _exits(trace, ranks)), key=lambda one: one.at_ns)
    if len(ended) < max(len(ranks), 2) or not ended[0].is_own or ended[0].status == 0:
        return None
    first, *later = ended
    alike = [one for one in later if one.is_own and one.at_ns - first.at_ns < _AT_ONCE_NS]
    return None if alike or any(one.status == 0 for one in later) else first


def arrived_ranks(trace: Trace) -> dict[tuple[int, int], int]:
    """The rank of each process that has made a collective."""
    have_met = set(
        np.unique(trace.collectives["node"].astype(np.int64) << 32 | trace.collectives["pid"]).tolist()
    )
    return {
        (node, pid): rank for (node, pid), rank in trace.told_ranks().items() if node << 32 | pid in have_met
    }


def _exits(trace: Trace, ranks: dict[tuple[int, int], int]) -> list[Array]:
    """The last exit of each rank's process, as rows of HOST_EVENTS."""
    rows = trace.host_events[trace.host_events["kind"] == HostKind.EXIT]
    last = {(int(row["node"]), int(row["pid"])): row for row in rows}
    return [row for who, row in last.items() if who in ranks]


def _end(trace: Trace, row: Array, ranks: dict[tuple[int, int], int]) -> ProcessEnd:
    node, pid, status = int(row["node"]), int(row["pid"]), int(row["value"])
    at_ns = wall_ns(trace, node, int(row["ts_ns"]))
    return ProcessEnd(
        node,
        pid,
        ranks[node, pid],
        int(row["ts_ns"]) if at_ns is None else at_ns,
        status,
        is_own=not _was_told_to(trace.host_events, row),
    )


def _was_told_to(events: Array, end: Array) -> bool:
    """Whether a process ended because somebody asked it to, or killed others as well: a launcher, or a person."""
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


def last_arrival_ns(trace: Trace, found: ProcessEnd) -> int:
    rows = trace.collectives
    return int(rows["ts_ns"][(rows["node"] == found.node) & (rows["pid"] == found.pid)].max(initial=0))
