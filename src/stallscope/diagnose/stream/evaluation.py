"""One diagnosis of a job's rows together with its history: the same steps as for a whole trace."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.cost.delays import (
    Delays,
    as_steps_grew,
    delays_by_process,
    device_cost,
    device_delays,
    late_together,
    total,
)
from stallscope.diagnose.cost.step_growth import Baseline
from stallscope.diagnose.findings import Findings, findings
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.recurrence import incidents, recurring, unique_delays
from stallscope.diagnose.lateness.together import with_whole_nodes
from stallscope.diagnose.lateness.uneven_work import moving
from stallscope.diagnose.stream.history import History, Tracks
from stallscope.diagnose.stream.job_members import ProcessKey
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.verdicts._late import ExaminedTotals, examined_totals
from stallscope.events.layout import UNKNOWN, Array

_EVALUATIONS = 10
"""Repeated evaluations find chance events sooner, so for small delays chance must be this many times rarer."""


@dataclass(frozen=True)
class Evaluation:
    """The findings on a job's rows, in steps of the stream.

    faults: the named processes follow from the history and the rows. step_of_row: step of each row.
    live: late steps that are not in the history yet, by process; device: the same for slow GPUs. once: (process, step)
    of long delays that happened once; alone: those delays that no other rank had. step: the newest step.
    baseline: quiet steps before these rows.

    large: named processes whose late steps are far above the threshold of a late step. firm: named processes with so
    many late steps that repeated evaluations do not explain them, or with large delays that no other process has.
    """

    faults: Findings
    step_of_row: Array
    live: dict[int, list[LateStep]]
    device: dict[int, list[LateStep]]
    once: frozenset[tuple[int, int]]
    alone: frozenset[tuple[int, int]]
    large: frozenset[int]
    firm: frozenset[int]
    step: int
    examined: ExaminedTotals
    baseline: Baseline | None

    @property
    def case(self) -> Case:
        return self.faults.case

    @property
    def late(self) -> list[LateStep]:
        """All late steps in the rows."""
        return self.faults.late

    def late_of(self, processes: Iterable[int]) -> list[LateStep]:
        """Late steps in the rows, including late steps that are in the history; without delays that happened once."""
        chosen = set(processes)
        return [
            late_step
            for late_step in self.late
            if late_step.process in chosen and (late_step.process, late_step.step) not in self.once
        ]

    def in_rows(self, late: Iterable[LateStep]) -> list[LateStep]:
        """Late steps with the step numbers of the rows instead of the stream's."""
        step = self.case.programs.step
        return [replace(late_step, step=int(step[late_step.peak_row])) for late_step in late]

    def ts_ns(self, late: LateStep) -> int:
        """When a late step of these rows peaked, on its node's clock."""
        return int(self.case.timeline.rows["ts_ns"][late.peak_row])


def evaluate(case: Case, known: Array, history: History) -> Evaluation:
    """Diagnose the remaining rows, and name ranks from the history and these rows.

    known: the stream's step of each row, UNKNOWN for new rows.
    """
    limits = case.limits
    faults = findings(case)
    shift = _shift(case, known, history)
    faults = replace(
        faults,
        late=_moved(faults.late, shift),
        device={p: replace(slow, late=_moved(slow.late, shift)) for p, slow in faults.device.items()},
    )
    live = _unsettled(case, faults.late, history)
    everything = [*history.late.late(_numbers(case)), *live]
    if history.late.of:
        named = _named(case, everything, limits)
        costly = {process: late for process, late in named.items() if not faults.absorption.has(process)}
        faults = replace(faults, named=costly)
    unexplained = [
        late_step
        for late_step in faults.late
        if late_step.process not in faults.device and not faults.absorption.has(late_step.process)
    ]
    uneven = moving(
        case.timeline,
        unexplained,
        faults.named,
        table=case.judged,
        min_ns=case.pace.min_ns,
        limits=limits,
    )
    if uneven is not None or not faults.is_on_device:
        faults = replace(faults, uneven=uneven, is_on_device=False)
    least = limits.clear_factor * case.pace.min_ns
    large = frozenset(p for p, late in faults.named.items() if _median_excess_ns(late) >= least)
    once = incidents(everything, faults.named, limits)
    unlike = unique_delays(once, everything, named=faults.named, node=_nodes(case, everything))
    firm = frozenset(_named(case, everything, replace(limits, chance=limits.chance / _EVALUATIONS)))
    firm &= faults.named.keys()
    steps = np.where(case.programs.step >= 0, case.programs.step + shift[case.timeline.process], UNKNOWN)
    return Evaluation(
        faults=faults,
        step_of_row=steps,
        live=_grouped(live),
        device={p: _unsettled(case, slow.late, history) for p, slow in faults.device.items()},
        once=frozenset((late_step.process, late_step.step) for late_step in once),
        alone=frozenset((late_step.process, late_step.step) for late_step in unlike),
        large=large,
        firm=firm | {process for process in large if is_alone(faults.named[process], everything)},
        step=int(steps.max(initial=0)),
        examined=_totals(case, steps, history),
        baseline=history.baseline,
    )


def parts(
    evaluation: Evaluation, tracks: Tracks, live: dict[int, list[LateStep]], *, only_since: bool
) -> dict[int, tuple[list[Delays], list[LateStep]]]:
    """By process of the case: the delays in its track, and its late steps that are still in the rows.

    only_since: without delays of closed incidents.
    """
    case = evaluation.case
    out: dict[int, tuple[list[Delays], list[LateStep]]] = {}
    for process in range(case.timeline.n_processes):
        track = tracks.of.get(case.process_key(process))
        late_steps = live.get(process, [])
        if track is None:
            kept: list[Delays] = []
        elif only_since:
            kept = [track.since] if track.since else []
            late_steps = [
                late_step for late_step in late_steps if evaluation.ts_ns(late_step) > track.over_ns
            ]
        else:
            kept = track.all
        late_steps = [
            late_step for late_step in late_steps if (process, late_step.step) not in evaluation.once
        ]
        again = track.recurred({step for p, step in evaluation.once if p == process}) if track else []
        if kept or late_steps or again:
            out[process] = [*again, *kept], late_steps
    return out


def summed(
    evaluation: Evaluation, held: dict[int, tuple[list[Delays], list[LateStep]]], processes: Iterable[int]
) -> dict[int, Delays]:
    """The delays of some processes, from their tracks and from the rows."""
    chosen = [process for process in processes if process in held]
    live = [late_step for process in chosen for late_step in held[process][1]]
    fresh = measured(evaluation, live, evaluation.late_of(chosen))
    return {p: total([*held[p][0], *([fresh[p]] if p in fresh else [])]) for p in chosen}


def measured(evaluation: Evaluation, late: list[LateStep], among: Sequence[LateStep]) -> dict[int, Delays]:
    """The delays of each process in the rows, with the growth of the steps as their cost.

    Delays that take turns between ranks cost the waits for them, as in a report on a whole trace: the growth of a step
    cannot be divided among many ranks. among: further late steps in the rows, which cause a share of the growth.
    """
    case, named = evaluation.case, evaluation.faults.named
    delays = delays_by_process(case, late, among=among)
    groups = late_together(delays, case.timeline.node)
    if evaluation.faults.uneven:
        groups = [group for group in groups if any(process in named for process in group)]
    in_rows = {
        process: replace(each, late=tuple(evaluation.in_rows(each.late))) for process, each in delays.items()
    }
    grown = as_steps_grew(
        case, in_rows, groups=groups, among=evaluation.in_rows(among), baseline=evaluation.baseline
    )
    return {process: replace(grown[process], late=each.late) for process, each in delays.items()}


def measured_device(evaluation: Evaluation, process: int, late: list[LateStep]) -> Delays:
    """The delays of a slow GPU in the rows, with the growth of the steps as their cost."""
    case, slow = evaluation.case, evaluation.faults.device.get(process)
    among = evaluation.in_rows(slow.late) if slow else []
    delays = device_cost(case, process, evaluation.in_rows(late), among=among, baseline=evaluation.baseline)
    return replace(delays, late=device_delays(case, process, late).late)


def summed_device(
    evaluation: Evaluation, held: dict[int, tuple[list[Delays], list[LateStep]]], process: int
) -> Delays | None:
    """The delays of a slow GPU, from its track and from the rows; None without any."""
    kept, late = held.get(process, ([], []))
    delays = [*kept, *([measured_device(evaluation, process, late)] if late else [])]
    return total(delays) if delays else None


def is_alone(late: list[LateStep], everything: list[LateStep]) -> bool:
    """Whether no other process has had delays like these twice, in other steps."""
    steps, typical_ns = {late_step.step for late_step in late}, _median_excess_ns(late)
    others = Counter(
        late_step.process
        for late_step in everything
        if late_step.step not in steps and late_step.excess_ns >= 0.5 * typical_ns
    )
    return max((n for process, n in others.items() if process != late[0].process), default=0) < 2


def _median_excess_ns(late: list[LateStep]) -> float:
    return float(np.median([late_step.excess_ns for late_step in late]))


def _shift(case: Case, known: Array, history: History) -> Array:
    """Difference between the stream's steps and the steps of these rows, by process: int64 (p,).

    It is 0 until rows are dropped. Afterwards it is the median difference of the rows that have a step already, for
    each program separately, because each program has its own steps.
    """
    step, program = case.programs.step, case.programs.program
    if not history.is_trimmed:
        return np.zeros(case.timeline.n_processes, np.int64)
    both = (step >= 0) & (known >= 0)
    if not both.any():
        return np.full(case.timeline.n_processes, history.next_step)
    moved, of_row = known - step, program[case.timeline.process]
    median_shift = int(np.median(moved[both]))
    by_program = [
        int(np.median(moved[rows])) if (rows := both & (of_row == number)).any() else median_shift
        for number in range(int(program.max()) + 1)
    ]
    return np.array(by_program)[program]


def _moved(late: list[LateStep], shift: Array) -> list[LateStep]:
    return (
        [replace(late_step, step=late_step.step + int(shift[late_step.process])) for late_step in late]
        if shift.any()
        else late
    )


def _unsettled(case: Case, late: Iterable[LateStep], history: History) -> list[LateStep]:
    ts_ns = case.timeline.rows["ts_ns"]
    return [
        late_step
        for late_step in late
        if not history.is_settled(case.process_key(late_step.process), int(ts_ns[late_step.peak_row]))
    ]


def _numbers(case: Case) -> dict[ProcessKey, int]:
    return {case.process_key(process): process for process in range(case.timeline.n_processes)}


def _named(case: Case, everything: list[LateStep], limits: Thresholds) -> dict[int, list[LateStep]]:
    """The processes to name, by their late steps of all time."""
    n_processes = max([case.timeline.n_processes, *(late_step.process + 1 for late_step in everything)])
    node = _nodes(case, everything)
    named = recurring(everything, n_processes, min_ns=case.pace.min_ns, limits=limits, node=node)
    named = with_whole_nodes(named, everything, node)
    return {process: late for process, late in named.items() if process < case.timeline.n_processes}


def _nodes(case: Case, everything: list[LateStep]) -> Array:
    """The node of each process, UNKNOWN for processes without rows."""
    n_processes = max([case.timeline.n_processes, *(late_step.process + 1 for late_step in everything)])
    node = np.full(n_processes, UNKNOWN)
    node[: case.timeline.n_processes] = case.timeline.node
    return node


def _grouped(late: list[LateStep]) -> dict[int, list[LateStep]]:
    out: dict[int, list[LateStep]] = {}
    for late_step in late:
        out.setdefault(late_step.process, []).append(late_step)
    return out


def _totals(case: Case, steps: Array, history: History) -> ExaminedTotals:
    here = examined_totals(case)
    if not history.is_trimmed:
        return here
    rows = case.timeline.rows
    last = np.full(len(case.timeline.comm_hash), UNKNOWN)
    np.maximum.at(last, case.timeline.comm, rows["seq"])
    n_rounds = dict(here.n_rounds)
    for comm, seq in zip(case.timeline.comm_hash.tolist(), last.tolist(), strict=True):
        n_rounds[comm] = max(n_rounds.get(comm, 0), seq - history.first_seq.get(comm, seq) + 1)
    return ExaminedTotals(
        n_steps=int(steps.max(initial=0)) - history.first_step + 1,
        observed_ns=history.gone_ns + here.observed_ns,
        n_rounds=n_rounds,
    )
