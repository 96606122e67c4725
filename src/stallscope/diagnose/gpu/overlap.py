"""Whether GPUs work during collectives, as in a backward pass that overlaps with the reduction of its gradients.

Without overlap, a GPU's work before a collective begins at the end of the previous collective. With overlap, the work
begins at the start of the previous collective. The scatter of healthy GPUs shows the difference: a GPU that starts a
collective earlier than its peers waits longer in the collective. With overlap it is ahead at the next start by as much;
without overlap the time from the end to the next start does not depend on the wait. Slow drifts of a GPU's speed cancel
out, since successive steps are compared.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians, numbered, positions_in_run
from stallscope.diagnose.gpu.gpu_clock import GpuTime
from stallscope.diagnose.timeline.excess import medians_in_calls
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array

_BLOCKED_NS = 50_000
"""A start within this time after the end of the previous collective had to wait for that end."""
_FEWEST_PROCESSES = 4  # with fewer, the median of the others is not robust against one slow GPU
_FEWEST_SAMPLES = 8
_FEW_COMPARED = 0.2  # share of a GPU's work up to which the compared part does not show how slow it is
_SURE = 0.1  # share of the work before a call up to which its bounds may differ
_SLOPE = 0.7  # share of a longer wait by which the next work is shorter: 1 with overlap, 0 without


@dataclass(frozen=True)
class OverlappedWork:
    """Work of GPUs in steps with work during collectives: float64 (c,) each, by cell; 0 in other steps.

    own_ns: all work. compared_ns: its part that peers did without waiting for a collective, and that the error of the
    GPU's clock does not hide. excess_ns: of that part beyond the peers' median. peak_ns: the largest excess since the
    step began, before any of its calls: peers that wait for the GPU in the step are then as late as the GPU.
    """

    own_ns: Array
    compared_ns: Array
    excess_ns: Array
    peak_ns: Array

    def late_ns(self, cells: Array) -> Array:
        """How much longer a GPU worked in some of its steps: float64 (k,), NaN where that is unknown.

        Peers that wait for a slow GPU run out of work: their last starts of a step are the ends of earlier collectives,
        and do not show how long their own work took. The GPU is taken to be as slow in that work as in the rest.
        """
        compared, own = float(self.compared_ns[cells].sum()), float(self.own_ns[cells].sum())
        if compared <= _FEW_COMPARED * own:
            return np.full(len(cells), np.nan)
        share = float(self.excess_ns[cells].sum()) / compared
        return np.asarray(np.where(self.own_ns[cells] > 0, max(share, 0.0) * self.own_ns[cells], np.nan))

    @property
    def late_in_step_ns(self) -> Array:
        """How much longer each GPU worked in each step, by that step alone: float64 (c,), NaN where unknown."""
        share = np.divide(
            self.peak_ns,
            self.compared_ns,
            out=np.full(len(self.own_ns), np.nan),
            where=self.compared_ns > 0,
        )
        return np.asarray(share * self.own_ns)


def overlapped_work(timeline: Timeline, programs: Programs, table: Cells, times: GpuTime) -> OverlappedWork:
    """The work of GPUs in steps with work during collectives."""
    start_ns, end_ns = timeline.rows["gpu_start_ns"], timeline.rows["gpu_end_ns"]
    known, own, blocked = times.known, times.own_ns.copy(), np.zeros(len(times.known))
    rows = np.flatnonzero(overlaps(timeline, programs, known))
    if not len(rows):
        return OverlappedWork(*np.zeros((4, len(table.step))))
    own[rows] = start_ns[rows] - start_ns[rows - 1]
    blocked[rows] = start_ns[rows] - end_ns[rows - 1] <= _BLOCKED_NS
    are_free = known & (medians_in_calls(programs, blocked, np.arange(len(known))) < 0.5)
    # Where peers waited in between, their work until a later start without a wait is known in sum.
    cell = np.maximum(np.searchsorted(table.first_row, np.arange(len(known)), side="right") - 1, 0)
    last = np.full(len(table.step), -1)
    np.maximum.at(last, cell[are_free], np.flatnonzero(are_free))
    is_compared = known & (np.arange(len(known)) <= last[cell])
    is_sure = times.max_ns - times.min_ns <= _SURE * times.max_ns
    is_sure[rows] = True  # from start to start, by the GPU's clock alone
    is_compared &= is_sure
    excess = np.nan_to_num(programs.calls.beyond_others(own, known), nan=0.0)
    is_in = np.bincount(cell[rows], minlength=len(table.step)) > 0
    compared, excess = (np.where(is_compared, value, 0.0) for value in (own, excess))
    sums = (table.sums(own), table.sums(compared), table.sums(excess), _peaks(excess, table))
    return OverlappedWork(*(np.where(is_in, value, 0.0) for value in sums))


def _peaks(value: Array, table: Cells) -> Array:
    """The largest sum of a value (n,) from the first row of each cell on, at least 0: float64 (c,)."""
    total = np.append(0.0, np.cumsum(value))
    ends = np.stack([table.first_row, table.end_row], axis=1).ravel()
    largest = np.maximum.reduceat(np.append(total, total[-1]), ends + 1)[::2]
    return np.asarray(np.maximum(largest - total[table.first_row], 0.0))


def overlaps(timeline: Timeline, programs: Programs, known: Array) -> Array:
    """Whether a row's work on the GPU began at the start of the process's previous collective: bool (n,).

    known: bool (n,), rows whose times, and the times of the row before, are known.
    """
    inside = known.copy()
    inside[1:] &= (
        (programs.step[1:] == programs.step[:-1]) & (programs.step[1:] >= 0) & ~timeline.is_first[1:]
    )
    rows = np.flatnonzero(inside)
    start_ns, end_ns = timeline.rows["gpu_start_ns"], timeline.rows["gpu_end_ns"]
    gap, held = np.zeros((2, len(known)))
    gap[rows] = start_ns[rows] - end_ns[rows - 1]
    held[rows] = end_ns[rows - 1] - start_ns[rows - 1]
    is_free = inside & (gap > _BLOCKED_NS)
    is_free[1:] &= ~inside[:-1] | (gap[:-1] > _BLOCKED_NS)
    return inside & _at_positions(timeline, programs, is_free, gap=gap, held=held)


def _at_positions(
    timeline: Timeline, programs: Programs, is_free: Array, *, gap: Array, held: Array
) -> Array:
    """Whether the work before each row overlaps with the previous collective, by its position in the step: bool (n,).

    A position with too few samples is like most positions of its program.
    """
    wait, work = (programs.calls.beyond_others(value, is_free) for value in (held, gap))
    positions = positions_in_run(programs.step, timeline.process)
    rows = np.flatnonzero(is_free & np.isfinite(wait) & np.isfinite(work))
    own, n_own = numbered(timeline.process[rows], positions[rows])
    order = np.lexsort((programs.step[rows], own))
    rows, own = rows[order], own[order]
    pairs = np.flatnonzero((np.diff(own) == 0) & (np.diff(programs.step[rows]) == 1))
    longer, shorter = np.diff(wait[rows])[pairs], -np.diff(work[rows])[pairs]
    n, both, alone = (
        np.bincount(own[pairs], weights=each, minlength=n_own)
        for each in (np.ones(len(pairs)), longer * shorter, longer * longer)
    )
    first_row = rows[np.searchsorted(own, np.arange(n_own))] if len(rows) else rows
    is_known = (n >= _FEWEST_SAMPLES) & (alone > 0)
    slope, first_row = both[is_known] / alone[is_known], first_row[is_known]
    program, n_programs = programs.program[timeline.process], len(programs.has_steps)
    position, n_positions = numbered(program, positions)
    in_program = _median_slopes(program[first_row], slope, n_programs)[program]
    at_position = _median_slopes(position[first_row], slope, n_positions)[position]
    return np.asarray(np.where(np.isnan(at_position), in_program, at_position) >= _SLOPE)


def _median_slopes(group: Array, slope: Array, n_groups: int) -> Array:
    """The median of the slopes of each group, NaN for groups with too few: float64 (n_groups,)."""
    n = np.bincount(group, minlength=n_groups)
    return np.where(n >= _FEWEST_PROCESSES, by_group(group, slope, n_groups, medians), np.nan)
