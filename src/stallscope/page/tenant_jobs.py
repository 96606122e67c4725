"""The jobs of a tenant: rows of the table `jobs`, each with its cells of the last minutes.

The continuous diagnosis writes the table, and decides which processes form a job. Processes that have sent rounds, and
that it has not examined yet, are listed under the communicator by which the memory holds them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stallscope.page.job_cells import JobCells, JobMemory, job_id
from stallscope.store.hub.job_filter import JobChoice, JobFilter

if TYPE_CHECKING:
    from stallscope.store.hub.store_protocol import Store

_OWNER = "owner_"
_MAX_PARSED = 4_000

Process = tuple[str, int]
"""A process: machine and pid."""

Member = tuple[str, int, int | None]
"""A process of a job: machine, pid and rank."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job. cells: None where memory holds no round of the job.

    answer: healthy, found or inconclusive; "" without a row of the table. reasons: why it is inconclusive, each with
    the action that would decide. owner: by label. Times in ns since 1970; ended_ns is None while the job runs.
    """

    tenant: str
    cluster: str
    id: str
    members: tuple[Member, ...]
    begin_ns: int | None
    last_ns: int | None
    ended_ns: int | None = None
    answer: str = ""
    reasons: tuple[Mapping[str, str], ...] = ()
    owner: Mapping[str, str] = field(default_factory=dict)
    cells: JobCells | None = None

    @property
    def key(self) -> str:
        """The id of the job in links."""
        return job_id(self.cluster, self.id)

    @property
    def nodes(self) -> set[str]:
        return {node for node, _, _ in self.members}

    @property
    def n_ranks(self) -> int:
        """The processes, or the ranks that have sent rounds, if there are more of them."""
        return max(len(self.members), self.cells.ring.n_ranks if self.cells else 0)

    @property
    def latest_ns(self) -> int:
        """The last collective, even if the row of the table is older; 0 if unknown."""
        return max(self.last_ns or 0, self.cells.last_ns if self.cells else 0)

    @cached_property
    def processes(self) -> Mapping[int, Process]:
        """The process of each known rank; the process of a job without ranks is rank 0."""
        known = {rank: (node, pid) for node, pid, rank in self.members if rank is not None}
        return known or {rank: (node, pid) for rank, (node, pid, _) in enumerate(self.members[:1])}

    @cached_property
    def filter(self) -> JobFilter:
        """Selects the rows of the job in questions to the store."""
        row = {
            "job": self.id,
            "members": json.dumps(self.members),
            "begin_ns": self.begin_ns,
            "ended_ns": self.ended_ns,
        }
        return JobFilter.of(JobChoice(job=self.id), [row])


@dataclass
class JobTable:
    """The jobs of the table, with the cells of the memory. Members are parsed again only after a change of the row."""

    store: "Store"
    memory: JobMemory
    _parsed: dict[tuple[str, str], tuple[object, Job]] = field(default_factory=dict)

    def jobs(self, tenant: str, *, since_ns: int, also: Sequence[str] = ()) -> list[Job]:
        """Jobs with data since a time, jobs whose id is in `also`, and jobs of the memory without a row."""
        params = {"since_ns": since_ns, "also": list(also)}
        rows = self.store.ask("page_jobs", tenant=tenant, params=params).to_pylist()
        listed = [self._job(tenant, row) for row in rows]
        known = {id(job.cells) for job in listed}
        return [*listed, *(_of_cells(cells) for cells in self.memory.jobs(tenant) if id(cells) not in known)]

    def job(self, tenant: str, key: str) -> Job | None:
        """The job of a link: by its key, or by the key of another communicator of its processes."""
        rows = self.store.ask("page_job", tenant=tenant, params={"key": key}).to_pylist()
        if rows:
            return self._job(tenant, rows[0])
        cluster, _, comm = key.rpartition(":")
        cells = self.memory.job(tenant, cluster, comm)
        return (
            next((job for job in self.jobs(tenant, since_ns=0) if job.cells is cells), None)
            if cells
            else None
        )

    def _job(self, tenant: str, row: Mapping[str, Any]) -> Job:
        key = tenant, job_id(row["cluster_id"] or "", row["job"])
        changed_at, job = self._parsed.get(key, (None, None))
        if job is None or changed_at != row["updated_at"]:
            job = _of_row(tenant, row)
        if (cells := self._cells(job)) is not job.cells:
            job = replace(job, cells=cells)
        if len(self._parsed) >= _MAX_PARSED:
            self._parsed.clear()
        self._parsed[key] = row["updated_at"], job
        return job

    def _cells(self, job: Job) -> JobCells | None:
        of_process = (
            self.memory.of_process(job.tenant, job.cluster, node, pid) for node, pid, _ in job.members
        )
        by_comm = self.memory.job(job.tenant, job.cluster, job.id)
        return by_comm or next(filter(None, of_process), None)


def _of_row(tenant: str, row: Mapping[str, Any]) -> Job:
    owner = {
        name.removeprefix(_OWNER): value for name, value in row.items() if name.startswith(_OWNER) and value
    }
    return Job(
        tenant=tenant,
        cluster=row["cluster_id"] or "",
        id=row["job"],
        members=_members(json.loads(row["members"])),
        begin_ns=row["begin_ns"],
        last_ns=row["last_ns"],
        ended_ns=row["ended_ns"],
        answer=row["answer"],
        reasons=tuple(json.loads(row["reasons"])),
        owner=owner,
    )


def _members(rows: Iterable[Sequence[Any]]) -> tuple[Member, ...]:
    return tuple((node, pid, rank) for node, pid, rank in rows)


def _of_cells(cells: JobCells) -> Job:
    """A job of the memory that has no row yet."""
    members = _members((node, pid, rank) for rank, (node, pid) in cells.processes.items())
    return Job(
        tenant=cells.tenant,
        cluster=cells.cluster,
        id=cells.comm,
        members=members,
        begin_ns=cells.first_ns,
        last_ns=cells.last_ns,
        cells=cells,
    )
