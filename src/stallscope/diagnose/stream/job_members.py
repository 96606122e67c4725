"""The processes of each job: processes that share communicators, directly or through other processes."""

from collections.abc import Iterable

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

ProcessKey = tuple[int, int]
"""A process: node and pid."""


class Members:
    """Groups of processes that merge as communicators appear. The key of a group is its first process."""

    def __init__(self) -> None:
        self._above: dict[ProcessKey, ProcessKey] = {}
        self._of_comm: dict[tuple[int, int], ProcessKey] = {}
        self._n_ranks: dict[ProcessKey, int] = {}
        self._rank: dict[ProcessKey, int] = {}
        self._late: dict[int, list[dict[int, ProcessKey]]] = {}

    def add(self, batch: Trace) -> list[tuple[ProcessKey, ProcessKey]]:
        """Note the memberships of a batch. Returns the pairs of groups that it merged: (kept, given up)."""
        for node, pid, n_ranks, rank in batch.processes[["node", "pid", "nranks", "rank"]].tolist():
            self._n_ranks[node, pid] = n_ranks
            if rank != UNKNOWN:
                self._rank[node, pid] = rank
        merged = []
        for rows in (batch.collectives, batch.communicators):
            for node, pid, comm in sorted(_memberships(rows)):
                merged += self._join((node, pid), comm)
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
        for jobs in self._late.values():
            jobs[:] = [
                {rank: process for rank, process in job.items() if process not in gone} for job in jobs
            ]
        self._of_comm = {comm: process for comm, process in self._of_comm.items() if process not in gone}

    def _join(self, process: ProcessKey, comm: int) -> list[tuple[ProcessKey, ProcessKey]]:
        key = (comm, 0) if comm else (0, self._late_job(process))
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
