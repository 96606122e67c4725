"""A rank whose process broke while the others had more to do: the first to end, by itself or killed, and how.

Launchers end all other ranks within a moment and often start the job anew: nobody waits long enough for a hang, and yet
the whole job was lost until then. Nothing is said where somebody has ended the job on purpose, where all ended alike,
or where others live on or ended well: a hang is told elsewhere.
"""

import signal
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import Array
from stallscope.events.names import BY_SIGNAL, HostKind
from stallscope.events.trace import Trace

_AT_ONCE_NS = 500_000_000
"""Ranks that break by themselves within this time of each other broke alike: an interpreter needs some of it to end."""


@dataclass(frozen=True)
class _End:
    """How a rank's process ended. is_own: by itself, or by a signal that only it was sent. at_ns: wall time, where a
    clock was recorded.
    """

    node: int
    pid: int
    rank: int
    at_ns: int
    status: int
    is_own: bool


def with_deaths(trace: Trace, report: Report) -> Report:
    """The report with a verdict on the rank whose process broke first, unless another verdict tells of it."""
    broke = (trace.host_events["kind"] == HostKind.EXIT) & (trace.host_events["value"] != 0)
    found = _first(trace) if broke.any() else None
    if found is None or any(found.rank in one.ranks for one in report.verdicts if one.kind in _TELL_OF_ENDS):
        return report
    return replace(report, verdicts=[_verdict(trace, found), *report.verdicts])


_TELL_OF_ENDS = ("failure", "hang")


def _first(trace: Trace) -> _End | None:
    """The rank that broke before all others; None where none did, or several at once."""
    ranks = _ranks(trace)
    ended = sorted((_end(trace, row, ranks) for row in _exits(trace, ranks)), key=lambda one: one.at_ns)
    if len(ended) < max(len(ranks), 2) or not ended[0].is_own or ended[0].status == 0:
        return None
    first, *later = ended
    alike = [one for one in later if one.is_own and one.at_ns - first.at_ns < _AT_ONCE_NS]
    return None if alike or any(one.status == 0 for one in later) else first


def _ranks(trace: Trace) -> dict[tuple[int, int], int]:
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


def _end(trace: Trace, row: Array, ranks: dict[tuple[int, int], int]) -> _End:
    node, pid, status = int(row["node"]), int(row["pid"]), int(row["value"])
    at_ns = wall_ns(trace, node, int(row["ts_ns"]))
    return _End(
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


def _verdict(trace: Trace, found: _End) -> Verdict:
    told = exit_reason.end(trace.host_events, found.node, found.pid)
    told |= exit_reason.failed_call(trace, found.node, found.pid, after_ns=_last_arrival_ns(trace, found))
    verdict = Verdict(
        kind="failure",
        summary="",
        ranks=[found.rank],
        nodes=[node] if (node := trace.nodes[found.node]) else [],
        since_ns=found.at_ns if any(clock.node == found.node for clock in trace.clocks) else None,
        n_incidents=1,
        confidence=0.9,
        victims=sorted(set(_ranks(trace).values()) - {found.rank}),
        advice=cause("missing_rank").advice(
            told | {"is_alive": False, "is_out_of_memory": bool(told.get("oom_killed"))}
        ),
        evidence={"pid": found.pid, **told},
    )
    return replace(verdict, summary=text.summary(verdict))


def _last_arrival_ns(trace: Trace, found: _End) -> int:
    rows = trace.collectives
    return int(rows["ts_ns"][(rows["node"] == found.node) & (rows["pid"] == found.pid)].max(initial=0))
