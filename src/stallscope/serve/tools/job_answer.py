"""The jobs of a cluster with one of three answers each: healthy, found or inconclusive, as `explain` gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from stallscope.events.owner import GROUP_LABELS, column
from stallscope.serve.tools.tenant_context import TenantContext, iso_time
from stallscope.serve.tools.tool_registry import Row
from stallscope.store.hub.job_filter import JobChoice

Answer = Literal["healthy", "found", "inconclusive"]
_MAX_JOBS = 100


class Reason(Row):
    reason: str
    action: str = Field(description="The next step to get an answer.")


class JobRow(Row):
    job: str
    cluster: str | None
    answer: Answer = Field(description="healthy only if the examined data would have shown a fault.")
    reasons: list[Reason] = Field(description="Why the answer is inconclusive.")
    evidence: dict[str, Any] | None = Field(
        description="Completeness of the examined data: ranks, rounds, steps, lost records; null before the first "
        "evaluation."
    )
    n_ranks: int
    nodes: list[str]
    begin: str | None
    end: str | None = Field(description="null while the job runs.")
    last_seen: str | None = Field(description="Time of its last collective.")
    owner: dict[str, str] = Field(
        description="job, user, account, ...: the labels that all its processes share."
    )


def job_rows(
    context: TenantContext,
    *,
    cluster: str | None,
    times: Mapping[str, int | None],
    choice: JobChoice | None = None,
    rank: int | None = None,
) -> list[JobRow]:
    """The newest jobs, running jobs first. times: see window(). rank: only jobs with this rank."""
    rows = context.job_rows(choice or JobChoice(), cluster=cluster, max_rows=_MAX_JOBS, **times)
    return [_job_row(row) for row in rows if rank is None or _has_rank(row, rank)]


def answer_on(jobs: Sequence[JobRow], caveat: str) -> Answer:
    """The answer on several jobs. caveat: why data were not examined."""
    if any(job.answer == "found" for job in jobs):
        return "found"
    is_healthy = jobs and not caveat and all(job.answer == "healthy" for job in jobs)
    return "healthy" if is_healthy else "inconclusive"


def sentence(jobs: Sequence[JobRow]) -> str:
    """The answer on jobs without a matching verdict, with its first reason; "" if a job has other verdicts."""
    if answer_on(jobs, "") == "found":
        return ""
    if answer_on(jobs, "") == "healthy":
        steps = [job.evidence["n_steps"] for job in jobs if job.evidence and job.evidence["n_steps"]]
        return f"Healthy: no rank slows down the others in the {sum(steps)} steps examined."
    reasons = [reason.reason for job in jobs for reason in job.reasons]
    return f"Inconclusive: {reasons[0] if reasons else 'no job has been examined'}."


def _has_rank(row: dict[str, Any], rank: int) -> bool:
    return any(member[2] == rank for member in json.loads(row["members"]))


def _job_row(row: dict[str, Any]) -> JobRow:
    members = json.loads(row["members"])
    return JobRow(
        job=row["job"],
        cluster=row["cluster_id"],
        answer=row["answer"],
        reasons=[Reason(**reason) for reason in json.loads(row["reasons"])],
        evidence=json.loads(row["evidence"]),
        n_ranks=row["n_ranks"],
        nodes=sorted({node for node, _, _ in members}),
        begin=iso_time(row["begin_ns"]),
        end=iso_time(row["ended_ns"]),
        last_seen=iso_time(row["last_ns"]),
        owner={label: value for label in GROUP_LABELS if (value := row[column(label)])},
    )
