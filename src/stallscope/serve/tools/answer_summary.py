"""fleet.cluster.summary: the first call of an assistant."""

from pydantic import Field

from stallscope.events.counted import counted
from stallscope.serve.tools.job_answer import Answer, JobRow, answer_on, job_rows
from stallscope.serve.tools.tenant_context import Cluster, JobParams, TenantContext, window
from stallscope.serve.tools.tool_registry import Result, Row, Tool
from stallscope.serve.tools.verdict_row import StoredVerdict, stored_verdict, stored_verdicts


class SummaryParams(JobParams):
    cluster: Cluster = None


class ClusterRow(Row):
    cluster: str
    n_nodes: int
    n_ranks: int = Field(description="Number of distinct ranks.")
    n_gpus: int | None = Field(description="null if no machine reported its GPUs.")
    gpu_models: list[str]
    providers: list[str]
    first_seen: str | None
    last_seen: str | None
    n_open_verdicts: int


class Summary(Result):
    summary: str
    answer: Answer = Field(description="On all jobs: found, healthy or inconclusive.")
    jobs: list[JobRow] = Field(description="The newest jobs, each with its answer and its evidence.")
    rows: list[ClusterRow]
    open_verdicts: list[StoredVerdict] = Field(description="The five newest open verdicts.")


def summary(context: TenantContext, params: SummaryParams) -> Summary:
    """Clusters with their machines, ranks, time of last contact, and open verdicts. Start here."""
    rows = [
        ClusterRow(cluster=row.pop("cluster_id"), **row)
        for row in context.rows("cluster_summary", only=params.choice, cluster=params.cluster)
    ]
    opened = [
        stored_verdict(row)
        for row in stored_verdicts(
            context, cluster=params.cluster, choice=params.choice, state="open", max_rows=5
        )
    ]
    n_open = sum(row.n_open_verdicts for row in rows)
    n_nodes = sum(row.n_nodes for row in rows)
    sizes = (counted(len(rows), "cluster"), counted(n_nodes, "machine"), counted(n_open, "open verdict"))
    text = f"{', '.join(sizes)}."
    if opened:
        text += f" Newest: {opened[0]['summary']}"
    jobs = job_rows(context, cluster=params.cluster, choice=params.choice, times=window(None, None))
    answer = answer_on(jobs, context.caveat(params.cluster))
    return Summary(summary=text, answer=answer, jobs=jobs, rows=rows, open_verdicts=opened)


TOOL = Tool("fleet.cluster.summary", "Clusters and open verdicts", summary)
