"""A row for each process and container of a trace: rounds, lateness, shares of time, part in the verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stallscope.diagnose.report.verdict import Report
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import job_separation
from stallscope.diagnose.timeline.clocks import aligned
from stallscope.diagnose.timeline.rounds import rounds
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.diagnose.verdicts import by_job
from stallscope.diagnose.verdicts._owners import owners_of
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CATEGORY_NAMES, CollectiveFlag
from stallscope.events.trace import Trace

_MIN_SHARE = 0.01


@dataclass(frozen=True)
class ProcessRow:
    """A process of a trace.

    late_ms, worst_ms: median and largest lateness over its rounds, None without peers. shares: of its time by
    category, the largest first, without shares below 1 %. part: culprit, victim, or empty. job: its number, from 1.
    """

    node: str
    rank: int | None
    pid: int
    name: str
    container: str
    n_rounds: int
    late_ms: float | None
    worst_ms: float | None
    shares: Mapping[str, float]
    part: str
    job: int = 1


@dataclass(frozen=True)
class ContainerRow:
    """The processes of one container, or of none (empty name) on a node. worst_ms: of its latest process."""

    node: str
    container: str
    ranks: Sequence[int]
    n_processes: int
    n_rounds: int
    worst_ms: float | None
    shares: Mapping[str, float]
    part: str


def process_rows(trace: Trace, report: Report) -> list[ProcessRow]:
    """A row for each process of the trace, by node, job, rank and pid."""
    timeline = timeline_of(trace)
    matched = rounds(timeline, aligned(timeline, trace), Thresholds())
    index_of = {(int(n), int(p)): i for i, (n, p) in enumerate(zip(timeline.node, timeline.pid, strict=True))}
    row_of = {(int(row["node"]), int(row["pid"])): row for row in trace.processes}
    owners = owners_of(trace)
    job_of = job_separation.job_of(trace)
    table = []
    for node, pid in {*index_of, *row_of}:
        index = index_of.get((node, pid), UNKNOWN)
        row, rows = row_of.get((node, pid)), np.flatnonzero(timeline.process == index)
        rank = int(timeline.rank[index]) if index >= 0 else int(row["rank"]) if row is not None else UNKNOWN
        late_ms = matched.late_ns[rows][~np.isnan(matched.late_ns[rows])] / 1e6
        table.append(
            ProcessRow(
                node=trace.nodes[node],
                rank=None if rank == UNKNOWN else rank,
                pid=pid,
                name=row["comm"].decode("utf-8", "replace") if row is not None else "",
                container=owners.get((node, pid), {}).get("container", ""),
                n_rounds=len(rows),
                late_ms=round(float(np.median(late_ms)), 3) if len(late_ms) else None,
                worst_ms=round(float(late_ms.max()), 3) if len(late_ms) else None,
                shares=_shares(_ledger(trace, timeline.rows[rows], node=node, pid=pid)),
                part=_part(report, rank, job=job_of.get((node, pid), 0) + 1),
                job=job_of.get((node, pid), 0) + 1,
            )
        )
    return sorted(table, key=lambda row: (row.node, row.job, row.rank is None, row.rank or 0, row.pid))


def container_rows(rows: Sequence[ProcessRow]) -> list[ContainerRow]:
    """A row for each container; processes outside containers form one row per node."""
    groups: dict[tuple[str, str], list[ProcessRow]] = {}
    for row in rows:
        groups.setdefault((row.node, row.container), []).append(row)
    return [
        ContainerRow(
            node=node,
            container=container,
            ranks=sorted({row.rank for row in group if row.rank is not None}),
            n_processes=len(group),
            n_rounds=sum(row.n_rounds for row in group),
            worst_ms=max((row.worst_ms for row in group if row.worst_ms is not None), default=None),
            shares=_mean([row.shares for row in group]),
            part=", ".join(part for part in ("culprit", "victim") if any(row.part == part for row in group)),
        )
        for (node, container), group in sorted(groups.items())
    ]


def as_rows(rows: Sequence[ProcessRow] | Sequence[ContainerRow]) -> list[dict[str, Any]]:
    """As data for JSON."""
    return [asdict(row) for row in rows]


def _ledger(trace: Trace, arrivals: Array, *, node: int, pid: int) -> Array:
    """ns by category that the process spent between the first and the last record that carries its account.

    Estimated waits are in the accounts of snapshots only, so the two kinds of records are then not compared.
    """
    states = trace.snapshots[(trace.snapshots["node"] == node) & (trace.snapshots["pid"] == pid)]
    kept = arrivals[arrivals["flags"] & CollectiveFlag.NO_LEDGER == 0]
    sources = [kept["ledger_ns"], states["ledger_ns"]]
    if not states["estimated_ns"].any():
        sources = [np.concatenate(sources)]
    spent = [np.zeros(len(CATEGORY_NAMES)), *(np.ptp(each, axis=0) for each in sources if len(each) > 1)]
    return max(spent, key=lambda each: float(each.sum()))


def _shares(spent_ns: Array) -> dict[str, float]:
    total = max(float(spent_ns.sum()), 1.0)
    order = np.argsort(-spent_ns, kind="stable").tolist()
    shares = {CATEGORY_NAMES[i]: round(float(spent_ns[i]) / total, 3) for i in order}
    return {name: share for name, share in shares.items() if share >= _MIN_SHARE}


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for shares in each for name in shares}
    mean = {name: round(sum(shares.get(name, 0.0) for shares in each) / len(each), 3) for name in names}
    return dict(sorted(mean.items(), key=lambda share: (-share[1], share[0])))


def _part(report: Report, rank: int, *, job: int) -> str:
    """The part of a rank in the verdicts on its job. job: number of the job."""
    verdicts = [verdict for verdict in report.verdicts if by_job.number_of(verdict) in (None, job)]
    if any(rank in verdict.ranks for verdict in verdicts):
        return "culprit"
    return "victim" if any(rank in verdict.victims for verdict in verdicts) else ""
