"""Parts shared by all verdicts on late steps: location and time, cost, victims, confidence.

Each part follows from summed delays (see cost.delays), of one trace or of a stream whose rows have been dropped.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.causes import Explained, explained, leading
from stallscope.diagnose.cost.delays import (
    Delays,
    ProcessKey,
    total,
)
from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.report.verdict import Verdict, VerdictCost
from stallscope.diagnose.timeline import user_frame
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.late_attach import is_counted_late
from stallscope.diagnose.timeline.unseen_ranks import n_unseen

_EXACT = 0.92  # share of the upper bound from which a range is one number: its ends are estimates as well


@dataclass(frozen=True)
class ExaminedTotals:
    """Totals of the examined data: judged steps, time, and rounds by communicator."""

    n_steps: int
    observed_ns: float
    n_rounds: Mapping[int, int]


def examined_totals(case: Case) -> ExaminedTotals:
    """The totals of a case."""
    n_rounds: dict[int, int] = {}
    for comm, n in zip(
        case.timeline.comm_hash.tolist(), np.bincount(case.timeline.comm_of_round).tolist(), strict=False
    ):
        n_rounds[comm] = max(n_rounds.get(comm, 0), n)  # point-to-point pairs share their communicator
    return ExaminedTotals(
        n_steps=len(np.unique(case.judged.step)),
        observed_ns=case.observed_ns,
        n_rounds=n_rounds,
    )


def location(case: Case, processes: list[int], delays: Delays, *, examined: ExaminedTotals) -> Verdict:
    """The ranks, rounds and times of a verdict."""
    _, first, last = delays.rounds[delays.comm_hash]
    late_ms = np.array([late_step.late_ns for late_step in delays.late]) / 1e6
    return Verdict(
        kind="",
        summary="",
        ranks=[int(case.timeline.rank[process]) for process in processes],
        nodes=sorted({case.trace.nodes[int(case.timeline.node[process])] for process in processes}),
        comm_hash=f"{delays.comm_hash:016x}",
        first_round=first,
        last_round=last,
        n_late_rounds=delays.n_rounds,
        n_rounds=examined.n_rounds.get(delays.comm_hash, 0),
        late_ms={
            "median": round(float(np.median(late_ms)), 3),
            "max": round(delays.max_late_ns / 1e6, 3),
        },
        since_ns=delays.since_ns,
        until_ns=delays.until_ns,
        pids=[int(case.timeline.pid[process]) for process in processes],
        first_step=int(delays.steps.min()) if len(delays.steps) else None,
    )


def cost_of(
    case: Case, delays: Delays, named: Collection[ProcessKey] = (), *, examined: ExaminedTotals
) -> VerdictCost:
    """The cost of delays to all ranks except the named ones: one estimate, or a range.

    With point-to-point calls, every rank may have waited as long as the rank with the longest known wait. Ranks that
    are not in the trace may have waited as long as the recorded ranks.
    """
    lost_ns, min_ns = (
        {key: ns for key, ns in by_process.items() if key not in named}
        for by_process in (delays.lost_ns, delays.min_ns)
    )
    most, least = sum(lost_ns.values()) / 1e9, sum(min_ns.values()) / 1e9
    if case.timeline.is_p2p.any():
        most = max(lost_ns.values(), default=0.0) * (case.timeline.n_processes - max(len(named), 1)) / 1e9
    n_waiting = max(case.timeline.n_processes - max(len(named), 1), 1)
    most *= 1 + n_unseen(case.timeline, case.trace) / n_waiting
    if delays.is_lower_bound:
        return priced(case, least, is_lower_bound=True, observed_ns=examined.observed_ns)
    return between(case, least, most, observed_ns=examined.observed_ns)


def between(case: Case, least: float, most: float, *, observed_ns: float) -> VerdictCost:
    """The cost from least to most GPU seconds; one number where both ends are within 4 % of their mean."""
    if least >= _EXACT * most:
        return priced(case, (least + most) / 2, is_lower_bound=False, observed_ns=observed_ns)
    lower = priced(case, least, is_lower_bound=True, observed_ns=observed_ns)
    upper = priced(case, most, is_lower_bound=False, observed_ns=observed_ns)
    return replace(lower, at_most_gpu_seconds=upper.gpu_seconds, at_most_usd=upper.usd)


def priced(case: Case, gpu_seconds: float, *, is_lower_bound: bool, observed_ns: float) -> VerdictCost:
    """The cost of GPU seconds at the case's price."""
    return VerdictCost.of(
        gpu_seconds, case.usd_per_gpu_hour, is_lower_bound=is_lower_bound, observed_ns=observed_ns
    )


def victims(case: Case, lost_ns: Mapping[ProcessKey, float]) -> list[int]:
    """The ranks that waited at least a tenth as long as the rank that waited longest."""
    rank_of = {case.process_key(process): int(rank) for process, rank in enumerate(case.timeline.rank)}
    least = 0.1 * max(max(lost_ns.values(), default=0.0), 1.0)
    return sorted(rank_of[key] for key, ns in lost_ns.items() if ns > least and key in rank_of)


def confidence(case: Case, delays: Delays, parts: list[Explained]) -> float:
    """The confidence in the named rank: it grows with the recurrence and falls with uncertain records."""
    agreement = float(
        np.median([min(late_step.excess_ns / max(late_step.late_ns, 1.0), 1.0) for late_step in delays.late])
    )
    value = (1 - 0.5**delays.n_late) * (0.5 + 0.5 * agreement)
    if sum(case.trace.lost.values()):
        value *= 0.9
    if bool(is_counted_late(case.timeline.rows["flags"]).any()):
        value *= 0.95
    if not parts or parts[0].cause.name == "unknown":
        value *= 0.9
    return round(min(value, 0.99), 3)


def stack_of(case: Case, process: int, parts: list[Explained]) -> tuple[str, ...]:
    """The stack in which the rank was held by its main cause; empty where it is not known."""
    if not parts:
        return ()
    node, pid = int(case.timeline.node[process]), int(case.timeline.pid[process])
    return user_frame.held_at(case.trace, node, pid, categories=parts[0].cause.categories)


def steps(case: Case, n_late: int, examined: ExaminedTotals) -> VerdictEvidence:
    """The evidence on the steps: late and examined steps, and the typical step."""
    return VerdictEvidence(
        n_late_steps=n_late, n_steps=examined.n_steps, step_ms=round(case.step_ns / 1e6, 3)
    )


def late_ranks(
    case: Case, processes: list[int], delays: Mapping[int, Delays], *, examined: ExaminedTotals
) -> Verdict:
    """The verdict on one or several ranks that are late themselves.

    delays: by process, for at least these processes; each has a share of their common cost.
    """
    first, whole = delays[processes[0]], total(delays[process] for process in processes)
    parts = explained(whole.excess, case.limits.cause_share)
    named = {case.process_key(process) for process in processes}
    lost = {key: ns for key, ns in whole.lost_ns.items() if key not in named}
    frames = stack_of(case, processes[0], parts)
    at = user_frame.in_own_code(frames) if frames else None
    return replace(
        location(case, processes, whole, examined=examined),
        kind="straggler",
        period_steps=period_steps(first.steps, first.sizes_ns),
        n_incidents=first.n_incidents,
        causes=parts,
        confidence=confidence(case, first, parts),
        victims=victims(case, lost),
        cost=cost_of(case, whole, named, examined=examined),
        advice=[line for part in leading(parts) for line in part.cause.advice(replace(part.evidence, at=at))],
        evidence=replace(
            steps(case, first.n_late, examined),
            is_whole_node=True if len(processes) > 1 else None,
            at=at,
            stack=list(frames) or None,
        ),
    )
