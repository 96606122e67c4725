"""Verdicts from spans of work: a slow worker, a stage with more work, uneven work of a changing rank."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, VerdictEvidence
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.recurrence import recurring
from stallscope.diagnose.report.verdict import Verdict, VerdictCost
from stallscope.diagnose.spans.own_time import (
    HeavyStage,
    UnevenWork,
    Work,
    heavy_stage,
    longer_kinds,
    losses_ns,
    min_slow_ns,
    slow_steps,
    spread,
)
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import Array
from stallscope.events.trace import Trace

_COLLECTOR = ("gc",)  # kinds of work that are the garbage collector's
_SPAN_CONFIDENCE = 0.9  # spans have no time ledger that confirms the cause


def slow_work(
    trace: Trace, done: Work, *, limits: Thresholds, usd_per_gpu_hour: float | None
) -> list[Verdict]:
    """The verdicts on the work of a trace; the costliest worker first."""
    late = slow_steps(done, limits)
    named = recurring(
        late, len(done.peers), min_ns=min_slow_ns(done, limits), limits=limits, has_states=False
    )
    replicas = _whole_pipelines(done, set(named))
    losses = losses_ns(done, named)
    verdicts = [
        _worker(trace, done, late=named[p], loss=losses[p], usd_per_gpu_hour=usd_per_gpu_hour)
        for p in sorted(named, key=lambda p: -sum(each.late_ns for each in named[p]))
        if int(done.pipeline[p]) not in replicas
    ]
    verdicts += [_replica(done, replica) for replica in replicas]
    stage = heavy_stage(done, set(named), limits)
    uneven = None if stage else spread(done, late, set(named), limits)
    if stage:
        verdicts.append(_stage(trace, done, stage, usd_per_gpu_hour=usd_per_gpu_hour))
    if uneven:
        verdicts.append(_by_turns(trace, done, uneven, usd_per_gpu_hour=usd_per_gpu_hour))
    return verdicts


def _whole_pipelines(done: Work, named: set[int]) -> list[int]:
    """Pipelines of several stages whose ranks are all named: more data and a slow machine look the same there."""
    numbers, sizes = np.unique(done.pipeline, return_counts=True)
    n_named = np.array([sum(int(done.pipeline[p]) == number for p in named) for number in numbers.tolist()])
    return [int(number) for number in numbers[(sizes > 1) & (n_named == sizes)]]


def _worker(
    trace: Trace, done: Work, *, late: list[LateStep], loss: Array, usd_per_gpu_hour: float | None
) -> Verdict:
    process = late[0].process
    steps = [each.step for each in late]
    others = np.flatnonzero(np.arange(len(done.peers)) != process)
    values = np.array([each.late_ns for each in late]) / 1e6
    parts = _causes(trace, done, process, steps)
    agreement = float(np.median([min(each.excess_ns / max(each.late_ns, 1.0), 1.0) for each in late]))
    return Verdict(
        kind="straggler",
        summary="",
        ranks=[int(done.rank[process])],
        nodes=[name for name in [trace.nodes[int(done.node[process])]] if name],
        n_late_rounds=len(late),
        n_rounds=len(done.step),
        late_ms={"median": round(float(np.median(values)), 3), "max": round(float(values.max()), 3)},
        since_ns=wall_ns(trace, int(done.node[process]), float(done.began_ns[steps[0]])),
        until_ns=wall_ns(trace, int(done.node[process]), float(done.began_ns[steps[-1]])),
        n_incidents=int((np.diff(np.unique(steps)) > 2).sum()) + 1,
        causes=parts,
        confidence=round(min((1 - 0.5 ** len(late)) * (0.5 + 0.5 * agreement), 0.99) * _SPAN_CONFIDENCE, 3),
        victims=sorted(int(done.rank[p]) for p in others),
        cost=_cost(done, float(loss.sum()) * len(others), usd_per_gpu_hour),
        advice=parts[0].cause.advice(parts[0].evidence) if parts else [],
        evidence=replace(
            _steps(done, len(late), loss),
            first_step=int(done.step[steps[0]]),
            last_step=int(done.step[steps[-1]]),
        ),
    )


def _causes(trace: Trace, done: Work, process: int, steps: list[int]) -> list[Explained]:
    """The causes of the excess. Spans do not distinguish host and GPU; garbage collection is always host time."""
    kinds = longer_kinds(trace, done, process, steps)
    longer = {name: excess for name, (excess, _) in kinds.items() if excess > 0}
    total = sum(longer.values())
    if total <= 0:
        return []
    factors = [f"{name} {kinds[name][1]:.2f} x as long" for name in longer if longer[name] >= 0.05 * total]
    collected = sum(excess for name, excess in longer.items() if name in _COLLECTOR)
    parts = [
        Explained(
            cause("host_compute"),
            collected / total,
            collected * len(steps),
            CauseEvidence(work="garbage collection"),
        ),
        Explained(
            cause("unknown"),
            1 - collected / total,
            (total - collected) * len(steps),
            CauseEvidence(work=factors),
        ),
    ]
    return sorted((part for part in parts if part.share >= 0.05), key=lambda part: -part.share)


def _replica(done: Work, pipeline: int) -> Verdict:
    ranks = sorted(int(done.rank[p]) for p in np.flatnonzero(done.pipeline == pipeline))
    return Verdict(
        kind="inconclusive",
        summary="",
        n_rounds=len(done.step),
        n_incidents=1,
        confidence=0.5,
        evidence=VerdictEvidence(suspects=ranks),
        abstained_because=(
            f"all stages of one replica (ranks {', '.join(map(str, ranks[:12]))}) work longer than the stages of the "
            "other replicas: it has more data, or its machine is slow"
        ),
        advice=[
            "Compare the amount of data (tokens, sequence lengths) of this replica with the other replicas."
        ],
    )


def _stage(trace: Trace, done: Work, stage: HeavyStage, *, usd_per_gpu_hour: float | None) -> Verdict:
    ranks = sorted(int(done.rank[p]) for p in stage.processes)
    others = sorted(set(done.rank.tolist()) - set(ranks))
    cost = _cost(done, float(stage.loss_ns.sum()) * len(others), usd_per_gpu_hour)
    excess_ms = round(stage.excess_ns / 1e6, 3)
    sizes = np.unique(done.peers, return_counts=True)[1]
    evidence = _steps(done, int((stage.loss_ns > 0).sum()), stage.loss_ns)
    alone = bool((sizes == 1).all())
    why = "each stage has only one worker, so more work and a slow machine look the same"
    return Verdict(
        kind="inconclusive" if alone else "imbalance",
        summary="",
        n_rounds=len(done.step),
        n_incidents=1,
        late_ms={"median": excess_ms, "max": excess_ms},
        since_ns=wall_ns(trace, 0, float(done.began_ns[0])),
        until_ns=wall_ns(trace, 0, float(done.began_ns[-1])),
        confidence=0.5 if alone else 0.9,
        victims=others,
        cost=cost,
        abstained_because=why if alone else None,
        advice=["Move work between the stages: no machine is faulty, the slow stage has more work."],
        evidence=replace(evidence, slow_stage=ranks),
    )


def _by_turns(trace: Trace, done: Work, uneven: UnevenWork, *, usd_per_gpu_hour: float | None) -> Verdict:
    turns, counts = np.unique(done.rank[uneven.worst[uneven.is_late]], return_counts=True)
    values = uneven.spread_ns[uneven.is_late] / 1e6
    return Verdict(
        kind="imbalance",
        summary="",
        n_rounds=len(done.step),
        n_incidents=1,
        late_ms={"median": round(float(np.median(values)), 3), "max": round(float(values.max()), 3)},
        since_ns=wall_ns(trace, 0, float(done.began_ns[0])),
        until_ns=wall_ns(trace, 0, float(done.began_ns[-1])),
        confidence=0.8,
        cost=_cost(done, float(uneven.spread_ns.sum()), usd_per_gpu_hour),
        advice=[
            "No machine is faulty: the slow rank changes. Balance the work per step (sequence lengths, experts)."
        ],
        evidence=replace(
            _steps(done, int(uneven.is_late.sum()), uneven.spread_ns),
            moves=True,
            late_steps_by_rank=dict(zip(map(str, turns.tolist()), counts.tolist(), strict=True)),
        ),
    )


def _steps(done: Work, n_late: int, loss: Array) -> VerdictEvidence:
    """The evidence on the steps: late and examined steps, and the slowdown.

    The slowdown is the time of the steps divided by the longest possible time without the loss.
    """
    slowdown = float(done.length_ns.sum() / max(float((done.length_ns - loss).sum()), 1.0))
    return VerdictEvidence(
        n_late_steps=n_late,
        n_steps=len(done.step),
        step_ms=round(done.step_ns / 1e6, 3),
        slowdown=round(slowdown, 3),
    )


def _cost(done: Work, lost_ns: float, usd_per_gpu_hour: float | None) -> VerdictCost:
    """The cost as a lower bound: ranks that are missing in the source do not count."""
    observed_ns = float(done.length_ns.sum())
    return VerdictCost.of(lost_ns / 1e9, usd_per_gpu_hour, is_lower_bound=True, observed_ns=observed_ns)
