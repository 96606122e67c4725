"""Several jobs in one trace: one that was started anew, or others beside it. Each is judged on its own.

Jobs are told apart only where they have to be: where two processes were given the same rank and share no communicator,
directly or through others. Parts of one job may share none either (replicas that meet over another library): they stay
together where their ranks differ and their times overlap.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import TABLES, UNKNOWN, Array
from stallscope.events.trace import Trace

Who = tuple[int, int]
"""A process: node and pid."""


@dataclass
class _Group:
    """Processes of one job. begin_ns, end_ns: of their calls, on the wall clock where there is one."""

    members: set[Who]
    ranks: set[int]
    begin_ns: int
    end_ns: int


def job_of(trace: Trace) -> dict[Who, int]:
    """The number of the job of each process that makes collectives, in order of time; empty where there is one job."""
    ranks = trace.told_ranks()
    if len(set(ranks.values())) == len(ranks):
        return {}
    groups = _joined(_connected(trace, ranks))
    return {who: number for number, group in enumerate(groups) for who in group.members} if groups[1:] else {}


def parts(trace: Trace) -> list[Trace]:
    """The trace of each job, in order of time; the trace itself where there is one.

    What belongs to none of them (the machine's own rows, other processes) stays in each.
    """
    jobs = job_of(trace)
    if not jobs:
        return [trace]
    return [
        _part(trace, {who for who, one in jobs.items() if one != number}, members)
        for number, members in enumerate(_by_number(jobs))
    ]


def call_times(part: Trace) -> list[int]:
    """Wall times of the first and the last call on each node, where clocks were recorded."""
    out = []
    for node in np.unique(part.collectives["node"]).tolist():
        ts_ns = part.collectives["ts_ns"][part.collectives["node"] == node]
        known = (wall_ns(part, node, int(at_ns)) for at_ns in (ts_ns.min(), ts_ns.max()))
        out += [at_ns for at_ns in known if at_ns is not None]
    return out


def _connected(trace: Trace, ranks: dict[Who, int]) -> list[_Group]:
    """The processes that share communicators of a known identity, directly or through others."""
    group_of: dict[Who, _Group] = {}
    of_comm: dict[int, Who] = {}
    for who, begin_ns, end_ns in _spans(trace):
        group_of[who] = _Group({who}, {ranks[who]} if who in ranks else set(), begin_ns, end_ns)
    for table in (trace.collectives, trace.communicators):
        pairs = np.unique(_columns(table, "node", "pid", "comm_hash"))
        for node, pid, comm in pairs.tolist():
            other = group_of.get(of_comm.setdefault(comm, (node, pid))) if comm else None
            mine = group_of.get((node, pid))
            if mine is not None and other is not None and mine is not other:
                _join(other, mine)
                group_of.update(dict.fromkeys(mine.members, other))
    return list({id(group): group for group in group_of.values()}.values())


def _joined(groups: Iterable[_Group]) -> list[_Group]:
    """Those whose ranks differ and whose times overlap are one job."""
    out: list[_Group] = []
    for group in sorted(groups, key=lambda one: (one.begin_ns, min(one.members))):
        found = next(
            (one for one in out if group.begin_ns <= one.end_ns and not one.ranks & group.ranks), None
        )
        if found is None:
            out.append(group)
        else:
            _join(found, group)
    return out


def _join(one: _Group, other: _Group) -> None:
    one.members |= other.members
    one.ranks |= other.ranks
    one.begin_ns, one.end_ns = min(one.begin_ns, other.begin_ns), max(one.end_ns, other.end_ns)


def _spans(trace: Trace) -> list[tuple[Who, int, int]]:
    """Each process that has made a collective, with its first and last one."""
    rows = _columns(trace.collectives, "node", "pid", "ts_ns")
    rows = rows[np.argsort(rows["ts_ns"], kind="stable")]
    first: dict[Who, int] = {}
    last: dict[Who, int] = {}
    for node in np.unique(rows["node"]).tolist():
        own = rows[rows["node"] == node]
        pids, begins = np.unique(own["pid"], return_index=True)
        ends = len(own) - 1 - np.unique(own["pid"][::-1], return_index=True)[1]
        for pid, begin, end in zip(pids.tolist(), begins, ends, strict=True):
            first[node, pid] = _common(trace, node, int(own["ts_ns"][begin]))
            last[node, pid] = _common(trace, node, int(own["ts_ns"][end]))
    return [(who, first[who], last[who]) for who in first]


def _common(trace: Trace, node: int, at_ns: int) -> int:
    known = wall_ns(trace, node, at_ns)
    return at_ns if known is None else known


def _columns(table: Array, *names: str) -> Array:
    out = np.empty(len(table), [(name, table.dtype[name]) for name in names])
    for name in names:
        out[name] = table[name]
    return out


def _by_number(jobs: dict[Who, int]) -> list[set[Who]]:
    out: list[set[Who]] = [set() for _ in range(max(jobs.values()) + 1)]
    for who, number in jobs.items():
        out[number].add(who)
    return out


def _part(trace: Trace, others: set[Who], members: set[Who]) -> Trace:
    """The trace without the rows of some processes; it ends when all members have ended."""
    names = [table.name for table in TABLES] + ["annotations", "host_events", "positions", "gpu_processes"]
    tables: dict[str, Any] = {name: _without(getattr(trace, name), others) for name in names}
    kept = replace(trace, **tables)
    ended = {
        (int(row["node"]), int(row["pid"])): int(row["ended_ns"])
        for row in kept.processes
        if row["ended_ns"] != UNKNOWN
    }
    if not members <= ended.keys():
        return kept
    last_ns = {node: max(ended[who] for who in members if who[0] == node) for node, _ in members}
    ends = enumerate(kept.ends_ns)
    return replace(kept, ends_ns=tuple(min(end_ns, last_ns.get(node, end_ns)) for node, end_ns in ends))


def _without(rows: Array, others: set[Who]) -> Array:
    if not len(rows):
        return rows
    gone = np.array([node << 32 | pid for node, pid in others], np.int64)
    return rows[~np.isin(rows["node"].astype(np.int64) << 32 | rows["pid"].astype(np.int64), gone)]
