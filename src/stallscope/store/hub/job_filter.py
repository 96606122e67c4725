"""A tenant's tables with the rows of some jobs only: of their processes, while they ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stallscope.events.owner import JOB_LABELS, PARTY_LABELS, column
from stallscope.store.hub import schema

if TYPE_CHECKING:  # the agent loads this module, and never the engine
    import pyarrow as pa

MEMBERS = "job_members"
_ASIDE_NS = 60_000_000_000
"""Rows of a job before its first collective and after its last."""
_FOREIGN_PIDS = 1 << 30
"""From here on, a pid stands for the rank of a sender that reports no pid: see traces.py."""
_MIN_NS, _MAX_NS = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class JobChoice:
    """The jobs of a question. job: as in `jobs`, or the scheduler's number or name. owner: see PARTY_LABELS."""

    job: str | None = None
    owner: str | None = None
    namespace: str | None = None

    def __bool__(self) -> bool:
        return bool(self.job or self.owner or self.namespace)

    def accepts(self, owner: Mapping[str, str]) -> bool:
        """Whether an owner matches, for rows that are not of a job."""
        return (
            (not self.job or self.job in [owner.get(label) for label in JOB_LABELS])
            and (not self.owner or self.owner in [owner.get(label) for label in PARTY_LABELS])
            and (not self.namespace or self.namespace == owner.get("namespace"))
        )

    def condition(self) -> str:
        """The SQL condition for a row r of `jobs` or `verdicts`."""
        named = ["r.job", *(f"r.{column(label)}" for label in JOB_LABELS)]
        parts = [
            _any_is(named, self.job),
            _any_is([f"r.{column(label)}" for label in PARTY_LABELS], self.owner),
            _any_is([f"r.{column('namespace')}"], self.namespace),
        ]
        return " AND ".join(filter(None, parts)) or "true"


@dataclass(frozen=True)
class JobFilter:
    """ids: the chosen jobs, as in `jobs`. members: node_id, pid, rank of each process, begin_ns and end_ns of its job.

    begin_ns, end_ns: of all these jobs.
    """

    choice: JobChoice
    ids: tuple[str, ...]
    members: pa.Table
    begin_ns: int
    end_ns: int

    @staticmethod
    def of(choice: JobChoice, rows: Sequence[Mapping[str, Any]]) -> JobFilter:
        """From the chosen rows of `jobs`."""
        import pyarrow as pa

        spans = [_span(row) for row in rows]
        members = [
            (*member, *span)
            for row, span in zip(rows, spans, strict=True)
            for member in json.loads(row["members"])
        ]
        kinds = {"node_id": pa.string()} | dict.fromkeys(("pid", "rank", "begin_ns", "end_ns"), pa.int64())
        values = zip(*members, strict=True) if members else ([] for _ in kinds)
        table = pa.table(
            {name: pa.array(of, kind) for (name, kind), of in zip(kinds.items(), values, strict=True)}
        )
        return JobFilter(
            choice,
            tuple(str(row["job"]) for row in rows),
            table,
            min((begin for begin, _ in spans), default=_MIN_NS),
            max((end for _, end in spans), default=_MAX_NS),
        )

    def condition(self, table: schema.HubTable) -> str | None:
        """The SQL condition for a row r of a table; None for tables that belong to no job."""
        if table.name == "jobs":
            return self.choice.condition()
        if table.name == "verdicts":
            return f"(({self.choice.condition()}) OR {_any_is(['r.job'], *self.ids) or 'false'})"
        if table.name not in schema.SENT:
            return None
        names = table.names
        same = "m.node_id = r.node_id"
        if len(self.ids) > 1:  # a later job on the machine may have the same pids
            same += " AND r.ts_ns BETWEEN m.begin_ns AND m.end_ns"
        if "pid" in names:
            # An equality of one expression: a condition with OR would compare each row with all members of its machine.
            pid = f"coalesce(r.pid, {_FOREIGN_PIDS} + r.rank)" if "rank" in names else "r.pid"
            same += f" AND m.pid = {pid}"
        times = f"r.ts_ns BETWEEN {self.begin_ns} AND {self.end_ns}"
        return f"{times} AND EXISTS (SELECT 1 FROM {MEMBERS} m WHERE {same})"


def _span(row: Mapping[str, Any]) -> tuple[int, int]:
    """The time of a job's rows; unlimited where begin or end is unknown."""
    begin, end = row["begin_ns"], row["ended_ns"]
    return (_MIN_NS if begin is None else begin - _ASIDE_NS, _MAX_NS if end is None else end + _ASIDE_NS)


def _any_is(columns: Sequence[str], *values: str | None) -> str:
    """A condition: one of the columns has one of the values; empty without a value."""
    texts = ", ".join("'" + value.replace("'", "''") + "'" for value in values if value)
    return f"({' OR '.join(f'{name} IN ({texts})' for name in columns)})" if texts else ""
