"""Several jobs in one trace: a restarted job, or concurrent jobs. Each job is diagnosed separately.

The trace is split only if necessary: if two processes have the same rank and share no communicator, directly or
through other processes. Parts of one job may not share a communicator either (replicas that meet over another
library): they stay together if their ranks differ and their times overlap.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.timeline.late_jobs import Process, late_jobs, releases_ns
from stallscope.events.layout import JOB_TABLES, UNKNOWN, Array, process_keys
from stallscope.events.trace import Trace


@dataclass
class _Group:
    """Processes of one job. begin_ns, end_ns: of their calls, on the wall clock if it is known."""

    members: set[Process]
    ranks: set[int]
    begin_ns: int
    end_ns: int


def job_of(trace: Trace) -> dict[Process, int]:
    """The number of the job of each process that makes collectives, in order of time; empty for a single job."""
    ranks = trace.launcher_ranks()
    if len(set(ranks.values())) == len(ranks):
        return {}
    groups = _joined(_late_jobs(trace, ranks, _connected(trace, ranks)))
    return (
        {process: number for number, group in enumerate(groups) for process in group.members}
        if groups[1:]
        else {}
    )


def parts(trace: Trace) -> list[Trace]:
    """The trace of each job, in order of time; the trace itself for a single job.

    Rows that belong to no job (machine rows, other processes) stay in each.
    """
    jobs = job_of(trace)
    if not jobs:
        return [trace]
    return [
        _part(trace, {process for process, job in jobs.items() if job != number}, members)
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


def _connected(trace: Trace, ranks: dict[Process, int]) -> list[_Group]:
    """Groups of processes that share communicators of a known identity, directly or through other processes."""
    group_of: dict[Process, _Group] = {}
    of_comm: dict[int, Process] = {}
    for process, begin_ns, end_ns in _spans(trace):
        group_of[process] = _Group(
            {process}, {ranks[process]} if process in ranks else set(), begin_ns, end_ns
        )
    for table in (trace.collectives, trace.communicators):
        pairs = np.unique(_columns(table, "node", "pid", "comm_hash"))
        for node, pid, comm in pairs.tolist():
            other = group_of.get(of_comm.setdefault(comm, (node, pid))) if comm else None
            group = group_of.get((node, pid))
            if group is not None and other is not None and group is not other:
                _join(other, group)
                group_of.update(dict.fromkeys(group.members, other))
    return list({id(group): group for group in group_of.values()}.values())


def _late_jobs(trace: Trace, ranks: dict[Process, int], groups: list[_Group]) -> list[_Group]:
    """The groups, with those joined whose communicators are older than the capture, where ranks are claimed twice."""
    rows = _columns(trace.collectives, "node", "pid", "comm_hash", "wait_leave_ns")
    named = set(map(tuple, rows[rows["comm_hash"] != 0][["node", "pid"]].tolist()))
    late = sorted((g for g in groups if len(g.members) == 1 and not g.members & named), key=_order)
    sizes = {(node, pid): size for node, pid, size in trace.processes[["node", "pid", "nranks"]].tolist()}
    out = [group for group in groups if group not in late]
    for key in dict.fromkeys(sizes.get(min(group.members), UNKNOWN) for group in late):
        of_size = [group for group in late if sizes.get(min(group.members), UNKNOWN) == key]
        if not _is_contested(of_size):
            out += of_size
            continue
        members = [min(group.members) for group in of_size]
        releases = {
            (node, pid): releases_ns(rows[(rows["node"] == node) & (rows["pid"] == pid)])
            for node, pid in members
        }
        of_process = dict(zip(members, of_size, strict=True))
        for first, *others in late_jobs(members, {p: ranks[p] for p in members if p in ranks}, releases):
            for process in others:
                _join(of_process[first], of_process[process])
            out.append(of_process[first])
    return out


def _is_contested(groups: list[_Group]) -> bool:
    """Whether two of these groups have a rank in common, and all run at the same time."""
    ranks = [rank for group in groups for rank in group.ranks]
    begin_ns, end_ns = max(group.begin_ns for group in groups), min(group.end_ns for group in groups)
    return len(set(ranks)) < len(ranks) and begin_ns <= end_ns


def _joined(groups: Iterable[_Group]) -> list[_Group]:
    """Merge groups whose ranks differ and whose times overlap into one job.

    Single processes come in order of their pids: a launcher starts the processes of a job one after the other.
    """
    out: list[_Group] = []
    for group in sorted(groups, key=_order):
        same_job = next(
            (
                job
                for job in out
                if group.begin_ns <= job.end_ns
                and job.begin_ns <= group.end_ns
                and not job.ranks & group.ranks
            ),
            None,
        )
        if same_job is None:
            out.append(group)
        else:
            _join(same_job, group)
    return out


def _order(group: _Group) -> tuple[bool, int, Process]:
    is_single = len(group.members) == 1
    return is_single, 0 if is_single else group.begin_ns, min(group.members)


def _join(group: _Group, other: _Group) -> None:
    group.members |= other.members
    group.ranks |= other.ranks
    group.begin_ns, group.end_ns = min(group.begin_ns, other.begin_ns), max(group.end_ns, other.end_ns)


def _spans(trace: Trace) -> list[tuple[Process, int, int]]:
    """Each process that has made a collective, with the times of its first and last collective."""
    rows = _columns(trace.collectives, "node", "pid", "ts_ns")
    rows = rows[np.argsort(rows["ts_ns"], kind="stable")]
    first: dict[Process, int] = {}
    last: dict[Process, int] = {}
    for node in np.unique(rows["node"]).tolist():
        of_node = rows[rows["node"] == node]
        pids, begins = np.unique(of_node["pid"], return_index=True)
        ends = len(of_node) - 1 - np.unique(of_node["pid"][::-1], return_index=True)[1]
        for pid, begin, end in zip(pids.tolist(), begins, ends, strict=True):
            first[node, pid] = _common(trace, node, int(of_node["ts_ns"][begin]))
            last[node, pid] = _common(trace, node, int(of_node["ts_ns"][end]))
    return [(process, first[process], last[process]) for process in first]


def _common(trace: Trace, node: int, at_ns: int) -> int:
    known = wall_ns(trace, node, at_ns)
    return at_ns if known is None else known


def _columns(table: Array, *names: str) -> Array:
    out = np.empty(len(table), [(name, table.dtype[name]) for name in names])
    for name in names:
        out[name] = table[name]
    return out


def _by_number(jobs: dict[Process, int]) -> list[set[Process]]:
    out: list[set[Process]] = [set() for _ in range(max(jobs.values()) + 1)]
    for process, number in jobs.items():
        out[number].add(process)
    return out


def _part(trace: Trace, others: set[Process], members: set[Process]) -> Trace:
    """The trace without the rows of other jobs' processes. It ends when all members have ended."""
    names = [table.name for table in JOB_TABLES] + [
        "annotations",
        "host_events",
        "positions",
        "gpu_processes",
    ]
    tables: dict[str, Any] = {name: _without(getattr(trace, name), others) for name in names}
    kept = replace(trace, **tables)
    ended = {
        (int(row["node"]), int(row["pid"])): int(row["ended_ns"])
        for row in kept.processes
        if row["ended_ns"] != UNKNOWN
    }
    if not members <= ended.keys():
        return kept
    last_ns = {node: max(ended[process] for process in members if process[0] == node) for node, _ in members}
    ends = enumerate(kept.ends_ns)
    return replace(kept, ends_ns=tuple(min(end_ns, last_ns.get(node, end_ns)) for node, end_ns in ends))


def _without(rows: Array, others: set[Process]) -> Array:
    if not len(rows):
        return rows
    gone = np.array([node << 32 | pid for node, pid in others], np.int64)
    return rows[~np.isin(process_keys(rows), gone)]
