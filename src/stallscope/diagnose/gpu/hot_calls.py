"""Distinguishes a slow GPU from a GPU with more work in some of its calls, as with a hot expert.

A slow GPU needs longer before every call of a step. A GPU with more work needs as long as its peers before the other
calls, and the work moves to other GPUs after some steps. Memory-bound kernels do not depend on the clock of a GPU, so
calls alone do not decide: the other GPUs must have uneven work as well.
"""

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians, numbered, positions_in_run
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array

_NO_EXCESS = 0.2  # share of the typical excess below which the work before a call is as long as on other GPUs
_MIN_SHARE = 0.25  # share of the GPU's time before such calls from which it is not slow
_SHORT = 0.02  # share of a step from which the work before a call counts


def has_hot_calls(
    timeline: Timeline, programs: Programs, process: int, steps: Array, *, own_ns: Array, excess_ns: Array
) -> bool:
    """Whether a GPU works longer than its peers before some calls of these steps only.

    own_ns, excess_ns: float64 (n,) by row, its work before each call, and the part beyond its peers' work.
    """
    rows = np.flatnonzero((timeline.process == process) & np.isin(programs.step, steps) & (own_ns > 0))
    if not len(rows):
        return False
    position, n_positions = numbered(positions_in_run(programs.step, timeline.process)[rows])
    own, more = (by_group(position, each[rows], n_positions, medians) for each in (own_ns, excess_ns))
    usual = np.maximum(own - more, 0.0)
    counts = usual >= _SHORT * usual.sum()
    typical = float(more[counts].sum()) / max(float(usual[counts].sum()), 1.0)
    is_even = counts & (more < _NO_EXCESS * typical * usual)
    return bool(usual[is_even].sum() >= _MIN_SHARE * usual[counts].sum() > 0)
