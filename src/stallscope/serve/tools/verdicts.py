"""fleet.cluster.verdicts: the stored verdicts."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from stallscope.errors import NotFound
from stallscope.events.counted import counted
from stallscope.events.verdict_fields import KINDS, SEVERITIES
from stallscope.serve.sql.values import plain
from stallscope.serve.tools.job_answer import Answer, JobRow, answer_on, job_rows, sentence
from stallscope.serve.tools.tenant_context import (
    MAX_TEXT,
    Cluster,
    From,
    JobParams,
    Node,
    Rank,
    TenantContext,
    To,
    window,
)
from stallscope.serve.tools.tool_registry import Result, Tool
from stallscope.serve.tools.verdict_row import StoredVerdict, stored_verdict, stored_verdicts

Kind = Annotated[Literal[KINDS], Field(description="Only this kind.")]  # type: ignore[valid-type]
Severity = Annotated[Literal[SEVERITIES], Field(description="Only this severity.")]  # type: ignore[valid-type]


class VerdictsParams(JobParams):
    cluster: Cluster = None
    node: Node = None
    rank: Rank = None
    kind: Kind | None = None
    severity: Severity | None = None
    state: Literal["open", "closed"] | None = Field(default=None, description="Default: both states.")
    verdict_id: str | None = Field(
        default=None, max_length=MAX_TEXT, description="One verdict with all its details."
    )
    from_: From = None
    to: To = None
    limit: int = Field(default=20, ge=1, le=500)


class Verdicts(Result):
    summary: str
    answer: Answer = Field(description="On all jobs of the question: found, healthy or inconclusive.")
    jobs: list[JobRow] = Field(description="The jobs, each with its answer and its evidence.")
    n_rows_not_examined: int = Field(description="Rows of the last minutes that were not examined.")
    rows: list[StoredVerdict]
    verdict: dict[str, Any] | None = Field(
        description="The whole verdict, with causes, evidence and advice; present only for a verdict_id."
    )


def verdicts(context: TenantContext, params: VerdictsParams) -> Verdicts:
    """Verdicts of the continuous diagnosis: rank, start, cause and loss. Open verdicts first, then the newest.

    With verdict_id: that verdict with its causes, evidence and advice.
    """
    rows = stored_verdicts(
        context,
        cluster=params.cluster,
        node=params.node,
        rank=params.rank,
        kind=params.kind,
        severity=params.severity,
        state=params.state,
        verdict_id=params.verdict_id,
        choice=params.choice,
        max_rows=params.limit,
        **window(params.from_, params.to),
    )
    if params.verdict_id is not None and not rows:
        raise NotFound(
            f"no verdict {params.verdict_id[:80]!r} matches; fleet.cluster.verdicts lists the verdicts"
        )
    whole = None
    if params.verdict_id is not None and rows[0]["verdict"]:
        whole = plain(json.loads(rows[0]["verdict"]))
    flat_rows = [stored_verdict(row) for row in rows]
    n_open = sum(row["state"] == "open" for row in flat_rows)
    more = " or more" if len(flat_rows) == params.limit else ""
    jobs = job_rows(
        context, cluster=params.cluster, choice=params.choice, times=window(params.from_, params.to)
    )
    caveat = context.caveat(params.cluster)
    if flat_rows:
        text = f"{counted(len(flat_rows), 'verdict')}{more}, {n_open} open."
    else:
        text = "Unknown." if caveat else f"No verdict matches. {sentence(jobs)}".strip()
    return Verdicts(
        summary=text,
        answer=answer_on(jobs, caveat),
        jobs=jobs,
        n_rows_not_examined=context.hub.store.unexamined.n_rows(context.tenant, params.cluster),
        rows=flat_rows,
        verdict=whole,
    )


TOOL = Tool("fleet.cluster.verdicts", "Stored verdicts", verdicts)
