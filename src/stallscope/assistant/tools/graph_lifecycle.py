"""graph_lifecycle: the time span in which a process replays CUDA graphs, and the collectives inside."""

import numpy as np
from pydantic import Field

from stallscope.assistant.node_context import Node, Since, rank_of
from stallscope.diagnose import wall_text
from stallscope.diagnose.timeline import wall_ns
from stallscope.events.names import CollectiveFlag, Op
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool


class LifecycleParams(Params):
    since_s: Since | None = Field(default=None, description="Only the last N seconds; null: the whole trace.")


class GraphRow(Row):
    pid: int
    rank: int | None
    n_eager_collectives: int = Field(description="Collectives issued by calls, outside of graphs.")
    n_replayed_collectives: int = Field(
        description="Collectives replayed from a graph: they arrive at its launch."
    )
    first_replay: str | None
    last_replay: str | None
    n_slow_launches: int = Field(description="Graph launches recorded as slow calls.")


class Lifecycle(Result):
    summary: str
    processes: list[GraphRow]


def graph_lifecycle(context: Node, params: LifecycleParams) -> Lifecycle:
    """CUDA graphs by process: first and last replay, and the number of collectives in them."""
    trace = context.trace(params.since_s)
    ranks = rank_of(trace)
    rows = []
    process_keys = np.unique(np.stack([trace.processes["node"], trace.processes["pid"]], axis=1), axis=0)
    for node, pid in process_keys.tolist():
        process_rows = trace.collectives[
            (trace.collectives["node"] == node) & (trace.collectives["pid"] == pid)
        ]
        calls = trace.calls[(trace.calls["node"] == node) & (trace.calls["pid"] == pid)]
        is_replayed = (process_rows["flags"] & CollectiveFlag.GRAPH) != 0
        times = process_rows["ts_ns"][is_replayed]
        moments = (
            [wall_text(wall_ns(trace, node, float(t))) for t in (times.min(), times.max())]
            if len(times)
            else []
        )
        rows.append(
            GraphRow(
                pid=pid,
                rank=ranks.get((node, pid)),
                n_eager_collectives=int((~is_replayed).sum()),
                n_replayed_collectives=int(is_replayed.sum()),
                first_replay=moments[0] if moments else None,
                last_replay=moments[1] if moments else None,
                n_slow_launches=int((calls["op"] == Op.GRAPH_LAUNCH).sum()),
            )
        )
    n = sum(row.n_replayed_collectives > 0 for row in rows)
    text = f"{n} of {len(rows)} processes replay graphs with collectives in them"
    return Lifecycle(summary=text, processes=rows)


TOOL: Tool[Node] = Tool("graph_lifecycle", "CUDA graphs by process", graph_lifecycle)
