"""Verdicts on a change of the whole job, and on a slow link between some ranks: a fault without a rank to blame."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.findings import Findings
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.slow_link import SlowGroup, slow_groups
from stallscope.diagnose.lateness.slowdown import (
    Slowdown,
    StepTimes,
    min_visible_share,
    n_steps_to_decide,
    part_slowdown,
    slowdown,
    unclear_shift,
)
from stallscope.diagnose.report.evidence import Evidence
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.timeline.round_samples import steady_strides
from stallscope.diagnose.timeline.step_table import Cells, part_of, touched
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.diagnose.timeline.unseen_ranks import n_unseen
from stallscope.diagnose.verdicts._late import between, priced

_CONFIDENCE = 0.9  # a change exceeds the variation of the steps by four deviations, see lateness.slowdown
_RECORD_GPUS = (
    "Record the GPUs as well (NCCL profiler plugin, NVML clocks): their times differ between ranks."
)
_COMPARE_GPUS = (
    "No GPU is later than the others. Compare clocks (nvidia-smi -q -d CLOCK,PERFORMANCE), and the counters of NVLink "
    "and network interfaces, with the time before."
)
_PARTLY = (
    2  # times the share that a change must reach where only the steps between many late steps are compared
)
_FEW_LATE = 0.2  # share of the steps up to which late steps are few
_ALSO_LATE = 0.5  # share of a process's typical lateness from which it may hold up a step


def of_all_ranks(case: Case, known: Iterable[LateStep] = (), *, factor: float = 1.0) -> list[Verdict]:
    """The verdict on a slowdown of all ranks. known: late steps of other verdicts, in which no other cause shows.

    factor: times the share that a change must reach.
    """
    if not _has_comparable_steps(case):
        return []
    late = list(known)
    change = case.change if not late and factor == 1.0 else _of_quiet_steps(case, late, factor)
    return [] if change is None else [_of_change(case, change)]


def min_reported_share(case: Case) -> float | None:
    """The smallest share by which the job may become slower so that it is reported; None if no steps are compared."""
    return min_visible_share(case.step_times, case.limits) if _has_comparable_steps(case) else None


def with_unclear_change(case: Case, evidence: Evidence) -> Evidence:
    """The evidence with a difference of the later steps that may be a change of the job or chance."""
    if not _has_comparable_steps(case):
        return evidence
    shift = unclear_shift(case.step_times, case.limits)
    if shift is None:
        return evidence
    return replace(
        evidence,
        unclear_change_share=round(shift.share, 4),
        unclear_change_step=int(case.step_times.number[shift.cut]),
        n_steps_to_decide=n_steps_to_decide(shift, len(case.step_times.number)),
    )


def _has_comparable_steps(case: Case) -> bool:
    return (
        bool(case.programs.has_steps.all())
        and not has_changing_sample(case.timeline)
        and not _are_steps_apart(case)
    )


def _are_steps_apart(case: Case) -> bool:
    """Whether the steps of ranks that were attached late may be steps of different numbers."""
    error_ns = case.limits.clock_error_factor * case.matched.matching_error_ns
    return error_ns > max(case.limits.min_late_ns, case.limits.hidden_step_share * case.step_ns)


def _of_change(case: Case, change: Slowdown) -> Verdict:
    n_steps = len(np.unique(case.judged.step[case.judged.step >= change.step]))
    on_host = change.host_share >= 0.5
    why = (
        "every rank slowed down by a similar amount: the cause is shared (input, file system, network, code)"
        if on_host
        else "no rank is late on its host: device or fabric, rank unknown"
    )
    if not on_host and n_unseen(case.timeline, case.trace):
        why += ", or a rank that is not in this trace"
    return Verdict(
        kind="change",
        summary="",
        n_rounds=case.matched.n_rounds,
        since_ns=wall_ns(case.trace, int(case.timeline.node[0]), change.at_ns),
        n_incidents=1,
        confidence=_CONFIDENCE,
        cost=priced(
            case,
            change.growth_ns * n_steps * case.timeline.n_processes / 1e9,
            is_lower_bound=False,
            observed_ns=case.observed_ns,
        ),
        abstained_because=why,
        advice=[_COMPARE_GPUS if len(case.trace.gpu_kernels) else _RECORD_GPUS]
        if not on_host
        else ["Compare with the time before: deployment, data shard, shared file system, co-located jobs."],
        evidence=VerdictEvidence(
            step_ms_before=round(change.before_ns / 1e6, 3),
            step_ms_after=round(change.after_ns / 1e6, 3),
            host_share=round(change.host_share, 3),
            n_steps=n_steps,
            from_step=change.step,
            grew_ms={name: round(ns / 1e6, 3) for name, ns in change.grew_ns.items()},
        ),
    )


def _is_in_most_steps(case: Case, late: Sequence[LateStep], before: float = np.inf) -> bool:
    """Whether most steps before a step are late steps."""
    n_late = len({late_step.step for late_step in late if late_step.step < before})
    return bool(n_late > case.limits.steady_share * np.count_nonzero(np.unique(case.judged.step) < before))


def _of_quiet_steps(case: Case, late: list[LateStep], factor: float) -> Slowdown | None:
    """The change of the steps between late steps, or of the hosts' time or the transfers in all steps."""
    kept = _without(case, late) if late else case.judged
    n_steps, n_kept = len(np.unique(case.judged.step)), len(np.unique(kept.step))
    factor = max(factor, 1 if n_kept >= (1 - _FEW_LATE) * n_steps else _PARTLY)
    limits = replace(case.limits, change_share=factor * case.limits.change_share)
    quiet = StepTimes.of(case.timeline, kept, limits)
    found = slowdown(case.timeline, quiet, limits, is_whole=not late)
    return found or part_slowdown(case.timeline, case.step_times, limits if late else case.limits)


def of_other_steps(findings: Findings) -> list[Verdict]:
    """The verdict on a slowdown of all ranks in the steps in which no rank or GPU with a verdict is late."""
    case = findings.case
    known = [late for late in findings.late if late.process in findings.named]
    known += [
        late for gpus in (findings.device, findings.gpu_work) for gpu in gpus.values() for late in gpu.late
    ]
    uneven = findings.uneven.late if findings.uneven else []
    if _is_in_most_steps(case, uneven):
        found = of_all_ranks(case, known, factor=_PARTLY)
        # Uneven work that begins with the change is the change.
        found = [v for v in found if _is_in_most_steps(case, uneven, before=v.evidence.from_step or 0)]
    else:
        found = of_all_ranks(case, [*known, *uneven])
    if not case.hosts_run_ahead:
        return found
    # A host that runs ahead is fast until its launch queue is full: a few steps do not show the pace of the job.
    return [verdict for verdict in found if (verdict.evidence.n_steps or 0) >= case.limits.run_ahead_steps]


def has_changing_sample(timeline: Timeline) -> bool:
    """Whether the trace has every k-th round of a communicator with several k: its steps then change their length."""
    comm, seq = timeline.comm_of_round, np.zeros(timeline.n_rounds, np.int64)
    seq[timeline.round] = timeline.rows["seq"]
    of, _ = steady_strides(comm, seq)  # rounds are in order of communicator and seq
    return bool((np.bincount(of.astype(np.int64)) > 1).any()) if of.size else False


def _without(case: Case, late: list[LateStep]) -> Cells:
    """The judged steps without late steps, without the steps after them, and without steps in which a late process
    exceeds its peers by half of its typical lateness.
    """
    table = case.judged
    steps = case.programs.step[np.array([late_step.peak_row for late_step in late])]
    typical_ns = np.full(case.timeline.n_processes, np.inf)
    for process in {late_step.process for late_step in late}:
        sizes = [late_step.late_ns for late_step in late if late_step.process == process]
        typical_ns[process] = np.median(sizes)
    also = table.step[table.excess_ns >= _ALSO_LATE * typical_ns[table.process]]
    return part_of(table, ~touched(table.step, np.append(steps, also)))


def slow_links(case: Case) -> list[Verdict]:
    """Verdicts on groups whose collectives take far longer on the GPUs than before, or than in similar groups.

    A group of all ranks has a slow link only if its job has not become slower as a whole.
    """
    groups = slow_groups(case.timeline, case.programs, step_ns=case.step_ns, limits=case.limits)
    if groups and all(len(group.processes) == case.timeline.n_processes for group in groups):
        groups = [] if of_all_ranks(case) else groups
    return [_slow_link(case, group) for group in groups]


def _slow_link(case: Case, group: SlowGroup) -> Verdict:
    timeline = case.timeline
    ranks = sorted(int(timeline.rank[process]) for process in group.processes)
    excess_ms = round(group.excess_ns / 1e6, 3)
    most = group.excess_ns * group.n_steps * timeline.n_processes / 1e9
    return Verdict(
        kind="link",
        summary="",
        nodes=sorted({case.trace.nodes[int(timeline.node[process])] for process in group.processes}),
        comm_hash=f"{int(timeline.comm_hash[group.comm]):016x}",
        first_round=int(timeline.rows["seq"][group.first_row]),
        n_rounds=case.matched.n_rounds,
        late_ms={"median": excess_ms, "max": excess_ms},
        since_ns=wall_ns(case.trace, case.first_node, float(case.arrival_ns[group.first_row])),
        n_incidents=1,
        confidence=0.5,
        cost=between(case, 0.0, most, observed_ns=case.observed_ns),
        abstained_because="the link between these ranks or one of their GPUs is slow",
        advice=[
            "Check the links between the GPUs of these ranks: NVLink and PCIe errors, NIC counters, Xid errors."
        ],
        evidence=VerdictEvidence(
            suspects=ranks,
            times_as_long=round(group.times, 2),
            n_late_steps=group.n_steps,
            step_ms=round(case.step_ns / 1e6, 3),
        ),
    )
