"""Verdicts on uneven work: delays that move around, ranks or a stage with more work."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes import explained
from stallscope.diagnose.cost.delays import (
    Delays,
    delays_in_all,
    device_delays,
    n_incidents,
    total,
)
from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.findings import Findings
from stallscope.diagnose.gpu.slow_gpu import SlowDevice
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.lateness.uneven_work import MovingLateness, SlowStage
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts import device
from stallscope.diagnose.verdicts._late import (
    ExaminedTotals,
    between,
    cost_of,
    late_ranks,
    location,
    steps,
)


def moving_ranks(case: Case, delays: Delays, *, examined: ExaminedTotals) -> Verdict:
    """The verdict on delays that move between ranks. delays: of all late ranks together."""
    rank_of = {case.process_key(process): str(int(rank)) for process, rank in enumerate(case.timeline.rank)}
    return replace(
        location(case, [], delays, examined=examined),
        kind="imbalance",
        n_incidents=n_incidents(delays.steps),
        causes=explained(delays.excess, case.limits.cause_share),
        confidence=0.8,
        cost=cost_of(case, delays, examined=examined),
        advice=[
            "No machine is faulty: the late rank changes. Balance the work per step, or let all ranks pause together."
        ],
        evidence=replace(
            steps(case, len(np.unique(delays.steps)), examined),
            late_steps_by_rank={rank_of[key]: n for key, n in delays.by_process.items() if key in rank_of},
            moves=True,
        ),
    )


def more_work(
    case: Case, processes: list[int], delays: Mapping[int, Delays], *, examined: ExaminedTotals
) -> Verdict:
    """The verdict on ranks that have more work than the others: as for stragglers, but no rank is named as faulty."""
    verdict = late_ranks(case, processes, delays, examined=examined)
    return replace(
        verdict,
        kind="imbalance",
        ranks=[],
        nodes=[],
        confidence=0.8,
        advice=["Balance the work: these ranks have more of it (tokens, sequence lengths, shards)."],
        evidence=replace(verdict.evidence, is_whole_node=None, more_work=verdict.ranks),
    )


def moving_gpus(case: Case, delays: Delays, *, examined: ExaminedTotals) -> Verdict:
    """The verdict on delays that move between GPUs. Their hosts are not the cause."""
    verdict = moving_ranks(case, delays, examined=examined)
    return replace(verdict, causes=[], evidence=replace(verdict.evidence, on="the GPUs"))


def moving(findings: Findings, uneven: MovingLateness, examined: ExaminedTotals) -> Verdict:
    """The verdict on delays that move between ranks or between GPUs."""
    case = findings.case
    if not findings.is_on_device:
        return moving_ranks(case, delays_in_all(case, uneven.late), examined=examined)
    by_process: dict[int, list[LateStep]] = {}
    for late in uneven.late:
        by_process.setdefault(late.process, []).append(late)
    parts = [device_delays(case, process, late_steps) for process, late_steps in by_process.items()]
    return moving_gpus(case, total(parts), examined=examined)


def gpu_work(
    case: Case, process: int, slow: SlowDevice, delays: Delays, *, examined: ExaminedTotals
) -> Verdict:
    """The verdict on a GPU that does additional work every few steps, such as an evaluation."""
    device_verdict = device.verdict(case, process, slow, delays, examined=examined)
    return replace(
        device_verdict,
        kind="imbalance",
        ranks=[],
        nodes=[],
        causes=[],
        period_steps=period_steps(delays.steps, delays.sizes_ns),
        advice=["Divide the additional work of this rank (evaluation, logging, sampling) among all ranks."],
        evidence=replace(device_verdict.evidence, more_work=device_verdict.ranks),
    )


def stage(case: Case, slow: SlowStage) -> Verdict:
    """The verdict on a pipeline stage with more work than the others."""
    ranks = sorted(int(case.timeline.rank[process]) for process in slow.processes)
    others = sorted(set(case.timeline.rank.tolist()) - set(ranks))
    rows = case.arrival_ns[case.judged.first_row]
    return Verdict(
        kind="imbalance",
        summary="",
        nodes=[],
        n_rounds=case.matched.n_rounds,
        n_incidents=1,
        late_ms={"median": round(slow.excess_ns / 1e6, 3), "max": round(slow.excess_ns / 1e6, 3)},
        since_ns=wall_ns(case.trace, case.first_node, float(rows.min())),
        until_ns=wall_ns(case.trace, case.first_node, float(rows.max())),
        confidence=0.9,
        victims=others,
        # Calls on several communicators overlap, so the wait is at most the stage's excess. In any pipeline the ranks
        # wait for a part of it.
        cost=between(
            case,
            0.0,
            min(slow.wait_share * case.step_ns, slow.excess_ns) * slow.n_steps * len(others) / 1e9,
            observed_ns=case.observed_ns,
        ),
        advice=["Move work between the stages: no machine is faulty, the slow stage has more work."],
        evidence=VerdictEvidence(
            slow_stage=ranks,
            wait_share=round(slow.wait_share, 3),
            n_steps=slow.n_steps,
            step_ms=round(case.step_ns / 1e6, 3),
        ),
    )
