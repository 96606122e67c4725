"""fleet.cluster.memcpy_bandwidth_summary: bandwidth of copies, grouped by size."""

from pydantic import Field

from stallscope.events.counted import counted
from stallscope.serve.tools.tenant_context import Cluster, From, JobParams, Node, TenantContext, To, window
from stallscope.serve.tools.tool_registry import Result, Row, Tool


class CopiesParams(JobParams):
    cluster: Cluster = None
    node: Node = None
    from_: From = None
    to: To = None
    limit: int = Field(default=20, ge=1, le=1000)


class CopyRow(Row):
    cluster: str | None
    node: str | None
    rank: int | None
    function: str | None = Field(description="The called function, as the sender names it.")
    size_class_bytes: int = Field(description="Copies from this size to four times it.")
    n: int
    n_bytes: int
    median_gbps: float = Field(description="10^9 bytes per second.")
    slowest_gbps: float
    fastest_gbps: float
    busy_s: float


class Copies(Result):
    summary: str
    rows: list[CopyRow]


def memcpy_bandwidth_summary(context: TenantContext, params: CopiesParams) -> Copies:
    """Bandwidth of memory copies by machine, rank, function and size class, most time first.

    Covers only the copies that agents sent, by default slow copies: compare ranks with each other, not with a data
    sheet.
    """
    rows = context.rows(
        "copies",
        only=params.choice,
        cluster=params.cluster,
        node=params.node,
        max_rows=params.limit,
        **window(params.from_, params.to),
    )
    flat = [
        CopyRow(
            cluster=row["cluster_id"],
            node=row["node_id"],
            rank=row["rank"],
            function=row["symbol"],
            size_class_bytes=row["size_class"],
            n=row["n"],
            n_bytes=row["n_bytes"],
            median_gbps=row["median_gbps"],
            slowest_gbps=row["slowest_gbps"],
            fastest_gbps=row["fastest_gbps"],
            busy_s=row["busy_s"],
        )
        for row in rows
    ]
    if not flat:
        return Copies(summary="No copies with a known size and duration were recorded.", rows=[])
    n, busy_s = sum(row.n for row in flat), sum(row.busy_s for row in flat)
    return Copies(summary=f"{counted(n, 'copy', 'copies')}, {busy_s:.3g} s in total.", rows=flat)


TOOL = Tool("fleet.cluster.memcpy_bandwidth_summary", "Bandwidth of copies", memcpy_bandwidth_summary)
