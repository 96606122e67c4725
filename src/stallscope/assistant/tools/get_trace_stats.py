"""get_trace_stats: contents of the trace, and durations of the operations."""

import numpy as np
from pydantic import Field

from stallscope.assistant.node_context import SINCE_S, Detail, Node, Since
from stallscope.diagnose import wall_text
from stallscope.events.layout import TABLES, UNKNOWN
from stallscope.events.names import Op, word
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool

_FEW = 8


class StatsParams(Params):
    since_s: Since = SINCE_S
    detail: Detail = "short"


class Operation(Row):
    operation: str
    n: int
    p50_ms: float | None = Field(description="null for calls that are counted but not timed.")
    p99_ms: float | None
    max_ms: float | None


class Stats(Result):
    summary: str
    source: str
    begin: str | None = Field(description="Time of the first event in the window, UTC.")
    end: str | None
    n_processes: int
    n_ranks: int
    n_lost_records: int
    rows: dict[str, int] = Field(description="Rows by table.")
    operations: list[Operation]


def get_trace_stats(context: Node, params: StatsParams) -> Stats:
    """Contents of this machine's trace: processes, rows, lost records, and durations of each kind of slow call."""
    from stallscope.diagnose.timeline import wall_ns

    trace = context.trace(params.since_s)
    times = np.concatenate([trace.collectives["ts_ns"], trace.calls["ts_ns"], trace.snapshots["ts_ns"]])
    ends = [wall_ns(trace, 0, float(t)) for t in (times.min(), times.max())] if len(times) else [None, None]
    operations = _operations(trace.collectives, trace.calls)
    rows = {table.name: len(getattr(trace, table.name)) for table in TABLES}
    n_ranks = len({int(r) for r in trace.processes["rank"] if r != UNKNOWN})
    n_processes = len({(int(p["node"]), int(p["pid"])) for p in trace.processes})
    n_lost = sum(trace.lost.values())
    return Stats(
        summary=f"{n_processes} processes, {rows['collectives']:,} collectives, {rows['calls']:,} slow calls in the "
        f"last {params.since_s} s of the trace; {n_lost:,} records lost",
        source=trace.source,
        begin=wall_text(ends[0]),
        end=wall_text(ends[1]),
        n_processes=n_processes,
        n_ranks=n_ranks,
        n_lost_records=n_lost,
        rows=rows,
        operations=operations if params.detail == "full" else operations[:_FEW],
    )


def _operations(collectives: np.ndarray, calls: np.ndarray) -> list[Operation]:
    """The most frequent first. Collectives are only enqueued, so the duration of their calls is omitted."""
    operations = [
        Operation(operation=word(Op, int(op)), n=int(n), p50_ms=None, p99_ms=None, max_ms=None)
        for op, n in zip(*np.unique(collectives["op"], return_counts=True), strict=True)
    ]
    done = calls[calls["duration_ns"] != UNKNOWN]
    for op in np.unique(done["op"]).tolist():
        took_ms = done["duration_ns"][done["op"] == op] / 1e6
        p50, p99, most = (round(float(np.quantile(took_ms, q)), 3) for q in (0.5, 0.99, 1))
        operations.append(
            Operation(operation=word(Op, int(op)), n=len(took_ms), p50_ms=p50, p99_ms=p99, max_ms=most)
        )
    return sorted(operations, key=lambda operation: -operation.n)


TOOL: Tool[Node] = Tool("get_trace_stats", "Contents of the trace", get_trace_stats)
