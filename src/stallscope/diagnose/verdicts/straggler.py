"""Verdicts on ranks that are late by their own doing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.cost.delays import (
    Delays,
    as_steps_grew,
    delays_by_process,
    late_together,
)
from stallscope.diagnose.findings import Findings
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.recurrence import incidents, unique_delays
from stallscope.diagnose.lateness.uneven_work import with_more_work
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts import imbalance
from stallscope.diagnose.verdicts._late import ExaminedTotals, late_ranks
from stallscope.events.names import Category

_OF_WORK = frozenset({Category.ON_CPU, Category.LAUNCH, Category.DEVICE, Category.COPY, Category.ALLOC})
"""Categories of the ledger that grow with a rank's work."""


def verdicts(case: Case, named: dict[int, list[LateStep]], examined: ExaminedTotals) -> list[Verdict]:
    """One verdict per named rank, or one for a node all of whose ranks are named; the costliest first."""
    delays = delays_by_process(case, [late for late_steps in named.values() for late in late_steps])
    groups = grouped(case, named, {process: delays[process] for process in named})
    more = groups.more_work
    delays = as_steps_grew(case, delays, groups=[*([more] if more else []), *groups.late])
    if more:
        uneven = imbalance.more_work(case, more, delays, examined=examined)
    late = [
        *([uneven] if more else []),
        *(late_ranks(case, group, delays, examined=examined) for group in groups.late),
    ]
    return costliest_first([verdict for verdict in late if not is_nothing(case, verdict, examined)])


@dataclass(frozen=True)
class Groups:
    """Late processes by verdict. more_work: processes with more work than the others. late: the other processes, one
    group for each verdict. unclear: processes that may have more work, after too few steps to decide; also in `late`.
    """

    more_work: list[int]
    late: list[list[int]]
    unclear: frozenset[int]


def grouped(case: Case, named: dict[int, list[LateStep]], delays: Mapping[int, Delays]) -> Groups:
    """Late processes by verdict. named: all late steps of the named processes. delays: of the processes to group."""
    groups = late_together(delays, case.timeline.node)
    own = [group for group in groups if _may_have_more_work(case, group, delays)]
    alone = sorted(process for group in own for process in group if process in named)
    unclear, more = (
        with_more_work(
            named, alone, n_processes=case.timeline.n_processes, min_steps=min_steps, limits=case.limits
        )
        for min_steps in (1, case.limits.steady_steps)
    )
    late = [group for group in groups if group[0] not in more]
    return Groups(more, late, frozenset() if more else frozenset(unclear))


def _may_have_more_work(case: Case, group: Sequence[int], delays: Mapping[int, Delays]) -> bool:
    """Whether a group may have more work than the others: a rank by itself, or nodes with one rank each.

    Nodes with one rank each that wait together, as for a disk, have a common fault rather than more work.
    """
    nodes = case.timeline.node[list(group)]
    if len(group) == 1:
        return True
    has_one_rank_each = bool((np.bincount(case.timeline.node)[nodes] == 1).all())
    return has_one_rank_each and delays[group[0]].category in _OF_WORK


def one_off(case: Case, process: int, delays: Delays, *, examined: ExaminedTotals) -> Verdict:
    """The verdict on a single long delay."""
    verdict = late_ranks(case, [process], {process: delays}, examined=examined)
    evidence = replace(verdict.evidence, is_one_off=True)
    return replace(verdict, confidence=0.6, n_incidents=1, evidence=evidence)


def one_off_verdicts(
    findings: Findings, examined: ExaminedTotals
) -> tuple[list[Verdict], list[dict[str, object]]]:
    """Verdicts and remarks on delays that happened once.

    A delay is a verdict if it took a large share of the examined time and no other rank had a similar delay.
    Otherwise it is a remark.
    """
    case, shown, remarks = findings.case, [], []
    once = incidents(findings.late, findings.named, case.limits)
    unique = {
        id(late) for late in unique_delays(once, findings.late, named=findings.named, node=case.timeline.node)
    }
    for late in once:
        if id(late) not in unique:
            remarks.append(once_remark(case, late))
            continue
        delays = _once(case, late)
        verdict = one_off(case, late.process, delays, examined=examined)
        if late.excess_ns >= case.limits.incident_share * examined.observed_ns:
            shown.append(verdict)
        else:
            cost = verdict.cost.may_be_gpu_seconds if verdict.cost else 0.0
            remarks.append(once_remark(case, late) | {"gpu_seconds": round(cost, 3)})
    return shown, remarks


def _once(case: Case, late: LateStep) -> Delays:
    """A single delay; where hosts run ahead, a queue that is full hides a wait, so the steps show the cost."""
    delays = delays_by_process(case, [late])
    if len(case.waits.released_ns):
        delays = as_steps_grew(case, delays, groups=[[late.process]])
    return delays[late.process]


def once_remark(case: Case, late: LateStep) -> dict[str, object]:
    """The remark on a delay that happened once."""
    return {
        "what": "one delay, not repeated",
        "rank": int(case.timeline.rank[late.process]),
        "late_ms": round(late.late_ns / 1e6, 3),
        "at_ns": wall_ns(case.trace, case.first_node, float(case.arrival_ns[late.peak_row])),
    }


def is_nothing(case: Case, verdict: Verdict, examined: ExaminedTotals) -> bool:
    """Whether a verdict is on small delays for which no rank is known to have waited, or which cost little at most.

    The latter where hosts run ahead of GPUs whose times are unknown: their queues absorb an unknown part.
    """
    if verdict.cost is None or verdict.late_ms is None:
        return False
    if verdict.cost.may_be_gpu_seconds > 0:
        gpu_seconds = examined.observed_ns / 1e9 * case.timeline.n_processes
        is_little = verdict.cost.may_be_gpu_seconds <= case.limits.min_cost_share * gpu_seconds
        is_absorbed = case.hosts_run_ahead and not len(case.trace.gpu_kernels)
        return is_absorbed and is_little and verdict.cost.is_lower_bound and verdict.cost.gpu_seconds == 0
    return verdict.late_ms["median"] * 1e6 < case.limits.clear_factor * case.pace.min_ns


def costliest_first(verdicts: list[Verdict]) -> list[Verdict]:
    """Verdicts by descending cost; verdicts of equal cost keep their order."""
    return sorted(verdicts, key=lambda verdict: -(verdict.cost.may_be_gpu_seconds if verdict.cost else 0.0))
