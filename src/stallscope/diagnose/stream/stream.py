"""The diagnosis of arriving events, of any number of jobs on any number of nodes.

Arriving rows go through the same steps as a whole trace (see engine). Cost and memory are bounded:
docs/decisions/streaming.md. The same batches give the same changes.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.report.verdict import Report
from stallscope.diagnose.stream.engine_incidents import Engines
from stallscope.diagnose.stream.gpu_drivers import Drivers
from stallscope.diagnose.stream.idle_incidents import IdleGpus
from stallscope.diagnose.stream.incidents import EVENTS_ENDED, NO_MORE_EVENTS, Change
from stallscope.diagnose.stream.job_members import Members, ProcessKey
from stallscope.diagnose.stream.job_state import JobState
from stallscope.diagnose.stream.node_clocks import Nodes
from stallscope.diagnose.stream.stream_job import Job
from stallscope.diagnose.stream.window import Retention, joined
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.verdicts.by_job import together
from stallscope.events.layout import JOB_TABLES, OWNERS, PROCESSES, UNKNOWN, Array, empty, process_keys
from stallscope.events.trace import Trace

_MAX_ENDED = 32
_PASS_NS = 250_000_000  # least time between two checks for hangs and ended jobs


@dataclass
class Stream:
    """Takes batches and returns changes of incidents. Safe to use from several threads.

    clock: the stream's own time, ns. It dates changes, and stands in for the end of the data that a source does not
    state.
    """

    limits: Thresholds = field(default_factory=Thresholds)
    usd_per_gpu_hour: float | None = None
    clock: Callable[[], int] = time.time_ns
    retention: Retention = field(default_factory=Retention)
    linger_ns: int = 10_000_000_000
    forget_ns: int = 900_000_000_000
    _nodes: Nodes = field(default_factory=Nodes)
    _idle: IdleGpus = field(init=False)
    _engines: Engines = field(init=False)
    _members: Members = field(default_factory=Members)
    _drivers: Drivers = field(default_factory=Drivers)
    _jobs: dict[ProcessKey, Job] = field(default_factory=dict)
    _ended: list[Report] = field(default_factory=list)
    _ended_states: list[JobState] = field(default_factory=list)
    _ended_left_out: tuple[int, int] = 0, 1
    _passed_ns: int = -(1 << 62)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._idle = IdleGpus(self.limits, self.usd_per_gpu_hour)
        self._engines = Engines(self.limits)

    def feed(
        self,
        batch: Trace,
        *,
        lost: Mapping[str, Mapping[str, int]] | None = None,
        is_behind: bool = False,
    ) -> list[Change]:
        """Take new rows of any tables. Returns the changes that follow.

        Nodes are identified by name; node numbers are valid within the batch only. Rows of one node arrive roughly in
        order of time; nodes may be seconds apart. A batch that is fed twice counts twice. batch.lost: since the
        previous batch; lost: the same by node name and kind, of the jobs on these nodes. is_behind: too many rows wait
        for periodic evaluations, so only the trigger starts evaluations.
        """
        with self._lock:
            at_ns = self.clock()
            numbers = self._numbers(batch)
            batch = self._nodes.taken(batch, at_ns)
            self._drivers.add(batch)
            self._idle.add(batch, at_ns)
            self._engines.add(batch)
            self._join(self._members.add(batch, at_ns))
            changes: list[Change] = []
            touched = self._routed(batch, at_ns)
            self._note_lost(lost or {})
            for job in touched:
                if batch.lost and {member[0] for member in job.members} & numbers:
                    job.note_lost(batch.lost)
                max_rows = self._rows_a_job()
                if job.is_due(max_rows=max_rows, is_behind=is_behind):
                    changes += job.named(job.evaluate(self._nodes, at_ns, max_rows=max_rows))
            if at_ns - self._passed_ns >= _PASS_NS:
                changes += self._passed(at_ns)
            return changes

    def tick(self, now_ns: int | None = None) -> list[Change]:
        """Returns the changes that follow from passing time: hangs, ended jobs. now_ns: by the stream's clock."""
        with self._lock:
            return self._passed(self.clock() if now_ns is None else now_ns)

    def thin_out(self) -> None:
        """Keep at most half of the rows of the largest job, see Job.thin_out()."""
        with self._lock:
            if self._jobs:
                max(self._jobs.values(), key=lambda job: job.rows.n_all).thin_out()

    def left_out(self) -> tuple[int, int]:
        """The collectives that thin_out() has dropped since the last call, also of ended jobs, and the largest k."""
        with self._lock:
            parts = [self._ended_left_out, *(job.left_out() for job in self._jobs.values())]
            self._ended_left_out = 0, 1
        return sum(n for n, _ in parts), max((every for n, every in parts if n), default=1)

    def report(self) -> Report:
        """The report on all jobs, including recently ended jobs."""
        with self._lock:
            at_ns = self.clock()
            jobs = [job for job in self._jobs.values() if job.rows.n_all]
            return together([*self._ended, *(job.report(self._nodes, at_ns) for job in jobs)])

    def finish(self) -> list[Change]:
        """End the stream: judge the remaining rows, and close all incidents. Returns the changes."""
        with self._lock:
            at_ns = self.clock()
            self._join(self._members.decided(at_ns, is_last=True))
            idle = [
                *self._idle.changes(self._nodes, at_ns, is_last=True),
                *self._engines.changes(self._nodes, at_ns, self._identities, is_last=True),
            ]
            ended = [change for group in list(self._jobs) for change in self._end(group, at_ns, EVENTS_ENDED)]
            return [*idle, *ended]

    def jobs(self) -> list[JobState]:
        """The jobs, including jobs that have ended since the last call."""
        with self._lock:
            at_ns = self.clock()
            over, self._ended_states = self._ended_states, []
            return [*over, *(job.state(self._nodes, at_ns) for job in self._jobs.values() if job.members)]

    def confirmed_ns(self) -> dict[str, int]:
        """The time of the last evaluation that confirmed each open incident, by the stream's clock."""
        with self._lock:
            return (
                {
                    incident.id: incident.confirmed_ns
                    for job in self._jobs.values()
                    for incident in job.incidents.open
                }
                | dict(self._idle.confirmed_ns())
                | dict(self._engines.confirmed_ns())
            )

    @property
    def n_rows(self) -> int:
        """Rows that are kept, of all tables."""
        return sum(job.rows.n_all for job in self._jobs.values())

    @property
    def n_jobs(self) -> int:
        """Jobs that have not ended; idle GPUs count as a further job."""
        return len(self._jobs) + bool(self._idle.confirmed_ns())

    @property
    def n_evaluations(self) -> tuple[int, int]:
        """Evaluations of the running jobs, and the rows that they examined."""
        jobs = self._jobs.values()
        return sum(job.n_evaluations for job in jobs), sum(job.n_rows_examined for job in jobs)

    def _note_lost(self, lost: Mapping[str, Mapping[str, int]]) -> None:
        for name, by_kind in lost.items():
            number = self._nodes.names.index(name) if name in self._nodes.names else UNKNOWN
            for job in self._jobs.values():
                if any(node == number for node, _ in job.members):
                    job.note_lost(by_kind)

    def _numbers(self, batch: Trace) -> set[int]:
        known = set(self._nodes.names)
        return self._nodes.numbered(tuple(name for name in batch.nodes if name in known))

    def _rows_a_job(self) -> int:
        return self.retention.all_rows // max(len(self._jobs), 1)

    def _join(self, merged: list[tuple[ProcessKey, ProcessKey]]) -> None:
        for kept, given_up in merged:
            other = self._jobs.pop(given_up, None)
            if other is not None:
                self._job(kept).absorb(other)

    def _job(self, group: ProcessKey) -> Job:
        if group not in self._jobs:
            name = f"{self._nodes.names[group[0]]} {group[1]}"
            self._jobs[group] = Job(name, self.limits, self.retention, self.usd_per_gpu_hour, self._drivers)
        return self._jobs[group]

    def _identities(self, processes: set[int]) -> dict[str, Array]:
        """The rows of `processes` and `owners` of some processes (node << 32 | pid)."""
        groups = {self._members.group((key >> 32, key & 0xFFFFFFFF)) for key in processes}
        jobs = [self._jobs[group] for group in groups if group in self._jobs]
        for job in jobs:
            job.rows.fold()
        return {
            table.name: joined([empty(table), *(job.rows.tables[table.name] for job in jobs)])
            for table in (PROCESSES, OWNERS)
        }

    def _routed(self, batch: Trace, at_ns: int) -> list[Job]:
        """Give each job its rows. Returns the jobs that got any."""
        tables = {table.name: getattr(batch, table.name) for table in JOB_TABLES}
        keys_by_table = [np.unique(process_keys(rows)) for rows in tables.values() if len(rows)]
        keys = np.unique(np.concatenate(keys_by_table)) if keys_by_table else np.zeros(0, np.int64)
        groups = [self._members.group((int(key >> 32), int(key & 0xFFFFFFFF))) for key in keys]
        jobs = []
        for group in dict.fromkeys(groups):
            job_keys = keys[[key == group for key in groups]]
            job = self._job(group)
            job.members |= {(int(key >> 32), int(key & 0xFFFFFFFF)) for key in job_keys}
            job.source, job.symbols = batch.source or job.source, max(batch.symbols, job.symbols, key=len)
            is_all = len(job_keys) == len(keys)
            job.add({name: rows if is_all else _of(rows, job_keys) for name, rows in tables.items()}, at_ns)
            if len(batch.host_events):
                # Host events of descendants of the job's processes are not evaluated.
                members = np.array([node << 32 | pid for node, pid in sorted(job.members)], np.int64)
                job.add_host_events(_of(batch.host_events, members))
            if not self._members.is_undecided(group):
                jobs.append(job)
        return jobs

    def _passed(self, at_ns: int) -> list[Change]:
        self._passed_ns = at_ns
        self._join(self._members.decided(at_ns))
        changes = [
            *self._idle.changes(self._nodes, at_ns),
            *self._engines.changes(self._nodes, at_ns, self._identities),
        ]
        for group, job in list(self._jobs.items()):
            if self._members.is_undecided(group):
                continue
            passed: list[Change] = []
            if job.is_quiet(at_ns):
                passed += job.evaluate(self._nodes, at_ns, max_rows=self._rows_a_job(), is_exact=True)
            passed += job.failed(self._nodes, at_ns)
            passed += job.standstill(self._nodes, at_ns)
            changes += job.named(passed)
            if at_ns - job.latest_at_ns >= self.forget_ns:
                changes += self._end(group, at_ns, NO_MORE_EVENTS)
            elif at_ns - job.latest_at_ns >= self.linger_ns and job.has_ended(self._nodes):
                changes += self._end(group, at_ns, "the job has ended")
        return changes

    def _end(self, group: ProcessKey, at_ns: int, reason: str) -> list[Change]:
        job = self._jobs[group]
        changes: list[Change] = []
        if job.rows.n:
            changes += job.evaluate(self._nodes, at_ns, max_rows=self._rows_a_job(), is_last=True)
            changes += job.standstill(self._nodes, at_ns, is_last=True)
            changes += job.failed(self._nodes, at_ns, is_last=True)
        changes += job.end(at_ns, reason)
        self._ended_states = [*self._ended_states, job.state(self._nodes, at_ns, is_over=True)][-_MAX_ENDED:]
        if job.rows.n_all:
            self._ended = [*self._ended, job.report(self._nodes, at_ns)][-_MAX_ENDED:]
        self._members.forget(job.members)
        (n_before, every_before), (n_left_out, every) = self._ended_left_out, job.left_out()
        if n_left_out:
            self._ended_left_out = n_before + n_left_out, max(every_before, every)
        del self._jobs[group]
        return job.named(changes)


def _of(rows: Array, keys: Array) -> Array:
    return rows[np.isin(process_keys(rows), keys)] if len(rows) else rows
