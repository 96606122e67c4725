"""The parts that all verdicts on late steps share: location and time, cost, victims, confidence.

Each is made from summed delays (see cost.delays), which may be those of one trace, or of a stream whose rows are gone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.causes import Explained, explained, leading
from stallscope.diagnose.cost.delays import (
    Delays,
    Who,
    total,
)
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.report.verdict import CostSaid, Verdict
from stallscope.diagnose.timeline import user_frame
from stallscope.diagnose.timeline.case import Case
from stallscope.events.names import CollectiveFlag

_EXACT = 0.82  # share of the upper bound from which the middle of a range is within 10 % of both ends


@dataclass(frozen=True)
class Examined:
    """How much was looked at in all: judged steps, time, and by communicator its rounds."""

    n_steps: int
    observed_ns: float
    n_rounds: Mapping[int, int]


def examined(case: Case) -> Examined:
    """What a case shows."""
    n_rounds: dict[int, int] = {}
    for comm, n in zip(
        case.line.comm_hash.tolist(), np.bincount(case.line.comm_of_round).tolist(), strict=False
    ):
        n_rounds[comm] = max(n_rounds.get(comm, 0), n)  # point-to-point pairs share their communicator
    return Examined(
        n_steps=len(np.unique(case.judged.step)),
        observed_ns=case.observed_ns,
        n_rounds=n_rounds,
    )


def location(case: Case, processes: list[int], delays: Delays, *, looked_at: Examined) -> Verdict:
    """The place and time part of a verdict."""
    _, first, last = delays.rounds[delays.comm_hash]
    late_ms = np.array([one.late_ns for one in delays.late]) / 1e6
    return Verdict(
        kind="",
        summary="",
        ranks=[int(case.line.rank[process]) for process in processes],
        nodes=sorted({case.trace.nodes[int(case.line.node[process])] for process in processes}),
        comm_hash=f"{delays.comm_hash:016x}",
        first_round=first,
        last_round=last,
        n_late_rounds=delays.n_rounds,
        n_rounds=looked_at.n_rounds.get(delays.comm_hash, 0),
        late_ms={
            "median": round(float(np.median(late_ms)), 3),
            "max": round(delays.max_late_ns / 1e6, 3),
        },
        since_ns=delays.since_ns,
        until_ns=delays.until_ns,
        pids=[int(case.line.pid[process]) for process in processes],
        first_step=int(delays.steps.min()) if len(delays.steps) else None,
    )


def cost_of(case: Case, delays: Delays, named: Collection[Who] = (), *, looked_at: Examined) -> CostSaid:
    """What delays cost all but those named: about so much, or from what is sure to what it may be.

    Where ranks send to each other all may have waited as long as the one that was seen to wait longest.
    """
    lost, sure = (
        {who: ns for who, ns in by_process.items() if who not in named}
        for by_process in (delays.lost_ns, delays.least_ns)
    )
    most, least = sum(lost.values()) / 1e9, sum(sure.values()) / 1e9
    if case.line.is_p2p.any():
        most = max(lost.values(), default=0.0) * (case.line.n_processes - max(len(named), 1)) / 1e9
    if delays.is_lower_bound:
        return cost_said(case, least, is_lower_bound=True, observed_ns=looked_at.observed_ns)
    return between(case, least, most, observed_ns=looked_at.observed_ns)


def between(case: Case, least: float, most: float, *, observed_ns: float) -> CostSaid:
    """GPU seconds from least to most; as one number where both ends are within 10 % of it."""
    if least >= _EXACT * most:
        return cost_said(case, (least + most) / 2, is_lower_bound=False, observed_ns=observed_ns)
    said = cost_said(case, least, is_lower_bound=True, observed_ns=observed_ns)
    upper = cost_said(case, most, is_lower_bound=False, observed_ns=observed_ns)
    return replace(said, at_most_gpu_seconds=upper.gpu_seconds, at_most_usd=upper.usd)


def cost_said(case: Case, gpu_seconds: float, *, is_lower_bound: bool, observed_ns: float) -> CostSaid:
    """A cost at the case's price."""
    return CostSaid.of(
        gpu_seconds, case.usd_per_gpu_hour, is_lower_bound=is_lower_bound, observed_ns=observed_ns
    )


def victims(case: Case, lost_ns: Mapping[Who, float]) -> list[int]:
    rank_of = {case.who(process): int(rank) for process, rank in enumerate(case.line.rank)}
    least = 0.1 * max(max(lost_ns.values(), default=0.0), 1.0)
    return sorted(rank_of[who] for who, ns in lost_ns.items() if ns > least and who in rank_of)


def confidence(case: Case, delays: Delays, parts: list[Explained]) -> float:
    """How sure the name is: it grows with the recurrence, and falls with what is uncertain in the records."""
    agreement = float(np.median([min(one.excess_ns / max(one.late_ns, 1.0), 1.0) for one in delays.late]))
    sure = (1 - 0.5**delays.n_late) * (0.5 + 0.5 * agreement)
    if sum(case.trace.lost.values()):
        sure *= 0.9
    if bool((case.line.rows["flags"] & CollectiveFlag.LATE_ATTACH).any()):
        sure *= 0.95
    if not parts or parts[0].cause.name == "unknown":
        sure *= 0.9
    return round(min(sure, 0.99), 3)


def code_location(case: Case, process: int, parts: list[Explained]) -> dict[str, object]:
    """Where in the code the rank was held, where that is known of what explains its delay best."""
    if not parts:
        return {}
    node, pid = int(case.line.node[process]), int(case.line.pid[process])
    found = user_frame.held_at(case.trace, node, pid, categories=parts[0].cause.categories)
    return {"at": user_frame.in_own_code(found), "stack": list(found)} if found else {}


def steps(case: Case, n_late: int, looked_at: Examined) -> dict[str, object]:
    return {
        "n_late_steps": n_late,
        "n_steps": looked_at.n_steps,
        "step_ms": round(case.step_ns / 1e6, 3),
    }


def late_ranks(
    case: Case, processes: list[int], delays: Mapping[int, Delays], *, looked_at: Examined
) -> Verdict:
    """The verdict on ranks that are late by their own doing, together where there are several.

    delays: by process, of these at least; each has its share in what they cost together.
    """
    own, whole = delays[processes[0]], total(delays[process] for process in processes)
    parts = explained(whole.excess, case.limits.cause_share)
    named = {case.who(process) for process in processes}
    lost = {who: ns for who, ns in whole.lost_ns.items() if who not in named}
    place = code_location(case, processes[0], parts)
    return replace(
        location(case, processes, whole, looked_at=looked_at),
        kind="straggler",
        period_steps=period_steps(own.steps, own.sizes_ns),
        n_incidents=own.n_incidents,
        causes=parts,
        confidence=confidence(case, own, parts),
        victims=victims(case, lost),
        cost=cost_of(case, whole, named, looked_at=looked_at),
        advice=[line for one in leading(parts) for line in one.cause.advice(one.evidence | place)],
        evidence=steps(case, own.n_late, looked_at)
        | ({"is_whole_node": True} if len(processes) > 1 else {})
        | place,
    )
