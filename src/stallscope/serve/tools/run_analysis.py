"""fleet.cluster.run_analysis: the client's own SQL."""

from pydantic import Field

from stallscope.serve.sql.sql_gate import MAX_SQL_BYTES
from stallscope.serve.tools.tenant_context import TenantContext
from stallscope.serve.tools.tool_registry import Cell, Params, Result, Tool


class AnalysisParams(Params):
    sql: str = Field(
        min_length=1,
        max_length=MAX_SQL_BYTES,
        description="One SELECT (DuckDB), or EXPLAIN of one SELECT; read-only.",
    )
    params: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, max_length=100, description="Values of $name in the SQL."
    )
    limit: int = Field(default=100, ge=1, le=10_000, description="Maximum number of rows.")


class Analysis(Result):
    columns: list[str]
    rows: list[list[Cell]] = Field(description="Values in the order of columns.")
    truncated: bool = Field(
        description="More rows than limit, or than fit into an answer, exist; or `note` describes missing rows."
    )
    note: str = Field(
        default="",
        exclude_if=lambda output: not output,
        description="The table that the answer covers only in part, and the missing part; absent if complete.",
    )


def run_analysis(context: TenantContext, params: AnalysisParams) -> Analysis:
    """Run your own SQL over the tables events, collectives, verdicts, causal_chains, node_metrics, nodes, gpu_rates.

    DESCRIBE events lists its columns. Times are ts (UTC) and ts_ns. Time, rows and memory are limited.
    """
    result = context.hub.workers.query(
        params.sql, tenant=context.tenant, params=params.params, max_rows=params.limit
    )
    return Analysis(columns=result.columns, rows=result.rows, truncated=result.truncated, note=result.note)


TOOL = Tool("fleet.cluster.run_analysis", "SQL", run_analysis, scope="sql")
