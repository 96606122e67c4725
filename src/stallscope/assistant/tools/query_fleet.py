"""query_fleet: queries the agents of all known machines at the same time."""

from typing import Any, Literal

from pydantic import Field

from stallscope.assistant.node_context import Node, short_text
from stallscope.diagnose import json_row, text, verdict_row
from stallscope.errors import BadInput
from stallscope.events.verdict_fields import FIELDS
from stallscope.query import fanout, fleet_trace
from stallscope.query.sql import Limits
from stallscope.serve.tools.tool_registry import Cell, Params, Result, Row, Tool

_OPS = (
    "SELECT node, rank_of(node, pid) AS rank, op_name(op) AS operation, count(*) AS n,"
    " max(duration_ns) / 1e6 AS max_ms, avg(duration_ns) / 1e6 AS mean_ms FROM calls"
    " WHERE duration_ns IS NOT NULL GROUP BY 1, 2, 3 ORDER BY max_ms DESC"
)
_OVERVIEW = (
    "SELECT node, count(*) AS n_collectives, count(DISTINCT pid) AS n_processes, min(wall_time(node, ts_ns)) AS first,"
    " max(wall_time(node, ts_ns)) AS last FROM collectives GROUP BY node ORDER BY node"
)


class FleetParams(Params):
    action: Literal["chains", "ops", "overview", "sql"] = Field(
        default="overview",
        description="chains: the verdicts on the whole job. ops: slow calls by rank. overview: data on each node.",
    )
    sql: str | None = Field(default=None, max_length=100_000, description="For action sql: one SELECT.")
    since_s: int | None = Field(default=300, ge=1, description="Only the last N seconds; null: all.")
    limit: int = Field(default=50, ge=1, le=1000)


class Missing(Row):
    node: str
    reason: str


class Fleet(Result):
    summary: str
    columns: list[str]
    rows: list[list[Cell]]
    is_cut: bool
    missing: list[Missing] = Field(description="Machines that did not answer; their data is missing.")


def query_fleet(context: Node, params: FleetParams) -> Fleet:
    """Query the agents of all machines: the culprit of a job that spans them, their slow calls, or SQL over all."""
    if not context.nodes or context.access is None:
        raise BadInput("no other machines are known; start with --nodes HOST:PORT,HOST:PORT or set `nodes`")
    if (params.action == "sql") != (params.sql is not None):
        raise BadInput("query_fleet: sql and action=sql belong together; give both or neither")
    since_ns = None if params.since_s is None else params.since_s * 10**9
    if params.action == "chains":
        return _chains(context, since_ns)
    statement = params.sql or {"ops": _OPS, "overview": _OVERVIEW}[params.action]
    limits = Limits(max_rows=params.limit, timeout_s=context.access.timeout_s)
    result = fanout.query(statement, context.nodes, context.access, limits=limits, since_ns=since_ns)
    return Fleet(
        summary=_summary(len(result.replies), result.failures, f"{len(result.answer.rows)} rows"),
        columns=list(result.answer.columns),
        rows=[list(row) for row in result.answer.rows],
        is_cut=result.answer.is_cut,
        missing=[Missing(node=f.address, reason=short_text(f.reason)) for f in result.failures],
    )


def _chains(context: Node, since_ns: int | None) -> Fleet:
    assert context.access is not None
    merged = fleet_trace.asked_of(context.nodes, context.access, since_ns=since_ns)
    report = context.diagnosed(merged.trace)
    rows = [list(json_row(verdict_row(verdict)).values()) for verdict in report.verdicts]
    headline = text.headline(report)
    return Fleet(
        summary=_summary(len(merged.replies), merged.failures, headline),
        columns=[field.json_name for field in FIELDS],
        rows=rows,
        is_cut=False,
        missing=[Missing(node=f.address, reason=short_text(f.reason)) for f in merged.failures],
    )


def _summary(n_answered: int, failures: list[Any], content: str) -> str:
    missing = f"; {len(failures)} did not answer" if failures else ""
    return f"{content} ({n_answered} machines answered{missing})"


TOOL: Tool[Node] = Tool("query_fleet", "Query all machines", query_fleet, scope="sql")
