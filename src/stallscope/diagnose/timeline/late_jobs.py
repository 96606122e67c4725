"""The jobs of processes whose communicators are older than the capture, where several processes have the same rank.

Nothing names the members of such a communicator. But a collective releases all its members from their waits together,
step after step, and processes of other jobs are released at other times. Two processes with one rank that are released
together are one job: both claim that rank. Otherwise they are two jobs, and each further process belongs to the job
whose releases are closest to its own.

Without enough recorded waits, processes with one rank are two jobs if each job can have the machine's lowest rank;
in order of their pids, a process belongs to the first job without its rank, since a launcher starts the processes of a
job one after the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from stallscope.events.layout import UNKNOWN, Array

Process = tuple[int, int]
"""A process: node and pid."""

MIN_RELEASES = 40
"""Common releases that decide: by chance, two jobs of one pace are released together for a few steps."""

MAX_RELEASES = 1024
_NO_RANK = 1 << 31
_SAME_NS = (
    2_000_000  # median distance of the releases of one collective on a busy machine: 0.7 to 1.3 ms measured
)
_SAME_SHARE = 0.01  # the same, as a share of the time between releases
_MAX_SHARE = 0.12  # of the time between releases: the median is 0.25 without a relation
_IN_ORDER = 0.95  # share of releases before which both processes were released equally often
_NEARBY = (
    10  # releases before and after a release that show the order: single waits and records may be missing
)


def releases_ns(rows: Array) -> Array:
    """The moments at which a process was released from a wait, ascending: int64 (n,). rows: its collectives."""
    leaves_ns = np.unique(rows["wait_leave_ns"])
    return leaves_ns[leaves_ns != UNKNOWN][:MAX_RELEASES]


@dataclass(frozen=True)
class _Distance:
    """Between the releases of two processes: the median, and whether both are released by the same collectives."""

    median_ns: float
    is_same: bool


def _distance(ns: Array, other_ns: Array) -> _Distance | None:
    """None with too few releases in the time that both recorded."""
    if not len(ns) or not len(other_ns):
        return None
    begin_ns, end_ns = max(ns[0], other_ns[0]), min(ns[-1], other_ns[-1])
    ns, other_ns = (a[(a >= begin_ns) & (a <= end_ns)] for a in (ns, other_ns))
    if min(len(ns), len(other_ns)) < MIN_RELEASES:
        return None
    ns, other_ns = sorted((ns, other_ns), key=len)
    after = np.clip(np.searchsorted(other_ns, ns), 1, len(other_ns) - 1)
    apart_ns = np.minimum(np.abs(ns - other_ns[after - 1]), np.abs(ns - other_ns[after]))
    gap_ns, median_ns = float(np.median(np.diff(ns))), float(np.median(apart_ns))
    ahead = np.searchsorted(other_ns, ns) - np.arange(len(ns))
    nearby = np.lib.stride_tricks.sliding_window_view(np.pad(ahead, _NEARBY, mode="edge"), 2 * _NEARBY + 1)
    in_order = np.count_nonzero(np.abs(ahead - np.median(nearby, axis=1)) <= 1) / len(ns)
    is_close = median_ns <= min(max(_SAME_NS, _SAME_SHARE * gap_ns), _MAX_SHARE * gap_ns)
    return _Distance(median_ns, bool(is_close and in_order >= _IN_ORDER))


def late_jobs(
    processes: Iterable[Process], ranks: Mapping[Process, int], releases_ns: Mapping[Process, Array]
) -> list[list[Process]]:
    """The processes of each job. All processes run at the same time.

    ranks: of the processes; a process without a rank fits into each job. releases_ns: of the processes.
    """
    between = _distances(sorted(processes), releases_ns)
    jobs: list[list[Process]] = []
    for members in _released_together(sorted(processes), between, ranks):
        number = _number(members, jobs, between, ranks)
        if number == len(jobs):
            jobs.append([])
        jobs[number] += members
    return jobs


_Distances = dict[tuple[Process, Process], _Distance]


def _distances(processes: list[Process], releases_ns: Mapping[Process, Array]) -> _Distances:
    """The known distances between processes of one machine."""
    out = {}
    for process, other in permutations(processes, 2):
        if process[0] == other[0] and (found := _distance(releases_ns[process], releases_ns[other])):
            out[process, other] = found
    return out


def _released_together(
    processes: list[Process], between: _Distances, ranks: Mapping[Process, int]
) -> list[list[Process]]:
    """Groups of processes that the same collectives release: first the groups with the lowest ranks, then by pid."""
    groups: list[list[Process]] = []
    for process in processes:
        same = [
            group
            for group in groups
            if any((found := between.get((process, member))) and found.is_same for member in group)
        ]
        groups = [group for group in groups if group not in same]
        groups.append(sorted([process, *(member for group in same for member in group)]))
    return sorted(groups, key=lambda group: (min(ranks.get(p, _NO_RANK) for p in group), group))


def _number(
    members: list[Process], jobs: list[list[Process]], between: _Distances, ranks: Mapping[Process, int]
) -> int:
    """The number of the job of a group: the closest job without its ranks, or else a new job."""
    own = {ranks[process] for process in members if process in ranks}
    distances = [
        [
            found.median_ns
            for process in members
            for other in job
            if (found := between.get((process, other))) is not None
        ]
        for job in jobs
    ]
    free = [i for i, job in enumerate(jobs) if not own & {ranks.get(process) for process in job}]
    machine = members[0][0]
    if free:
        is_elsewhere = [all(node != machine for node, _ in job) for job in jobs]
        return min(free, key=lambda i: (min(distances[i], default=np.inf), is_elsewhere[i]))
    of_machine = [rank for (node, _), rank in ranks.items() if node == machine]
    may_begin = not of_machine or list(ranks.values()).count(min(of_machine)) > len(jobs)
    return len(jobs) if all(distances) or may_begin else 0
