"""Steps in which all ranks pause, as for a checkpoint or a validation: their length and the differences of ranks.

In such steps each rank does rare and long work. Ranks differ far more in them than in other steps, and by factors
rather than by a number of milliseconds.
"""

from math import erfc, log1p, sqrt

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, median_of_others, medians, numbered
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.events.layout import Array

_LARGE_PROGRAM = 4  # processes of which a quarter may be slow without raising the lower quartile
_SIMILAR = 0.5  # pauses shorter than this share of another pause are of another kind
_FEW = 3  # fewer times of other ranks in pauses do not show how ranks differ
_RARER = 15  # factor below `chance` for a delay that is reported after a single evaluation


def shared_pause_ns(table: Cells, min_ns: float, program: Array) -> Array:
    """By cell: the extra self time that all ranks had in that step; 0 without such a pause.

    Checkpoints and validations are such steps: ranks differ in them by nature. All ranks are compared, and the ranks of
    each program as well, since the steps of two programs may have different numbers. A pause of one program for which
    the others wait is a delay. Where a rank counts its steps from another call, it pauses one step earlier or later
    than the others. program: int64 (p,), see Programs.
    """
    shared = _pause_ns(table, np.zeros_like(program))
    is_large = np.bincount(program) >= _LARGE_PROGRAM
    if len(is_large) > 1 and is_large.any():
        alone = _pause_ns(table, program) * is_large[program[table.process]]
        alone[_keeps_waiting(table, alone, program)] = 0.0
        shared = np.maximum(shared, alone)
    shared = np.where(shared >= min_ns, shared, 0.0)
    return np.maximum(shared, _one_step_apart(table, shared)) if shared.any() else shared


def _one_step_apart(table: Cells, shared_ns: Array) -> Array:
    """By cell: the pause of the step before or after, if the process did not pause there but here; otherwise 0."""
    out = np.zeros(len(shared_ns))
    width = int(table.step.max(initial=0)) + 3
    key = table.process.astype(np.int64) * width + table.step + 1
    order = np.argsort(key, kind="stable")
    for apart in (-1, 1):
        at = np.minimum(np.searchsorted(key, key + apart, sorter=order), len(key) - 1)
        other = order[at]
        pause_ns = np.where(key[other] == key + apart, shared_ns[other], 0.0)
        is_here = (table.self_ns[other] < _SIMILAR * pause_ns) & (table.self_ns >= _SIMILAR * pause_ns)
        out = np.maximum(out, np.where(is_here, pause_ns, 0.0))
    return out


def _pause_ns(table: Cells, group: Array) -> Array:
    """By cell: the extra self time of the processes of its group in that step, if they took at least twice as long.

    group: int64 (p,). The lower quartile of the ranks is compared, which a slow rank does not raise.
    """
    number, n_numbers = numbered(group[table.process], table.step)
    typical = by_group(number, table.self_ns, n_numbers, _lower_quartiles)
    of_group = np.zeros(n_numbers, np.int64)
    of_group[number] = group[table.process]
    usual = by_group(of_group, typical, int(group.max(initial=0)) + 1, medians)[of_group]
    return np.where(typical >= 2 * usual, typical - usual, 0.0)[number]


def _keeps_waiting(table: Cells, pause_ns: Array, program: Array) -> Array:
    """Whether the ranks of the other programs wait for a pause of one program, in its step or the next: bool (c,).

    Ranks that pause themselves, in a step of about that number, wait for the last of their own program.
    """
    out = np.zeros(len(pause_ns), bool)
    of_cell = program[table.process]
    n_steps = int(table.step.max(initial=0)) + 2
    for number in np.unique(of_cell[pause_ns > 0]).tolist():
        others, own = of_cell != number, np.flatnonzero((of_cell == number) & (pause_ns > 0))
        if not others.any():
            continue
        waited, worked = (
            _longer(table.step[others], ns[others], n_steps) for ns in (table.wait_ns, table.self_ns)
        )
        step = table.step[own]
        out[own] = np.maximum(waited[step], waited[step + 1]) >= _SIMILAR * pause_ns[own]
        near = [worked[np.maximum(step + apart, 0)] for apart in (-1, 0, 1)]
        out[own] &= np.max(near, axis=0) < _SIMILAR * pause_ns[own]
    return out


def _longer(step: Array, ns: Array, n_steps: int) -> Array:
    """By step: by how much the median of some cells is longer than in the typical step; 0 without cells."""
    of_steps = by_group(step, ns, n_steps, medians)
    return np.asarray(np.nan_to_num(of_steps - np.nanmedian(of_steps), nan=0.0))


def _lower_quartiles(values: Array) -> Array:
    """The lower quartile of each row, without interpolation."""
    index = (values.shape[1] - 1) // 4
    return np.asarray(np.partition(values, index, axis=1)[:, index])


def is_usual_in_pauses(table: Cells, pause_ns: Array, late: Array, *, limits: Thresholds) -> Array:
    """Whether each of some late cells is within the variation of the other ranks in pauses: bool (k,).

    late: cells, int64 (k,). pause_ns: see shared_pause_ns(). The times of all ranks in all pauses are compared by their
    logarithms, each against the others in its step; too few times are not evidence of a delay.
    """
    out = np.zeros(len(late), bool)
    at = np.flatnonzero(pause_ns[late] > 0)
    if not len(at):
        return out
    pausing = np.flatnonzero(pause_ns > 0)
    process, step = table.process[pausing], table.step[pausing]
    own = np.log(np.maximum(table.self_ns[pausing], 1.0))
    relative = own - median_of_others(step, own)
    for i in at.tolist():
        of_others = (process != table.process[late[i]]) & np.isfinite(relative)
        of_others &= pause_ns[pausing] >= _SIMILAR * pause_ns[late[i]]
        elsewhere = of_others & (step != table.step[late[i]])
        known = elsewhere if np.count_nonzero(elsewhere) >= _FEW else of_others
        out[i] = not _is_outlier(relative[np.searchsorted(pausing, late[i])], relative[known], limits)
    return out


def _is_outlier(value: float, others: Array, limits: Thresholds) -> bool:
    """Whether a value is further above the others than chance allows, if all came from one normal distribution."""
    n = len(others)
    if n < _FEW:
        return False
    spread = max(float(np.std(others, ddof=1)), 1e-9)
    apart = (value - float(others.mean())) / (spread * sqrt(1 + 1 / n))
    return apart > 0 and _student_tail(apart, n - 1) <= limits.chance / _RARER / (n + 1)


def _student_tail(t: float, degrees: int) -> float:
    """The chance of more than t by Student's law, through the normal one: Wallace, Ann. Math. Statist. 30 (1959)."""
    z = sqrt(degrees * log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    return 0.5 * erfc(z / sqrt(2))
