"""fleet.cluster.find_nccl_processes: maps processes to ranks; also of jobs that use MPI, UCX or gloo instead."""

from pydantic import Field

from stallscope.events.counted import counted
from stallscope.serve.tools.tenant_context import Cluster, JobParams, Node, TenantContext, iso_time
from stallscope.serve.tools.tool_registry import Result, Row, Tool


class ProcessesParams(JobParams):
    cluster: Cluster = None
    node: Node = None
    limit: int = Field(default=100, ge=1, le=10_000)


class ProcessRow(Row):
    cluster: str | None
    node: str | None
    pid: int
    command: str | None = Field(description="Name of the process, as set by the process.")
    rank: int | None
    local_rank: int | None
    nranks: int | None
    device: int | None
    libraries: str | None = Field(
        description="Communication libraries that it has loaded, such as `nccl, mpich, ucx`."
    )
    n_communicators: int
    n_collectives: int
    first_seen: str | None
    last_seen: str | None = Field(description="Time of its last collective.")
    ended: str | None


class Processes(Result):
    summary: str
    rows: list[ProcessRow]


def find_nccl_processes(context: TenantContext, params: ProcessesParams) -> Processes:
    """Processes that use NCCL or have loaded MPI, UCX or gloo, with rank, device and the time of their last
    collective.
    """
    rows = context.rows(
        "nccl_processes", only=params.choice, cluster=params.cluster, node=params.node, max_rows=params.limit
    )
    same = (
        *("pid", "rank", "local_rank", "nranks", "device", "libraries", "n_communicators", "n_collectives"),
    )
    flat = [
        ProcessRow(
            cluster=row["cluster_id"],
            node=row["node_id"],
            command=row["comm"],
            first_seen=iso_time(row["first_seen_ns"]),
            last_seen=iso_time(row["last_seen_ns"]),
            ended=iso_time(row["ended_ns"]),
            **{name: row[name] for name in same},
        )
        for row in rows
    ]
    n_nodes = len({(row.cluster, row.node) for row in flat})
    return Processes(summary=f"{counted(len(flat), 'process')} on {counted(n_nodes, 'machine')}.", rows=flat)


TOOL = Tool(
    "fleet.cluster.find_nccl_processes", "Processes that use NCCL, MPI, UCX or gloo", find_nccl_processes
)
