"""The context of the hub's tools, and the arguments that many of them share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from stallscope.diagnose import wall_text
from stallscope.errors import BadInput, NotFound
from stallscope.rates import RateTable
from stallscope.serve.sql.values import plain
from stallscope.serve.sql.workers import Workers
from stallscope.serve.tools.tool_registry import Params
from stallscope.store.hub.job_filter import JobChoice

if TYPE_CHECKING:  # importing the store here would load the engine
    from stallscope.store.hub.job_filter import JobFilter
    from stallscope.store.hub.store_protocol import Store

MAX_TEXT = 256
_MAX_JOBS = 1000
_MAX_MS = 253_402_300_799_999
_MIN_NS, _MAX_NS = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class Hub:
    """The resources of the tools: the store, the current prices, the SQL processes, the wall clock."""

    store: Store
    rates: RateTable
    workers: Workers
    now_ns: Callable[[], int] = field(default=time.time_ns)


@dataclass(frozen=True)
class TenantContext:
    """A hub as seen by one tenant: the context of one call of a tool. It resolves each choice of jobs once."""

    hub: Hub
    tenant: str
    _filters: dict[JobChoice, JobFilter] = field(default_factory=dict, compare=False, repr=False)

    def caveat(self, cluster: str | None) -> str:
        """Why answers about a cluster (None: all) are incomplete; "" if they are complete."""
        store = self.hub.store
        reasons = (store.damage.warning(self.tenant), store.unexamined.reason(self.tenant, cluster))
        return " ".join(filter(None, reasons))

    def rows(self, question: str, *, only: JobChoice | None = None, **params: object) -> list[dict[str, Any]]:
        """The rows of a question in store/sql/hub/, with JSON values. only: over the rows of these jobs only."""
        return self._rows(question, self._job_filter(only) if only else None, params)

    def job_rows(self, choice: JobChoice, **params: object) -> list[dict[str, Any]]:
        """The chosen rows of `jobs`, with the parameters of that question."""
        from stallscope.store.hub.job_filter import JobFilter

        return self._rows("jobs", JobFilter.of(choice, []), params)

    def _rows(
        self, question: str, job: JobFilter | None, params: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        table = self.hub.store.ask(question, tenant=self.tenant, params=params, job=job)
        return [{name: plain(value) for name, value in row.items()} for row in table.to_pylist()]

    def _job_filter(self, choice: JobChoice) -> JobFilter:
        from stallscope.store.hub.job_filter import JobFilter

        if choice in self._filters:
            return self._filters[choice]
        rows = self.job_rows(choice, cluster=None, from_ns=None, to_ns=None, max_rows=_MAX_JOBS)
        if not rows and choice.job and not self._rows("verdicts_exist", JobFilter.of(choice, []), {}):
            raise NotFound(f"no job {choice.job[:80]!r}; fleet.cluster.summary lists the jobs")
        self._filters[choice] = JobFilter.of(choice, rows)
        return self._filters[choice]


def moment_ns(value: object) -> object:
    """ns since 1970 of epoch milliseconds or ISO 8601 text; without a zone it is UTC."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("give epoch milliseconds or a time such as 2026-01-31T12:00:00Z")
    if isinstance(value, int) or re.fullmatch(r"\d{10,15}", value):
        ms = int(value)
        if not 0 <= ms <= _MAX_MS:
            raise ValueError(f"{value} is not a time in epoch milliseconds")
        return min(ms * 1_000_000, _MAX_NS)
    try:
        parsed = datetime.fromisoformat(value)
        moment = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
        ns = round(moment.timestamp() * 1e6) * 1000
    except (ValueError, OverflowError):
        raise ValueError(
            f"{value[:40]!r} is not a time; give epoch milliseconds or 2026-01-31T12:00:00Z"
        ) from None
    return max(_MIN_NS, min(ns, _MAX_NS))


def iso_time(ns: int | None) -> str | None:
    """ISO 8601 in UTC with milliseconds; None where unknown or beyond the calendar."""
    if ns is None or not 0 <= ns // 1_000_000 <= _MAX_MS:
        return None
    return wall_text(ns)


def _readable(ns: int) -> str:
    return iso_time(ns) or f"{ns} ns"


_MOMENT_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": _MAX_MS},
        {"type": "string", "format": "date-time"},
    ]
}
Moment = Annotated[int, BeforeValidator(moment_ns), WithJsonSchema(_MOMENT_SCHEMA)]

Cluster = Annotated[
    str | None, Field(default=None, max_length=MAX_TEXT, description="Cluster; default: all clusters.")
]
Node = Annotated[str | None, Field(default=None, max_length=MAX_TEXT, description="Machine.")]
Job = Annotated[
    str | None,
    Field(
        default=None,
        max_length=MAX_TEXT,
        description="Job, as fleet.cluster.summary lists it, or its number or name in the scheduler; default: all.",
    ),
]
Owner = Annotated[
    str | None,
    Field(
        default=None,
        max_length=MAX_TEXT,
        description="Only jobs of this owner: user, account, workload of Kubernetes or systemd unit.",
    ),
]
Namespace = Annotated[
    str | None,
    Field(default=None, max_length=MAX_TEXT, description="Only jobs in this namespace of Kubernetes."),
]
Rank = Annotated[int | None, Field(default=None, ge=0, le=10_000_000, description="Rank in the job.")]
From = Annotated[
    Moment | None, Field(default=None, alias="from", description="Begin: epoch milliseconds or ISO 8601.")
]
To = Annotated[
    Moment | None, Field(default=None, description="End (exclusive): epoch milliseconds or ISO 8601.")
]


class JobParams(Params):
    """The arguments of a question about jobs."""

    job: Job = None
    owner: Owner = None
    namespace: Namespace = None

    @property
    def choice(self) -> JobChoice:
        """The chosen jobs."""
        return JobChoice(self.job, self.owner, self.namespace)


def window(begin_ns: int | None, end_ns: int | None) -> Mapping[str, int | None]:
    """The parameters from_ns and to_ns of a question. Raises BadInput for a window that ends before it begins."""
    if begin_ns is not None and end_ns is not None and end_ns < begin_ns:
        raise BadInput(
            f"to ({_readable(end_ns)}) is before from ({_readable(begin_ns)}); give the earlier time as from"
        )
    return {"from_ns": begin_ns, "to_ns": end_ns}
