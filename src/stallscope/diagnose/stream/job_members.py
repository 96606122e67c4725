"""The processes of each job: processes that share communicators, directly or through other processes."""

from collections.abc import Iterable

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.timeline.late_jobs import MAX_RELEASES, MIN_RELEASES, late_jobs, releases_ns
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

ProcessKey = tuple[int, int]
"""A process: node and pid."""

_MAX_UNDECIDED_NS = 60_000_000_000
"""Processes that were attached late and share a rank are assigned to jobs after this time, however few their waits."""


class Members:
    """Groups of processes that merge as communicators appear. The key of a group is its first process.

    A process whose communicator is older than the capture is undecided, and a group of its own, while its machine has
    two processes of one rank, and too few releases are known to distinguish two jobs from one.
    """

    def __init__(self) -> None:
        self._above: dict[ProcessKey, ProcessKey] = {}
        self._of_comm: dict[tuple[int, int], ProcessKey] = {}
        self._n_ranks: dict[ProcessKey, int] = {}
        self._rank: dict[ProcessKey, int] = {}
        self._ended: set[ProcessKey] = set()
        self._late: dict[int, list[dict[int, ProcessKey]]] = {}
        self._undecided: dict[ProcessKey, Array] = {}
        self._undecided_since_ns: dict[int, int] = {}

    def add(self, batch: Trace, at_ns: int) -> list[tuple[ProcessKey, ProcessKey]]:
        """Note the memberships of a batch. Returns the pairs of groups that it merged: (kept, given up)."""
        columns = ["node", "pid", "nranks", "rank", "ended_ns"]
        for node, pid, n_ranks, rank, ended_ns in batch.processes[columns].tolist():
            self._n_ranks[node, pid] = n_ranks
            if rank != UNKNOWN:
                self._rank[node, pid] = rank
            if ended_ns != UNKNOWN:
                self._ended.add((node, pid))
        merged = []
        for rows in (batch.collectives, batch.communicators):
            for node, pid, comm in sorted(_memberships(rows)):
                if comm or not self._is_contested((node, pid)):
                    merged += self._join((node, pid), comm)
                elif (node, pid) not in self._undecided:
                    self._undecided[node, pid] = np.zeros(0, np.int64)
                    self._undecided_since_ns.setdefault(node, at_ns)
        self._note_releases(batch.collectives)
        return [*merged, *self.decided(at_ns)]

    def is_undecided(self, group: ProcessKey) -> bool:
        """Whether the job of this process is not known yet, so that its rows cannot be judged."""
        return group in self._undecided

    def decided(self, at_ns: int, *, is_last: bool = False) -> list[tuple[ProcessKey, ProcessKey]]:
        """Assign undecided processes to jobs, once enough is known. Returns the pairs of groups that it merged."""
        merged = []
        for node, since_ns in list(self._undecided_since_ns.items()):
            processes = sorted(process for process in self._undecided if process[0] == node)
            n_releases = min((len(self._undecided[process]) for process in processes), default=0)
            if n_releases < 2 * MIN_RELEASES and at_ns - since_ns < _MAX_UNDECIDED_NS and not is_last:
                continue
            del self._undecided_since_ns[node]
            for size in {self._n_ranks.get(process, 0) for process in processes}:
                merged += self._assigned([p for p in processes if self._n_ranks.get(p, 0) == size], size)
        return merged

    def group(self, process: ProcessKey) -> ProcessKey:
        """The group of a process; a process without shared communicators is its own group."""
        above = self._above.setdefault(process, process)
        while above != self._above[above]:
            above = self._above[above]
        self._above[process] = above
        return above

    def forget(self, group: Iterable[ProcessKey]) -> None:
        """Drop the processes of a group that has ended: the kernel may reuse their pids."""
        gone = set(group)
        for process in gone:
            self._above.pop(process, None)
            self._n_ranks.pop(process, None)
            self._rank.pop(process, None)
            self._undecided.pop(process, None)
        self._ended -= gone
        for jobs in self._late.values():
            jobs[:] = [
                {rank: process for rank, process in job.items() if process not in gone} for job in jobs
            ]
        self._of_comm = {comm: process for comm, process in self._of_comm.items() if process not in gone}

    def _is_contested(self, process: ProcessKey) -> bool:
        """Whether this process is not in a job yet, and shares its machine with two processes of one rank."""
        if any(process in job.values() for jobs in self._late.values() for job in jobs):
            return False
        size = self._n_ranks.get(process, 0)
        ranks = [
            rank
            for other, rank in self._rank.items()
            if other[0] == process[0] and self._n_ranks.get(other, 0) == size and other not in self._ended
        ]
        return len(set(ranks)) < len(ranks)

    def _note_releases(self, rows: Array) -> None:
        for node, pid in self._undecided:
            own = rows[(rows["node"] == node) & (rows["pid"] == pid)]
            both = np.concatenate([self._undecided[node, pid], releases_ns(own)])
            self._undecided[node, pid] = np.unique(both)[:MAX_RELEASES]

    def _assigned(self, processes: list[ProcessKey], size: int) -> list[tuple[ProcessKey, ProcessKey]]:
        """Jobs of undecided processes of one machine and job size; they continue the jobs of other machines."""
        releases = {process: self._undecided.pop(process) for process in processes}
        known = self._late.setdefault(size, [{}])
        merged = []
        own = {process: self._rank[process] for process in processes if process in self._rank}
        for members in late_jobs(processes, own, releases):
            ranks = {self._rank[process]: process for process in members if process in self._rank}
            number = next((i for i, job in enumerate(known) if not job.keys() & ranks.keys()), len(known))
            known += [{}] * (number == len(known))
            known[number] |= ranks
            for process in members:
                merged += self._into(process, (0, size << 32 | number))
        return merged

    def _join(self, process: ProcessKey, comm: int) -> list[tuple[ProcessKey, ProcessKey]]:
        return self._into(process, (comm, 0) if comm else (0, self._late_job(process)))

    def _into(self, process: ProcessKey, key: tuple[int, int]) -> list[tuple[ProcessKey, ProcessKey]]:
        group = self.group(process)
        if key not in self._of_comm:
            self._of_comm[key] = group
            return []
        group_of_comm = self.group(self._of_comm[key])
        if group == group_of_comm:
            return []
        kept, given_up = sorted((group, group_of_comm))
        self._above[given_up] = kept
        return [(kept, given_up)]

    def _late_job(self, process: ProcessKey) -> int:
        """A number for the communicators of a process that are older than the capture, and have no known identity.

        Processes with one job size are of one job, unless their ranks are equal. In order of their pids, a process
        belongs to the first job without its rank: a launcher starts the processes of a job one after the other.
        """
        size, rank = self._n_ranks.get(process, 0), self._rank.get(process, UNKNOWN)
        jobs = self._late.setdefault(size, [{}])
        number = next((i for i, job in enumerate(jobs) if process in job.values()), None)
        if number is None:
            number = next((i for i, job in enumerate(jobs) if rank == UNKNOWN or rank not in job), len(jobs))
            if number == len(jobs):
                jobs.append({})
            if rank != UNKNOWN:
                jobs[number][rank] = process
        return size << 32 | number


def _memberships(rows: Array) -> list[tuple[int, int, int]]:
    """The distinct (node, pid, communicator) of some rows."""
    if not len(rows):
        return []
    number, n = numbered(rows["node"], rows["pid"], rows["comm_hash"])
    row = np.zeros(n, np.int64)
    row[number] = np.arange(len(rows))
    picked = rows[row]
    return list(
        zip(picked["node"].tolist(), picked["pid"].tolist(), picked["comm_hash"].tolist(), strict=True)
    )
