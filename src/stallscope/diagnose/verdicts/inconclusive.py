"""Verdicts that name no rank: late steps that chance may have chosen, or that may cost nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stallscope.diagnose.cost.delays import delays_in_all, device_cost
from stallscope.diagnose.findings import Findings
from stallscope.diagnose.gpu.slow_gpu import SlowDevice
from stallscope.diagnose.lateness.late_steps import LateStep, late_steps
from stallscope.diagnose.lateness.recurrence import beyond_chance, with_unproven_delays
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.verdicts import device, imbalance
from stallscope.diagnose.verdicts._late import ExaminedTotals

_SLIGHTLY = 0.6  # times the threshold of a late step: 3.6 deviations


def doubtful(findings: Findings, examined: ExaminedTotals) -> list[Verdict]:
    """The verdict on clear late steps that may be chance: it names no rank."""
    case = findings.case
    unproven = with_unproven_delays(
        [late for late in findings.late if not findings.absorption.has(late.process)],
        findings.named,
        min_ns=case.pace.min_ns,
        long_ns=case.limits.doubtful_share * examined.observed_ns,
        costly_ns=case.limits.change_share * examined.observed_ns,
        limits=case.limits,
    )
    if not unproven:
        return _slightly_late(findings, examined)
    because = "with this many ranks, the few late steps may be coincidence"
    advice = "Examine more steps: a rank with a fault of its own will be late again."
    return [_suspected(case, unproven, because=because, advice=advice, examined=examined)]


def _slightly_late(findings: Findings, examined: ExaminedTotals) -> list[Verdict]:
    """The verdict on ranks that are late again and again by less than the threshold, which the variation of steps sets.

    Each has more such steps than chance gives, in which no other rank is late, and they took much of the time.
    """
    case, pace, limits = findings.case, findings.case.pace, findings.case.limits
    least_ns = max(limits.min_late_ns, limits.late_step_share * pace.step_ns, _SLIGHTLY * pace.min_ns)
    if least_ns >= pace.min_ns:
        return []
    late = late_steps(
        case.timeline,
        case.matched,
        case.judged,
        program=case.programs.program,
        usual=replace(pace, min_ns=least_ns),
        limits=limits,
    )
    late = [step for step in late if not step.is_usual and not findings.absorption.has(step.process)]
    n_in_step = Counter(step.step for step in late)
    counts = np.bincount([step.process for step in late], minlength=case.timeline.n_processes)
    suspects = {}
    for process in np.flatnonzero(counts >= limits.min_unclear_steps).tolist():
        alone = [step for step in late if step.process == process and n_in_step[step.step] == 1]
        cost_ns = sum(step.excess_ns for step in alone)
        is_often = beyond_chance(len(alone), np.delete(counts, process), limits.chance)
        if is_often and cost_ns >= limits.change_share * examined.observed_ns:
            suspects[process] = alone
    if not suspects:
        return []
    because = "a rank is late again and again by as much as the steps of all ranks vary at most"
    advice = "Examine more steps, and compare this rank's host with the others (CPU clock, other programs)."
    return [_suspected(case, suspects, because=because, advice=advice, examined=examined)]


def often_last(findings: Findings, examined: ExaminedTotals) -> list[Verdict]:
    """The verdicts on GPUs that are among the slowest in most steps of a job whose ranks have uneven work."""
    return [
        _often_last(findings.case, process, slow, examined) for process, slow in findings.often_last.items()
    ]


def _often_last(case: Case, process: int, slow: SlowDevice, examined: ExaminedTotals) -> Verdict:
    of_gpu = device.verdict(case, process, slow, device_cost(case, process, slow.late), examined=examined)
    n_late, n_steps = len(slow.late), int(np.count_nonzero(case.judged.process == process))
    because = (
        f"the GPU of rank {of_gpu.ranks[0]} is among the slowest in most steps, and the work of the steps differs "
        "between ranks: the GPU is slow, or the rank has more work"
        if 2 * n_late > n_steps
        else f"the GPU of rank {of_gpu.ranks[0]} works longest in {n_late} of {n_steps} steps, far more often than "
        "other GPUs: it is slow at times, or the rank has more work in these steps"
    )
    return replace(
        of_gpu,
        kind="inconclusive",
        ranks=[],
        nodes=[],
        causes=[],
        confidence=0.5,
        abstained_because=because,
        advice=[
            "Compare the clock of this GPU with the others (nvidia-smi -q -d CLOCK,PERFORMANCE), and the number of "
            "tokens or samples of this rank with the other ranks."
        ],
        evidence=replace(of_gpu.evidence, suspects=of_gpu.ranks),
    )


def silent(hang: Verdict) -> Verdict:
    """The verdict on ranks that wait in the last calls of a job whose senders do not report whether it runs.

    Such a job has ended, or hangs. So the verdict names no rank, and has no cost.
    """
    waited = f"{len(hang.victims)} ranks" if len(hang.victims) != 1 else "1 rank"
    return replace(
        hang,
        kind="inconclusive",
        ranks=[],
        pids=[],
        causes=[],
        victims=[],
        cost=None,
        confidence=0.5,
        abstained_because=f"{waited} entered a round that the job has not completed, and no sender reports whether "
        "the processes still run: the job has ended, or it hangs",
        advice=["Run `stallscope trace` on its machines: it reports the state of each process every second."],
        evidence=replace(hang.evidence, suspects=hang.ranks, waited_s=None),
    )


def absorbed(findings: Findings, examined: ExaminedTotals) -> list[Verdict]:
    """The verdict on recurring host delays that the queues of the GPUs may or may not have absorbed."""
    case, possible = findings.case, findings.absorption.possible
    if not possible:
        return []
    because = (
        "in every step the GPU had queued work for longer than the host's delay: the delay may cost nothing"
    )
    advice = "Record the GPUs as well (NCCL profiler plugin), or compare with a time without the delay."
    return [_suspected(case, possible, because=because, advice=advice, examined=examined)]


def _suspected(
    case: Case,
    suspects: Mapping[int, Sequence[LateStep]],
    *,
    because: str,
    advice: str,
    examined: ExaminedTotals,
) -> Verdict:
    """The verdict on late steps, by process, that do not prove which ranks cause them."""
    delays = delays_in_all(case, [late for steps in suspects.values() for late in steps])
    verdict = imbalance.moving_ranks(case, delays, examined=examined)
    ranks = sorted(int(case.timeline.rank[process]) for process in suspects)
    return replace(
        verdict,
        kind="inconclusive",
        confidence=0.5,
        abstained_because=because,
        advice=[advice],
        evidence=replace(verdict.evidence, suspects=ranks, moves=False),
    )
