"""The rows of `jobs`: a row is written when its answer or members change, when the job ends, and every some seconds.

Processes become one job when they create a communicator. A process that was not evaluated gets a row only after
FIRST_S, and the row of a job whose processes joined another job ends without members.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stallscope.continuous.verdict_rows import job_row
from stallscope.diagnose import Answer, JobState
from stallscope.events.owner import GROUP_LABELS, column
from stallscope.events.trace import Gap

EVERY_S = 10.0
FIRST_S = 10.0
_NOT_EXAMINED = Gap(
    "rows of this cluster were not examined in the last minutes",
    "Run the hub on more cores, or `stallscope explain` on the node traces: a small delay may be hidden.",
)
_OF_STATE = ("answer", "reasons", "n_ranks", "ended_ns", *map(column, GROUP_LABELS))


@dataclass
class JobRows:
    """known: the last row of each running job by id, and when it was written (monotonic), by tenant and cluster."""

    known: dict[tuple[str, str], dict[str, tuple[dict[str, Any], float]]] = field(default_factory=dict)
    _first_s: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def changed(
        self, tenant: str, cluster: str, jobs: Sequence[JobState], now_s: float
    ) -> list[dict[str, Any]]:
        """The rows of a cluster to write now. jobs: all running jobs of the cluster, and those that have ended."""
        known = self.known.setdefault((tenant, cluster), {})
        first_s = self._first_s.setdefault((tenant, cluster), {})
        out = _joined(known, first_s, jobs)
        for job in jobs:
            if job.id not in known and _is_early(job, first_s, now_s):
                continue
            first_s.pop(job.id, None)
            row = job_row(job, cluster)
            before, at_s = known.get(job.id, ({}, -EVERY_S))
            is_new = any(before.get(name) != row[name] for name in _OF_STATE)
            if is_new or (now_s - at_s >= EVERY_S and before != row):
                out.append(row)
                known[job.id] = row, now_s
            if job.ended_ns is not None:
                known.pop(job.id, None)
        return out


def _is_early(job: JobState, first_s: dict[str, float], now_s: float) -> bool:
    """Whether the job is a process that may still join others. first_s: the time of its first state, by id."""
    if job.evidence is not None or len(job.members) > 1 or job.ended_ns is not None:
        return False
    return now_s - first_s.setdefault(job.id, now_s) < FIRST_S


def _joined(
    known: dict[str, tuple[dict[str, Any], float]], first_s: dict[str, float], jobs: Sequence[JobState]
) -> list[dict[str, Any]]:
    """The last rows of jobs whose processes are now part of another job."""
    ids = {job.id for job in jobs}
    for early in first_s.keys() - ids:
        del first_s[early]
    gone = [id_ for id_ in known if id_ not in ids]
    if not gone:
        return []
    job_of = {(member.node, member.pid): job.id for job in jobs for member in job.members}
    rows = [known.pop(id_)[0] for id_ in gone]
    return [_end_of(row, job) for row in rows if (job := _new_job(row, job_of))]


def as_examined(jobs: Sequence[JobState], *, is_complete: bool) -> Sequence[JobState]:
    """The jobs, of which none is healthy while rows of its cluster are not examined (is_complete: all are)."""
    if is_complete:
        return jobs
    return [
        replace(job, answer=Answer.INCONCLUSIVE, reasons=(_NOT_EXAMINED,))
        if job.answer is Answer.HEALTHY
        else job
        for job in jobs
    ]


def _new_job(row: dict[str, Any], job_of: dict[tuple[str, int], str]) -> str | None:
    processes = ((node, pid) for node, pid, _ in json.loads(row["members"]))
    return next((job_of[process] for process in processes if process in job_of), None)


def _end_of(row: dict[str, Any], job: str) -> dict[str, Any]:
    reason = {"reason": f"its processes are part of job {job}", "action": f"Read the answer on job {job}."}
    return row | {
        "n_ranks": 0,
        "members": "[]",
        "ended_ns": row["last_ns"] or row["begin_ns"],
        "answer": "inconclusive",
        "reasons": json.dumps([reason]),
    }
