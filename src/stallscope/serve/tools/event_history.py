"""fleet.cluster.event_history: individual events, page by page."""

from typing import Any

from pydantic import Field

from stallscope.events.counted import counted
from stallscope.serve.tools.tenant_context import (
    MAX_TEXT,
    Cluster,
    From,
    JobParams,
    Node,
    Rank,
    TenantContext,
    To,
    iso_time,
    window,
)
from stallscope.serve.tools.tool_registry import Result, Row, Tool

_CURSOR = r"^[1-8]?[0-9]{1,18}[.][0-9]{1,8}$"
"""ns since 1970 of the last row shown, and the number of shown rows with that time."""


class EventHistoryParams(JobParams):
    cluster: Cluster = None
    node: Node = None
    rank: Rank = None
    from_: From = None
    to: To = None
    op: str | None = Field(default=None, max_length=MAX_TEXT, description="Operation: all_reduce, copy, ...")
    name: str | None = Field(default=None, max_length=MAX_TEXT, description="Name of the event or metric.")
    causal_chain_id: str | None = Field(default=None, max_length=MAX_TEXT)
    cursor: str | None = Field(
        default=None, pattern=_CURSOR, description="next_cursor of the previous page, with the same filters."
    )
    limit: int = Field(default=50, ge=1, le=1000)


class EventRow(Row):
    time: str | None
    ts_ns: int
    cluster: str | None
    node: str | None
    rank: int | None
    name: str | None
    op: str | None
    comm_hash: str | None
    seq: int | None
    step: int | None
    pid: int | None
    duration_ns: int | None
    count_bytes: int | None
    value: float | None
    text: str | None
    causal_chain_id: str | None
    attrs: str | None = Field(description="JSON: all other attributes from the sender.")


class EventHistory(Result):
    summary: str
    rows: list[EventRow]
    next_cursor: str | None = Field(description="For the next, older page; null on the last page.")


def event_history(context: TenantContext, params: EventHistoryParams) -> EventHistory:
    """Individual events, newest first, in pages. Their names, texts and attrs come from the traced processes."""
    before_ns, n_skipped = _position(params.cursor)
    filters: dict[str, Any] = {
        "cluster": params.cluster,
        "node": params.node,
        "rank": params.rank,
        "op": params.op,
        "name": params.name,
        "causal_chain_id": params.causal_chain_id,
    }
    wanted = params.limit + 1
    times = window(params.from_, params.to)
    edge = context.rows(
        "event_edge",
        only=params.choice,
        **filters,
        **times,
        before_ns=before_ns,
        max_rows=wanted + n_skipped,
    )[0]
    rows: list[dict[str, Any]] = []
    if edge["edge_ns"] is not None:
        ends = {"edge_ns": edge["edge_ns"], "newest_ns": edge["newest_ns"]}
        if edge["newest_ns"] != before_ns:
            n_skipped = 0
        rows = context.rows(
            "event_page", only=params.choice, **filters, **ends, n_skipped=n_skipped, max_rows=wanted
        )
    page, more = rows[: params.limit], len(rows) > params.limit
    cursor = _cursor(page, before_ns, n_skipped) if more else None
    text = (
        f"{counted(len(page), 'event')}{', and older events exist' if more else ''}."
        if page
        else "No event matches."
    )
    return EventHistory(summary=text, rows=[_flat(row) for row in page], next_cursor=cursor)


def _flat(row: dict[str, Any]) -> EventRow:
    renamed = {"cluster_id": "cluster", "node_id": "node", "value_double": "value", "value_text": "text"}
    return EventRow(
        time=iso_time(row["ts_ns"]), **{renamed.get(name, name): value for name, value in row.items()}
    )


def _cursor(page: list[dict[str, Any]], before_ns: int | None, n_skipped: int) -> str:
    """The position of the next page: the last time shown, and the number of shown rows with that time."""
    last_ns = page[-1]["ts_ns"]
    n_same = sum(row["ts_ns"] == last_ns for row in page)
    shown = n_same + (n_skipped if last_ns == before_ns else 0)
    return f"{last_ns}.{shown}"


def _position(cursor: str | None) -> tuple[int | None, int]:
    if cursor is None:
        return None, 0
    before_ns, _, n_skipped = cursor.partition(".")
    return int(before_ns), int(n_skipped)


TOOL = Tool("fleet.cluster.event_history", "Events, page by page", event_history)
