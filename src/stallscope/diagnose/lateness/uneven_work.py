"""Uneven work: a stage that is slow because it has more to do, and delays that move around."""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array

_CLEAR, _CLEAR_IN_MOST = 2.0, 1.5  # factors of the threshold, for delays in some steps and in most steps
_IN_MOST = 0.5  # share of the steps


@dataclass(frozen=True)
class SlowStage:
    """Processes of one program that work while the others wait for them in most steps.

    excess_ns: the excess of their self time per step over the other stages (median). wait_share: the share of a step
    that the others wait. n_steps: steps examined.
    """

    processes: Array
    excess_ns: float
    wait_share: float
    n_steps: int


@dataclass(frozen=True)
class MovingLateness:
    """Late steps that move between ranks."""

    late: tuple[LateStep, ...]


def slow_stage(
    timeline: Timeline,
    programs: Programs,
    table: Cells,
    *,
    step_ns: float,
    limits: Thresholds,
    wait_ns: Array | None = None,
    own_ns: Array | None = None,
) -> SlowStage | None:
    """The program whose ranks keep all others waiting, when there are several programs.

    wait_ns, own_ns: (n,) by row, the waits and the work; by default of the hosts, otherwise of the GPUs.
    """
    numbers = np.unique(programs.program)
    if len(numbers) < 2 or step_ns <= 0 or len(np.unique(programs.program[table.process])) < len(numbers):
        return None
    waits = _per_step(timeline, table, timeline.wait_ns if wait_ns is None else wait_ns)
    own = _per_step(timeline, table, timeline.self_ns if own_ns is None else own_ns)
    wait = {int(k): float(np.nanmedian(waits[programs.program == k])) for k in numbers}
    self_time = {int(k): float(np.nanmedian(own[programs.program == k])) for k in numbers}
    slow = max(self_time, key=lambda number: self_time[number])
    rest = [k for k in wait if k != slow]
    excess = self_time[slow] - float(np.median([self_time[k] for k in rest]))
    waited = float(np.median([wait[k] for k in rest])) - wait[slow]
    if min(excess, waited) < max(limits.imbalance_share * step_ns, limits.min_late_ns / 2):
        return None
    return SlowStage(
        processes=np.flatnonzero(programs.program == slow),
        excess_ns=excess,
        wait_share=waited / step_ns,
        n_steps=len(np.unique(table.step)),
    )


def moving(
    timeline: Timeline,
    late_steps: list[LateStep],
    named: dict[int, list[LateStep]],
    *,
    table: Cells,
    min_ns: float,
    limits: Thresholds,
) -> MovingLateness | None:
    """Late steps of ranks that were not named, if they are too many and too long to ignore."""
    unnamed = tuple(late for late in late_steps if late.process not in named)
    n_steps = len(np.unique(table.step))
    n_late = len({late.step for late in unnamed})
    if n_late < max(5, 0.05 * n_steps) or len({late.process for late in unnamed}) < 2:
        return None
    by_step: dict[int, float] = {}
    for late in unnamed:
        by_step[late.step] = max(by_step.get(late.step, 0.0), late.late_ns)
    size = float(np.median(list(by_step.values())))
    # Delays in most steps raise the noise threshold.
    is_clear = size >= (_CLEAR if n_late < _IN_MOST * n_steps else _CLEAR_IN_MOST) * min_ns
    begin, end = (
        timeline.ts_ns[timeline.first[table.process[0]]],
        timeline.ts_ns[timeline.first[table.process[0] + 1] - 1],
    )
    takes_much = sum(by_step.values()) >= limits.moving_time_share * float(end - begin)
    return MovingLateness(unnamed) if is_clear and takes_much else None


def with_more_work(
    named: dict[int, list[LateStep]],
    alone: list[int],
    *,
    n_processes: int,
    min_steps: int,
    limits: Thresholds,
) -> list[int]:
    """The processes of `alone` whose common cause is more work than the others have, rather than faulty machines.

    A faulty machine is rare. If many ranks are late in the same steps, and in few other steps, the common cause is
    their work: experts with more tokens, longer sequences.
    alone: named processes that do not form a whole node, since a whole node may be faulty. min_steps: number of steps
    in which they must be late together.
    """
    if len(alone) < max(limits.min_uneven, limits.uneven_share * n_processes):
        return []
    steps = [{late.step for late in named[process]} for process in alone]
    shared = set.intersection(*steps)
    is_together = len(shared) >= min_steps and all(
        len(shared) >= limits.steady_share * len(own) for own in steps
    )
    return alone if is_together else []


def _per_step(timeline: Timeline, table: Cells, value: Array) -> Array:
    """Median over the steps of each process's sum of a value: float64 (p,)."""
    return by_group(table.process, table.sums(value), timeline.n_processes, medians)
