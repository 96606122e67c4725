"""fleet.cluster.kernel_launch_summary: number of kernel launches, and the slow launches."""

from pydantic import Field

from stallscope.events.counted import counted
from stallscope.serve.tools.tenant_context import Cluster, From, JobParams, Node, TenantContext, To, window
from stallscope.serve.tools.tool_registry import Result, Row, Tool


class LaunchesParams(JobParams):
    cluster: Cluster = None
    node: Node = None
    from_: From = None
    to: To = None
    limit: int = Field(default=20, ge=1, le=1000)


class LaunchRow(Row):
    cluster: str | None
    node: str | None
    pid: int | None
    rank: int | None
    n_launches: int | None = Field(description="null if the agent does not count launches.")
    n_rounds: int = Field(description="Collectives in the same time.")
    launches_per_round: float | None
    n_slow: int = Field(description="Launches that were recorded as slow calls.")
    slow_median_us: float | None
    slow_longest_us: float | None
    slow_total_ms: float | None


class Launches(Result):
    summary: str
    rows: list[LaunchRow]


def kernel_launch_summary(context: TenantContext, params: LaunchesParams) -> Launches:
    """Kernel launches of each process: their number, the number per collective, and the duration of slow launches."""
    rows = context.rows(
        "launches",
        only=params.choice,
        cluster=params.cluster,
        node=params.node,
        max_rows=params.limit,
        **window(params.from_, params.to),
    )
    flat = [
        LaunchRow(
            cluster=row["cluster_id"],
            node=row["node_id"],
            pid=row["pid"],
            rank=row["rank"],
            n_launches=row["n_launches"],
            n_rounds=row["n_rounds"],
            launches_per_round=_ratio(row["n_launches"], row["n_rounds"]),
            n_slow=row["n_slow"],
            slow_median_us=_scaled(row["slow_median_ns"], 1e3),
            slow_longest_us=_scaled(row["slow_longest_ns"], 1e3),
            slow_total_ms=_scaled(row["slow_total_ns"], 1e6),
        )
        for row in rows
    ]
    n_slow = sum(row.n_slow for row in flat)
    text = (
        f"{counted(len(flat), 'process')}; slow launches: {n_slow}." if flat else "No launches were recorded."
    )
    return Launches(summary=text, rows=flat)


def _ratio(n: int | None, of: int) -> float | None:
    return None if n is None or of < 2 else round(n / (of - 1), 2)


def _scaled(ns: float | None, unit: float) -> float | None:
    return None if ns is None else round(ns / unit, 3)


TOOL = Tool("fleet.cluster.kernel_launch_summary", "Kernel launches", kernel_launch_summary)
