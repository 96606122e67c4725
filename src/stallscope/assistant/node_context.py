"""The context of a node's tools, and the arguments that many of them share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stallscope.settings import Settings
from stallscope.store import node as store

if TYPE_CHECKING:
    from stallscope.diagnose import Report
    from stallscope.events.trace import Trace
    from stallscope.query.remote_nodes import Access

SINCE_S = 300
MAX_TEXT = 256

Since = Annotated[int, Field(ge=1, le=10**7, description="Only the last N seconds of the trace.")]
Limit = Annotated[int, Field(ge=1, le=1000, description="Maximum number of rows.")]
Detail = Annotated[
    Literal["short", "full"], Field(description="short: the key facts; full: all details, long text.")
]


@dataclass(frozen=True)
class Node:
    """One machine's trace. nodes, access: the other agents, for query_fleet; empty: no other agent is known."""

    settings: Settings
    nodes: Sequence[str] = ()
    access: Access | None = None
    now_s: Callable[[], float] = field(default=time.time)

    @property
    def db(self) -> Path:
        """The trace."""
        return self.settings.db

    def trace(self, since_s: int | None) -> Trace:
        """The last part of the trace. Raises NotFound, BadTrace, NewerSchema."""
        return store.read(self.db, None if since_s is None else since_s * 10**9)

    def diagnosed(self, trace: Trace) -> Report:
        """The report on a trace, with the thresholds and the price of the settings, or the listed price of its GPU."""
        from stallscope import rates
        from stallscope.diagnose import diagnose, thresholds_of

        settings, price = self.settings, self.settings.usd_per_gpu_hour
        if price is None:
            gpu = trace.facts.get("gpu", "")
            listed = rates.listed(gpu, settings.rates, named_gpu=settings.gpu, provider=settings.provider)
            price = listed.usd_per_hour if listed else None
        return diagnose(trace, thresholds_of(settings), usd_per_gpu_hour=price)


def short_text(value: Any) -> str:
    """Text from a traced process, with bounded length."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text[:MAX_TEXT]


def rank_of(trace: Trace) -> dict[tuple[int, int], int]:
    """Ranks by (node, pid): from the launcher, otherwise the rank in the process's largest communicator."""
    ranks: dict[tuple[int, int], int] = {}
    known = trace.communicators[trace.communicators["comm_rank"] >= 0]
    for row in known[known["nranks"].argsort()]:
        ranks[int(row["node"]), int(row["pid"])] = int(row["comm_rank"])
    for row in trace.processes[trace.processes["rank"] >= 0]:
        ranks[int(row["node"]), int(row["pid"])] = int(row["rank"])
    return ranks
