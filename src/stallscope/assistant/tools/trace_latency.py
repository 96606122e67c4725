"""latency: the requests to the inference servers on this machine, and their times."""

from typing import Any

from pydantic import Field

from stallscope.assistant.node_context import SINCE_S, Limit, Node, Since
from stallscope.diagnose.views import Endpoint, endpoints
from stallscope.events.counted import counted
from stallscope.events.histograms import Percentiles
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool


class LatencyParams(Params):
    since_s: Since = SINCE_S
    limit: Limit = 20


class EndpointRow(Row):
    engine: str
    model: str
    path: str
    n_requests: int
    n_failed: int = Field(description="Status 500 or above.")
    n_aborted: int = Field(description="The connection was closed before the end of the response.")
    per_second: float
    first_ms: Percentiles = Field(description="Until the first token or byte: p50, p90, p99, p99.9.")
    between_ms: Percentiles = Field(description="Between two tokens.")
    whole_ms: Percentiles = Field(description="Until the end of the response.")


class Latency(Result):
    summary: str
    rows: list[EndpointRow]


def latency(context: Node, params: LatencyParams) -> Latency:
    """Requests to inference servers on this machine by model and path: rate, time to first token, time between tokens.

    `verdicts` names the cause of late requests.
    """
    rows = [_row(each) for each in endpoints(context.trace(params.since_s))]
    n_requests = sum(row.n_requests for row in rows)
    text = f"{counted(n_requests, 'request')} to {counted(len(rows), 'endpoint')}."
    return Latency(summary=text, rows=rows[: params.limit])


def _row(endpoint: Endpoint) -> EndpointRow:
    same: dict[str, Any] = {
        name: getattr(endpoint, name) for name in EndpointRow.model_fields if name != "n_requests"
    }
    return EndpointRow(n_requests=endpoint.n, **same)


TOOL: Tool[Node] = Tool("latency", "Latency of this machine's inference servers", latency)
