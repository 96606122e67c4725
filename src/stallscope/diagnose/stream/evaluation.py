"""One diagnosis of a job's rows together with its history: the same steps as for a whole trace."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.cost.delays import Delays, delays_by_process, device_delays, total
from stallscope.diagnose.findings import Findings, findings
from stallscope.diagnose.lateness.imbalance import moving
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.recurrence import incidents, recurring, unique_delays
from stallscope.diagnose.stream.history import History, Tracks
from stallscope.diagnose.stream.job_members import Who
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.verdicts._late import Examined, examined_totals
from stallscope.events.layout import UNKNOWN, Array

_LOOKS = 10
"""Repeated evaluations find chance events sooner, so for small delays chance must be this many times rarer."""


@dataclass(frozen=True)
class Look:
    """The findings on a job's rows, in steps of the stream.

    found: the named processes follow from the history and the rows. step_of_row: step of each row.
    live: late steps that are not in the history yet, by process; device: the same for slow GPUs. once: (process, step)
    of long delays that happened once; alone: those delays that no other rank had. step: the newest step.

    large: named processes whose late steps are far above the threshold of a late step. firm: named processes with so
    many late steps that repeated evaluations do not explain them, or with large delays that no other process has.
    """

    found: Findings
    step_of_row: Array
    live: dict[int, list[LateStep]]
    device: dict[int, list[LateStep]]
    once: frozenset[tuple[int, int]]
    alone: frozenset[tuple[int, int]]
    large: frozenset[int]
    firm: frozenset[int]
    step: int
    examined: Examined

    @property
    def case(self) -> Case:
        return self.found.case

    @property
    def late(self) -> list[LateStep]:
        """All late steps in the rows."""
        return self.found.late

    def late_of(self, processes: Iterable[int]) -> list[LateStep]:
        """Late steps in the rows, including late steps that are in the history; without delays that happened once."""
        chosen = set(processes)
        return [
            one for one in self.late if one.process in chosen and (one.process, one.step) not in self.once
        ]

    def ts_ns(self, late: LateStep) -> int:
        """When a late step of these rows peaked, on its node's clock."""
        return int(self.case.line.rows["ts_ns"][late.peak_row])


def look(case: Case, known: Array, history: History) -> Look:
    """Diagnose the remaining rows, and name ranks from the history and these rows.

    known: the stream's step of each row, UNKNOWN for new rows.
    """
    limits = case.limits
    found = findings(case)
    shift = _shift(case, known, history)
    found = replace(
        found,
        late=_moved(found.late, shift),
        device={p: replace(one, late=_moved(one.late, shift)) for p, one in found.device.items()},
    )
    live = _unsettled(case, found.late, history)
    everything = [*history.late.late(_numbers(case)), *live]
    if history.late.of:
        named = _named(case, everything, limits)
        costly = {process: late for process, late in named.items() if not found.absorption.has(process)}
        found = replace(found, named=costly)
    unexplained = [
        one for one in found.late if one.process not in found.device and not found.absorption.has(one.process)
    ]
    uneven = moving(
        case.line, unexplained, found.named, table=case.judged, least_ns=case.pace.least_ns, limits=limits
    )
    if uneven is not None or not found.is_on_device:
        found = replace(found, uneven=uneven, is_on_device=False)
    least = limits.clear_factor * case.pace.least_ns
    large = frozenset(p for p, late in found.named.items() if _usual_ns(late) >= least)
    once = incidents(everything, found.named, limits)
    unlike = unique_delays(once, everything, named=found.named, node=_nodes(case, everything))
    firm = frozenset(_named(case, everything, replace(limits, chance=limits.chance / _LOOKS)))
    firm &= found.named.keys()
    steps = np.where(case.plan.step >= 0, case.plan.step + shift[case.line.process], UNKNOWN)
    return Look(
        found=found,
        step_of_row=steps,
        live=_grouped(live),
        device={p: _unsettled(case, one.late, history) for p, one in found.device.items()},
        once=frozenset((one.process, one.step) for one in once),
        alone=frozenset((one.process, one.step) for one in unlike),
        large=large,
        firm=firm | {process for process in large if is_alone(found.named[process], everything)},
        step=int(steps.max(initial=0)),
        examined=_seen(case, steps, history),
    )


def parts(
    seen: Look, tracks: Tracks, live: dict[int, list[LateStep]], *, only_since: bool
) -> dict[int, tuple[list[Delays], list[LateStep]]]:
    """By process of the case: the delays in its track, and its late steps that are still in the rows.

    only_since: without delays of closed incidents.
    """
    case = seen.case
    out: dict[int, tuple[list[Delays], list[LateStep]]] = {}
    for process in range(case.line.n_processes):
        track = tracks.of.get(case.who(process))
        mine = live.get(process, [])
        if track is None:
            kept: list[Delays] = []
        elif only_since:
            kept = [track.since] if track.since else []
            mine = [one for one in mine if seen.ts_ns(one) > track.over_ns]
        else:
            kept = track.all
        mine = [one for one in mine if (process, one.step) not in seen.once]
        again = track.recurred({step for p, step in seen.once if p == process}) if track else []
        if kept or mine or again:
            out[process] = [*again, *kept], mine
    return out


def summed(
    seen: Look, held: dict[int, tuple[list[Delays], list[LateStep]]], processes: Iterable[int]
) -> dict[int, Delays]:
    """The delays of some processes, from their tracks and from the rows."""
    chosen = [process for process in processes if process in held]
    live = [one for process in chosen for one in held[process][1]]
    fresh = delays_by_process(seen.case, live, among=seen.late_of(chosen))
    return {p: total([*held[p][0], *([fresh[p]] if p in fresh else [])]) for p in chosen}


def summed_device(
    seen: Look, held: dict[int, tuple[list[Delays], list[LateStep]]], process: int
) -> Delays | None:
    """The delays of a slow GPU, from its track and from the rows; None without any."""
    kept, late = held.get(process, ([], []))
    found = [*kept, *([device_delays(seen.case, process, late)] if late else [])]
    return total(found) if found else None


def is_alone(late: list[LateStep], everything: list[LateStep]) -> bool:
    """Whether no other process has had delays like these twice, in other steps."""
    steps, usual = {one.step for one in late}, _usual_ns(late)
    others = Counter(
        one.process for one in everything if one.step not in steps and one.excess_ns >= 0.5 * usual
    )
    return max((n for process, n in others.items() if process != late[0].process), default=0) < 2


def _usual_ns(late: list[LateStep]) -> float:
    return float(np.median([one.excess_ns for one in late]))


def _shift(case: Case, known: Array, history: History) -> Array:
    """Difference between the stream's steps and the steps of these rows, by process: int64 (p,).

    It is 0 until rows are dropped. Afterwards it is the median difference of the rows that have a step already, for
    each program separately, because each program has its own steps.
    """
    step, program = case.plan.step, case.plan.program
    if not history.is_trimmed:
        return np.zeros(case.line.n_processes, np.int64)
    both = (step >= 0) & (known >= 0)
    if not both.any():
        return np.full(case.line.n_processes, history.next_step)
    moved, of_row = known - step, program[case.line.process]
    usual = int(np.median(moved[both]))
    by_program = [
        int(np.median(moved[mine])) if (mine := both & (of_row == number)).any() else usual
        for number in range(int(program.max()) + 1)
    ]
    return np.array(by_program)[program]


def _moved(late: list[LateStep], shift: Array) -> list[LateStep]:
    return [replace(one, step=one.step + int(shift[one.process])) for one in late] if shift.any() else late


def _unsettled(case: Case, late: Iterable[LateStep], history: History) -> list[LateStep]:
    ts_ns = case.line.rows["ts_ns"]
    return [one for one in late if not history.is_settled(case.who(one.process), int(ts_ns[one.peak_row]))]


def _numbers(case: Case) -> dict[Who, int]:
    return {case.who(process): process for process in range(case.line.n_processes)}


def _named(case: Case, everything: list[LateStep], limits: Thresholds) -> dict[int, list[LateStep]]:
    """The processes to name, by their late steps of all time."""
    n_processes = max([case.line.n_processes, *(one.process + 1 for one in everything)])
    node = _nodes(case, everything)
    named = recurring(everything, n_processes, least_ns=case.pace.least_ns, limits=limits, node=node)
    return {process: late for process, late in named.items() if process < case.line.n_processes}


def _nodes(case: Case, everything: list[LateStep]) -> Array:
    """The node of each process, UNKNOWN for processes without rows."""
    n_processes = max([case.line.n_processes, *(one.process + 1 for one in everything)])
    node = np.full(n_processes, UNKNOWN)
    node[: case.line.n_processes] = case.line.node
    return node


def _grouped(late: list[LateStep]) -> dict[int, list[LateStep]]:
    out: dict[int, list[LateStep]] = {}
    for one in late:
        out.setdefault(one.process, []).append(one)
    return out


def _seen(case: Case, steps: Array, history: History) -> Examined:
    here = examined_totals(case)
    if not history.is_trimmed:
        return here
    rows = case.line.rows
    last = np.full(len(case.line.comm_hash), UNKNOWN)
    np.maximum.at(last, case.line.comm, rows["seq"])
    n_rounds = dict(here.n_rounds)
    for comm, seq in zip(case.line.comm_hash.tolist(), last.tolist(), strict=True):
        n_rounds[comm] = max(n_rounds.get(comm, 0), seq - history.first_seq.get(comm, seq) + 1)
    return Examined(
        n_steps=int(steps.max(initial=0)) - history.first_step + 1,
        observed_ns=history.gone_ns + here.observed_ns,
        n_rounds=n_rounds,
    )
