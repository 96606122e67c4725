"""A tenant's tables with the rows of one job only: of its processes, while they ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stallscope.store.hub import schema

if TYPE_CHECKING:  # the agent loads this module, and never the engine
    import pyarrow as pa

MEMBERS = "job_members"
_ASIDE_NS = 60_000_000_000
"""Rows of a job before its first collective and after its last."""
_FOREIGN_PIDS = 1 << 30
"""From here on, a pid stands for the rank of a sender that reports no pid: see traces.py."""


@dataclass(frozen=True)
class JobFilter:
    """id: as in `jobs`. members: node_id, pid and rank of each process. begin_ns, end_ns: None if unknown."""

    id: str
    members: pa.Table
    begin_ns: int | None
    end_ns: int | None

    @staticmethod
    def of(row: dict[str, object], members: list[tuple[str, int, int | None]]) -> JobFilter:
        """A row of `jobs`, with its members."""
        import pyarrow as pa

        nodes, pids, ranks = zip(*members, strict=True) if members else ((), (), ())
        table = pa.table(
            {
                "node_id": pa.array(nodes, pa.string()),
                "pid": pa.array(pids, pa.int64()),
                "rank": pa.array(ranks, pa.int64()),
            }
        )
        begin_ns, end_ns = (
            row[name] if isinstance(row[name], int) else None for name in ("begin_ns", "ended_ns")
        )
        return JobFilter(str(row["job"]), table, begin_ns, end_ns)  # type: ignore[arg-type]

    def condition(self, table: schema.HubTable) -> str | None:
        """The SQL condition for a row r of a table; None for tables that belong to no job."""
        if table.name in ("verdicts", "jobs"):
            return "r.job = '" + self.id.replace("'", "''") + "'"
        names = table.names
        if table.name not in schema.SENT:
            return None
        parts = []
        if self.begin_ns is not None:
            parts.append(f"r.ts_ns >= {self.begin_ns - _ASIDE_NS}")
        if self.end_ns is not None:
            parts.append(f"r.ts_ns <= {self.end_ns + _ASIDE_NS}")
        same = "m.node_id = r.node_id"
        if "pid" in names:
            foreign = f"r.pid IS NULL AND m.pid = {_FOREIGN_PIDS} + r.rank" if "rank" in names else "false"
            same += f" AND (m.pid = r.pid OR ({foreign}))"
        parts.append(f"EXISTS (SELECT 1 FROM {MEMBERS} m WHERE {same})")
        return " AND ".join(parts)
