"""How much longer the late steps of a job lasted than its others: what delays cost whoever waits for them, as seen on
the whole. Slack, in a pipeline or in the queue of a GPU, is in both alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.step_table import lengths_ns, touched
from stallscope.events.layout import Array

_FEWEST_QUIET = 3
_ERRORS = 2.0  # standard errors on either side; more where few steps tell how much they vary


@dataclass(frozen=True)
class Longer:
    """By how much some steps lasted longer, in all: from least_ns to most_ns."""

    least_ns: float
    most_ns: float


def longer_ns(case: Case, process: int, late: Sequence[LateStep], among: Sequence[LateStep]) -> Longer | None:
    """How much longer the late steps of a process, and those after them, lasted on it than those in which nobody was
    late. What others that were late in the same steps had a part in is not sure.

    among: all late steps, of whatever process. None where too few steps are there to compare with, and where hosts run
    ahead, which steps of the host say nothing of.
    """
    table, line = case.judged, case.line
    here = slice(*np.searchsorted(table.process, [process, process + 1]))
    step, length = table.step[here], lengths_ns(line, table, here).astype(np.float64)
    whole = ~line.is_first[table.first_row[here]]
    steps = np.array([one.step for one in late])
    everyones = np.append(steps, [one.step for one in among]).astype(np.int64)
    quiet, mine = whole & ~touched(step, everyones), touched(step, steps)
    n, n_quiet = int(np.count_nonzero(mine)), int(np.count_nonzero(quiet))
    runs_ahead = len(case.waits.released_ns) > 0 or not case.waits.in_each_step
    if n_quiet < _FEWEST_QUIET or not n or runs_ahead:
        return None
    usual = float(np.median(length[quiet]))
    spread = 1.4826 * float(np.median(np.abs(length[quiet] - usual)))
    error = spread * (n + n * n / n_quiet) ** 0.5 * (_ERRORS + 5.0 / (n_quiet - 1))
    grown = length[mine] - usual
    own = float((grown * _own_share(step[mine], process, among)).sum())
    return Longer(max(own - error, 0.0), max(float(grown.sum()) + error, 0.0))


def _own_share(step: Array, process: int, among: Sequence[LateStep]) -> Array:
    """What part a process has in the lateness of all in some steps and the ones before: float64 (k,)."""
    own: dict[int, float] = {}
    everyones: dict[int, float] = {}
    for one in among:
        for number in (one.step, one.step + 1):
            everyones[number] = everyones.get(number, 0.0) + one.late_ns
            if one.process == process:
                own[number] = own.get(number, 0.0) + one.late_ns
    return np.array([own.get(number, 0.0) / everyones.get(number, 1.0) for number in step.tolist()])
