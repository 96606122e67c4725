"""fleet.cluster.latency: the requests to inference engines, their times, and their open requests."""

from typing import Any

from pydantic import Field

from stallscope.events.counted import counted
from stallscope.events.histograms import Percentiles, joined, percentiles_ms
from stallscope.serve.tools.tenant_context import Cluster, From, Node, TenantContext, To, window
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool

_LAST_NS = 300_000_000_000
_FRESH_NS = 15_000_000_000
_INTERVAL_S = 10


class LatencyParams(Params):
    cluster: Cluster = None
    node: Node = None
    from_: From = None
    to: To = None
    limit: int = Field(default=100, ge=1, le=1000)


class EndpointRow(Row):
    cluster: str | None
    engine: str | None
    model: str | None
    path: str | None
    n_requests: int
    n_failed: int = Field(description="Status 500 or above.")
    n_aborted: int = Field(description="The connection was closed before the end of the response.")
    per_second: float
    tokens_per_second: float
    first_ms: Percentiles = Field(description="Until the first token or byte: p50, p90, p99, p99.9.")
    between_ms: Percentiles = Field(description="Between two tokens.")
    whole_ms: Percentiles = Field(description="Until the end of the response.")


class OpenRow(Row):
    cluster: str | None
    node: str
    pid: int
    engine: str | None
    model: str | None
    n_open: int
    n_full: int = Field(description="Part of n_open: requests whose client does not read the response.")
    oldest_path: str | None
    oldest_s: float | None = Field(description="Age of the oldest request.")
    still_s: float | None = Field(description="Time since its last token; the age if it has no token.")
    awaits: str = Field(description="The first token, or the next token.")


class Latency(Result):
    summary: str
    rows: list[EndpointRow]
    open_requests: list[OpenRow] = Field(description="Processes with open requests now, the oldest first.")


def latency(context: TenantContext, params: LatencyParams) -> Latency:
    """Requests to inference engines by model and path: rate, time to first token, time between tokens, total time.

    Default: the last five minutes. Percentiles are at most 9 % too large. fleet.cluster.verdicts with kind latency or
    dead_server names the cause of late requests.
    """
    now_ns = context.hub.now_ns()
    begin_ns = params.from_ if params.from_ is not None or params.to is not None else now_ns - _LAST_NS
    where: dict[str, Any] = {"cluster": params.cluster, "node": params.node}
    times: dict[str, Any] = dict(window(begin_ns, params.to))
    found = context.rows("latencies", **where, **times)
    rows = [_endpoint(row) for row in found][: params.limit]
    waiting = [_open(row) for row in context.rows("open_requests", **where, fresh_ns=now_ns - _FRESH_NS)]
    n_open = sum(row.n_open for row in waiting)
    n_requests = sum(row.n_requests for row in rows)
    text = f"{counted(n_requests, 'request')} to {counted(len(rows), 'endpoint')}, {n_open} open."
    if waiting and waiting[0].oldest_s is not None:
        first = waiting[0]
        text += f" The oldest, {first.oldest_path} on {first.node}, waits for {first.awaits}: {first.still_s:g} s."
    return Latency(summary=text, rows=rows, open_requests=waiting[: params.limit])


def _endpoint(row: dict[str, Any]) -> EndpointRow:
    seconds = (row["end_ns"] - row["begin_ns"]) / 1e9 + _INTERVAL_S
    return EndpointRow(
        cluster=row["cluster_id"],
        engine=row["engine"],
        model=row["model"],
        path=row["path"],
        n_requests=row["n"],
        n_failed=row["n_failed"],
        n_aborted=row["n_aborted"],
        per_second=round(row["n"] / seconds, 3),
        tokens_per_second=round(row["n_tokens"] / seconds, 3),
        first_ms=percentiles_ms(joined(row["first"])),
        between_ms=percentiles_ms(joined(row["between"])),
        whole_ms=percentiles_ms(joined(row["whole"])),
    )


def _open(row: dict[str, Any]) -> OpenRow:
    oldest_ns, progress_ns = row["oldest_ns"], row["oldest_progress_ns"]
    has_oldest = oldest_ns is not None and progress_ns is not None
    return OpenRow(
        cluster=row["cluster_id"],
        node=row["node_id"],
        pid=row["pid"],
        engine=row["engine"],
        model=row["model"],
        n_open=row["n_open"],
        n_full=row["n_full"],
        oldest_path=row["oldest_path"],
        oldest_s=round((row["ts_ns"] - oldest_ns) / 1e9, 3) if has_oldest else None,
        still_s=round((row["ts_ns"] - progress_ns) / 1e9, 3) if has_oldest else None,
        awaits="" if not has_oldest else "the first token" if progress_ns == oldest_ns else "the next token",
    )


TOOL = Tool("fleet.cluster.latency", "Latency of inference servers", latency)
