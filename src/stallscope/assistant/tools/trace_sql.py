"""run_analysis: one SELECT on the trace."""

from pydantic import Field

from stallscope.assistant.node_context import Node
from stallscope.events.counted import counted
from stallscope.query.sql import Limits, ask
from stallscope.serve.tools.tool_registry import Cell, Params, Result, Tool

_MAX_CELL = 2000


class SqlParams(Params):
    sql: str = Field(
        max_length=100_000,
        description="One SELECT in SQLite's SQL. `SELECT name, sql FROM sqlite_master` lists the tables;"
        " op_name(op), category_name(category), rank_of(node, pid), wall_time(node, ts_ns) return readable values.",
    )
    limit: int = Field(default=50, ge=1, le=1000)
    timeout_s: float = Field(default=10.0, gt=0, le=60)


class Rows(Result):
    summary: str
    columns: list[str]
    rows: list[list[Cell]]
    is_cut: bool = Field(description="More rows than `limit` exist.")


def run_analysis(context: Node, params: SqlParams) -> Rows:
    """Query the trace of this machine in SQL (read-only)."""
    result = ask(context.db, params.sql, limits=Limits(max_rows=params.limit, timeout_s=params.timeout_s))
    rows = [[_cell(value) for value in row] for row in result.rows]
    n = counted(len(rows), "row")
    return Rows(
        summary=f"{n}; more rows exist" if result.is_cut else n,
        columns=list(result.columns),
        rows=rows,
        is_cut=result.is_cut,
    )


def _cell(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()[:_MAX_CELL]
    return value[:_MAX_CELL] if isinstance(value, str) else value


TOOL: Tool[Node] = Tool("run_analysis", "SQL on the trace", run_analysis, scope="sql", aliases=("run_sql",))
