"""GPUs that a job holds without using them: who holds them, since when, at what price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.report.sentences import summary
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import Array
from stallscope.events.owner import OWNER_LABELS, column
from stallscope.events.trace import Trace

_CONFIDENCE = 0.95
_HOURS = ((64, "critical"), (8, "high"), (1, "medium"))
"""GPU hours -> severity, the largest first: eight GPUs for a working day, for an hour, one GPU for an hour."""


@dataclass(frozen=True)
class IdleHolder:
    """A job, pod or process that leaves GPUs of a machine idle. Times are ns of the machine's clock.

    since_ns: begin for the first of its GPUs; gpu_ns: sum of the idle times. pid: 0 if no process holds the GPUs.
    """

    node: int
    holder: str
    gpus: tuple[str, ...]
    reason: str
    pid: int
    owner: dict[str, str]
    since_ns: int
    until_ns: int
    gpu_ns: int


def idle_holders(rows: Array) -> list[IdleHolder]:
    """The holders of GPUs that are idle by the last row of each GPU, the most GPU time first. rows: of IDLE_GPUS."""
    ordered = rows[np.argsort(rows["ts_ns"], kind="stable")]
    last = {(int(row["node"]), row["holder"], row["gpu"]): row for row in ordered}
    groups: dict[tuple[int, bytes, bytes], list[np.void]] = {}
    for (node, holder, _), row in last.items():
        if row["is_idle"]:
            groups.setdefault((node, holder, row["reason"]), []).append(row)
    holders = [_holder(node, holder, members) for (node, holder, _), members in groups.items()]
    return sorted(holders, key=lambda each: -each.gpu_ns)


def _holder(node: int, holder: bytes, rows: Sequence[np.void]) -> IdleHolder:
    first = rows[0]
    owner = {
        label: value.decode("utf-8", "replace") for label in OWNER_LABELS if (value := first[column(label)])
    }
    since, until = ([int(row[name]) for row in rows] for name in ("since_ns", "ts_ns"))
    return IdleHolder(
        node,
        holder.decode("utf-8", "replace"),
        tuple(row["gpu"].decode("utf-8", "replace") for row in rows),
        first["reason"].decode(),
        int(first["pid"]),
        owner,
        min(since),
        max(until),
        sum(end - begin for begin, end in zip(since, until, strict=True)),
    )


def with_idle_gpus(
    trace: Trace, report: Report, limits: Thresholds, usd_per_gpu_hour: float | None
) -> Report:
    """The report with a verdict for each holder of idle GPUs."""
    if not len(trace.idle_gpus):
        return report
    added = verdicts(
        trace.idle_gpus,
        trace.nodes,
        lambda node, at_ns: wall_ns(trace, node, at_ns),
        limits,
        usd_per_gpu_hour,
    )
    return replace(report, verdicts=[*report.verdicts, *added])


def verdicts(
    rows: Array,
    nodes: Sequence[str],
    to_wall_ns: Callable[[int, int], int | None],
    limits: Thresholds,
    usd_per_gpu_hour: float | None,
) -> list[Verdict]:
    """The verdicts on idle times of at least idle_after_ns (0: none). to_wall_ns: wall time of a machine's time."""
    if not limits.idle_after_ns:
        return []
    return [
        _verdict(each, nodes[each.node], to_wall_ns, usd_per_gpu_hour)
        for each in idle_holders(rows)
        if each.until_ns - each.since_ns >= limits.idle_after_ns
    ]


def _verdict(
    each: IdleHolder, node: str, to_wall_ns: Callable[[int, int], int | None], usd_per_gpu_hour: float | None
) -> Verdict:
    observed_ns, gpu_hours = each.until_ns - each.since_ns, each.gpu_ns / 3.6e12
    verdict = Verdict(
        kind="idle",
        summary="",
        nodes=[node],
        pids=[each.pid] if each.pid else [],
        since_ns=to_wall_ns(each.node, each.since_ns),
        until_ns=to_wall_ns(each.node, each.until_ns),
        n_incidents=1,
        confidence=_CONFIDENCE,
        cost=VerdictCost.of(
            each.gpu_ns / 1e9, usd_per_gpu_hour, is_lower_bound=False, observed_ns=observed_ns
        ),
        advice=["Ask the owner whether the job still needs its GPUs, or end the job."],
        evidence=VerdictEvidence(
            holder=each.holder,
            idle_gpus=list(each.gpus),
            idle_because=each.reason,
            idle_s=round(observed_ns / 1e9, 1),
        ),
        severity=next((level for hours, level in _HOURS if gpu_hours >= hours), "low"),
        owner=each.owner,
    )
    return replace(verdict, summary=summary(verdict))


def only_idle(trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on a trace without calls."""
    names = ("n_ranks", "n_nodes", "n_communicators", "n_rounds", "n_steps", "seconds", "n_lost_records")
    nothing = Report(trace.source, dict.fromkeys(names, 0), [])
    return with_idle_gpus(trace, nothing, limits, usd_per_gpu_hour)
