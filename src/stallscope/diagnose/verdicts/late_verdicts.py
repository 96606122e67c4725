"""Verdicts on late steps: a rank that is slow itself, a slow GPU, delays that move around, one long delay.

Each is made from summed delays (see delays), which may be those of one trace, or of a stream whose rows are gone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.causes import Explained, explained, leading
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.cost.delays import Delays, Who, n_incidents, total
from stallscope.diagnose.gpu.slow_gpu import SlowDevice
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.report.verdict import CostSaid, Verdict
from stallscope.diagnose.timeline import user_frame
from stallscope.diagnose.timeline.case import Case
from stallscope.events.names import CollectiveFlag

_SURE = 0.8  # where a cost is sure to this share it is told as one number


@dataclass(frozen=True)
class Seen:
    """How much was looked at in all: judged steps, time, and by communicator its rounds."""

    n_steps: int
    observed_ns: float
    n_rounds: Mapping[int, int]


def seen(case: Case) -> Seen:
    """What a case shows."""
    n_rounds: dict[int, int] = {}
    for comm, n in zip(
        case.line.comm_hash.tolist(), np.bincount(case.line.comm_of_round).tolist(), strict=False
    ):
        n_rounds[comm] = max(n_rounds.get(comm, 0), n)  # point-to-point pairs share their communicator
    return Seen(
        n_steps=len(np.unique(case.judged.step)),
        observed_ns=case.observed_ns,
        n_rounds=n_rounds,
    )


def straggler(case: Case, processes: list[int], delays: Mapping[int, Delays], *, looked_at: Seen) -> Verdict:
    """The verdict on ranks that are late by their own doing, together where there are several.

    delays: by process, of these at least; each has its share in what they cost together.
    """
    own, whole = delays[processes[0]], total(delays[process] for process in processes)
    parts = explained(whole.excess, case.limits.cause_share)
    named = {case.who(process) for process in processes}
    lost = {who: ns for who, ns in whole.lost_ns.items() if who not in named}
    place = _place_said(case, processes[0], parts)
    return replace(
        _where(case, processes, whole, looked_at=looked_at),
        kind="straggler",
        period_steps=period_steps(own.steps, own.sizes_ns),
        n_incidents=own.n_incidents,
        causes=parts,
        confidence=_confidence(case, own, parts),
        victims=_victims(case, lost),
        cost=_cost_of(case, whole, named, looked_at=looked_at),
        advice=[line for one in leading(parts) for line in one.cause.advice(one.evidence | place)],
        evidence=_steps_said(case, own.n_late, looked_at)
        | ({"is_whole_node": True} if len(processes) > 1 else {})
        | place,
    )


def once(case: Case, process: int, delays: Delays, *, looked_at: Seen) -> Verdict:
    """The verdict on a single long delay."""
    verdict = straggler(case, [process], {process: delays}, looked_at=looked_at)
    evidence = verdict.evidence | {"is_one_off": True}
    return replace(verdict, confidence=0.6, n_incidents=1, evidence=evidence)


def device(case: Case, process: int, slow: SlowDevice, delays: Delays, *, looked_at: Seen) -> Verdict:
    """The verdict on a slow GPU. delays: see device_delays."""
    why = cause("gpu_shared" if slow.is_irregular else "gpu_slow")
    values = delays.sizes_ns / 1e6
    evidence: dict[str, object] = {
        "seen_by": slow.seen_by,
        "excess_ms_quartiles": [round(float(np.quantile(values, q)), 3) for q in (0.25, 0.5, 0.75)],
    }
    part = Explained(why, 1.0, delays.excess.total_ns, evidence)
    said = _cost_of(case, delays, looked_at=looked_at)
    return replace(
        _where(case, [process], delays, looked_at=looked_at),
        kind="device",
        n_incidents=delays.n_incidents,
        causes=[part],
        confidence=round(min(1 - 0.5**delays.n_late, 0.9 if slow.is_irregular else 0.95), 3),
        victims=[int(r) for p, r in enumerate(case.line.rank) if p != process],
        cost=replace(
            said, is_lower_bound=said.is_lower_bound or slow.is_irregular
        ),  # only the longest are late
        advice=why.advice(evidence),
        evidence=_steps_said(case, delays.n_late, looked_at),
    )


def moving(case: Case, delays: Delays, *, looked_at: Seen) -> Verdict:
    """The verdict on delays that no rank owns. delays: of all that were late."""
    rank_of = {case.who(process): str(int(rank)) for process, rank in enumerate(case.line.rank)}
    return replace(
        _where(case, [], delays, looked_at=looked_at),
        kind="imbalance",
        n_incidents=n_incidents(delays.steps),
        causes=explained(delays.excess, case.limits.cause_share),
        confidence=0.8,
        cost=_cost_of(case, delays, looked_at=looked_at),
        advice=[
            "No machine is bad: the late rank changes. Even out the work per step, or let all ranks pause together."
        ],
        evidence={
            "late_steps_by_rank": {rank_of[who]: n for who, n in delays.by_process.items() if who in rank_of},
            "moves": True,
            "n_steps": looked_at.n_steps,
            "n_late_steps": len(np.unique(delays.steps)),
            "step_ms": round(case.step_ns / 1e6, 3),
        },
    )


def with_more_work(
    case: Case, processes: list[int], delays: Mapping[int, Delays], *, looked_at: Seen
) -> Verdict:
    """The verdict on ranks that have more to do than the others: told as a straggler's, without an accusation."""
    verdict = straggler(case, processes, delays, looked_at=looked_at)
    evidence = {name: value for name, value in verdict.evidence.items() if name != "is_whole_node"}
    return replace(
        verdict,
        kind="imbalance",
        ranks=[],
        nodes=[],
        confidence=0.8,
        advice=["Even out the work: these ranks have more of it (tokens, sequence lengths, shards)."],
        evidence=evidence | {"more_work": verdict.ranks},
    )


def moving_on_devices(case: Case, delays: Delays, *, looked_at: Seen) -> Verdict:
    """The verdict on delays of GPUs that no GPU owns: what their hosts did has no part in it."""
    verdict = moving(case, delays, looked_at=looked_at)
    return replace(verdict, causes=[], evidence=verdict.evidence | {"on": "the GPUs"})


def _cost_of(case: Case, delays: Delays, named: Collection[Who] = (), *, looked_at: Seen) -> CostSaid:
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
    """GPU seconds from least to most; as one number where that is nearly the same."""
    if least >= _SURE * most:
        return cost_said(case, most, is_lower_bound=False, observed_ns=observed_ns)
    said = cost_said(case, least, is_lower_bound=True, observed_ns=observed_ns)
    upper = cost_said(case, most, is_lower_bound=False, observed_ns=observed_ns)
    return replace(said, at_most_gpu_seconds=upper.gpu_seconds, at_most_usd=upper.usd)


def cost_said(case: Case, gpu_seconds: float, *, is_lower_bound: bool, observed_ns: float) -> CostSaid:
    """A cost at the case's price."""
    return CostSaid.of(
        gpu_seconds, case.usd_per_gpu_hour, is_lower_bound=is_lower_bound, observed_ns=observed_ns
    )


def _where(case: Case, processes: list[int], delays: Delays, *, looked_at: Seen) -> Verdict:
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
    )


def _victims(case: Case, lost_ns: Mapping[Who, float]) -> list[int]:
    rank_of = {case.who(process): int(rank) for process, rank in enumerate(case.line.rank)}
    least = 0.1 * max(max(lost_ns.values(), default=0.0), 1.0)
    return sorted(rank_of[who] for who, ns in lost_ns.items() if ns > least and who in rank_of)


def _confidence(case: Case, delays: Delays, parts: list[Explained]) -> float:
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


def _place_said(case: Case, process: int, parts: list[Explained]) -> dict[str, object]:
    """Where in the code the rank was held, where that is known of what explains its delay best."""
    if not parts:
        return {}
    node, pid = int(case.line.node[process]), int(case.line.pid[process])
    found = user_frame.held_at(case.trace, node, pid, categories=parts[0].cause.categories)
    return {"at": user_frame.in_own_code(found), "stack": list(found)} if found else {}


def _steps_said(case: Case, n_late: int, looked_at: Seen) -> dict[str, object]:
    return {
        "n_late_steps": n_late,
        "n_steps": looked_at.n_steps,
        "step_ms": round(case.step_ns / 1e6, 3),
    }
