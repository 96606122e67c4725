"""fleet.cluster.idle_gpus: GPUs that jobs hold without using them."""

from typing import Any

from pydantic import Field

from stallscope import rates
from stallscope.events.counted import counted
from stallscope.events.owner import OWNER_LABELS, column
from stallscope.serve.tools.tenant_context import Cluster, JobParams, Node, TenantContext, iso_time
from stallscope.serve.tools.tool_registry import Result, Row, Tool
from stallscope.store.hub.job_filter import JobChoice

_FRESH_NS = 300_000_000_000
"""An agent repeats a row every minute."""


class IdleParams(JobParams):
    cluster: Cluster = None
    node: Node = None
    limit: int = Field(default=100, ge=1, le=1000)


class IdleRow(Row):
    cluster: str | None
    node: str
    holder: str = Field(description="job, pod or process with its number or name.")
    owner: dict[str, str] = Field(description="job, user, account, namespace, ...")
    gpus: list[str] = Field(description="As the scheduler names them.")
    reason: str
    since: str | None
    gpu_hours: float = Field(description="GPU hours without use so far.")
    usd_per_hour: float | None = Field(description="null if no price is known.")


class Idle(Result):
    summary: str
    rows: list[IdleRow]
    n_gpus: int
    usd_per_hour: float | None = Field(
        description="Price of the GPUs with a known price; null if no price is known."
    )


def idle_gpus(context: TenantContext, params: IdleParams) -> Idle:
    """GPUs that a job, a pod or a process holds without using them: owner, since when, and the price of an hour.

    A job that waits for its peers, or that prepares data, is not idle.
    """
    found = context.rows(
        "idle_gpus",
        cluster=params.cluster,
        node=params.node,
        fresh_ns=context.hub.now_ns() - _FRESH_NS,
        max_rows=1000,
    )
    rows = [_row(row, context.hub.rates) for row in found if _is_chosen(row, params.choice)]
    n_gpus = sum(len(row.gpus) for row in rows)
    prices = [row.usd_per_hour for row in rows if row.usd_per_hour is not None]
    usd = round(sum(prices), 4) if prices else None
    text = (
        f"{counted(len(rows), 'holder')} without use of {counted(n_gpus, 'GPU')}" if rows else "No idle GPU"
    )
    text += f", ${usd:,.2f} per hour." if usd is not None else "."
    return Idle(summary=text, rows=rows[: params.limit], n_gpus=n_gpus, usd_per_hour=usd)


def _is_chosen(row: dict[str, Any], choice: JobChoice) -> bool:
    return choice.accepts({label: row[column(label)] or "" for label in OWNER_LABELS})


def _row(row: dict[str, Any], table: rates.RateTable) -> IdleRow:
    price = rates.lookup(table, gpu=row["gpu_model"], provider=row["provider"])
    return IdleRow(
        cluster=row["cluster_id"],
        node=row["node_id"],
        holder=row["holder"],
        owner={label: value for label in OWNER_LABELS if (value := row[column(label)])},
        gpus=row["gpus"],
        reason=row["reason"],
        since=iso_time(row["since_ns"]),
        gpu_hours=round(row["gpu_seconds"] / 3600, 3),
        usd_per_hour=round(price.rate.usd_per_hour * row["n_gpus"], 4) if price else None,
    )


TOOL = Tool("fleet.cluster.idle_gpus", "GPUs held without use", idle_gpus)
