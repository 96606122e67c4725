"""Late steps in jobs whose ranks have uneven work: a rank that was blocked, in steps that vary more than the delay.

Uneven work (rollouts, sequence lengths) varies the time on the CPU and the waits for the GPU. The time in which a host
was blocked (a lock, a disk, the network, an allocation, sleep) hardly varies, so its excess over the peers shows
smaller delays.
"""

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group
from stallscope.diagnose.lateness.late_steps import LateStep, Pace, spread
from stallscope.diagnose.lateness.pauses import shared_pause_ns
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.excess import excess_ns
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import Category

_BLOCKED = (
    *(Category.LOCK, Category.OTHER_OFF, Category.SLEEP, Category.NET, Category.CHILD, Category.STOPPED),
    *(Category.PREEMPTED, Category.FAULT, Category.DRIVER, Category.IO, Category.ALLOC),
)
_UNEVEN = 1.5  # times the other thresholds from which the variation of the steps hides delays


def blocked_steps(
    timeline: Timeline,
    programs: Programs,
    table: Cells,
    *,
    usual: Pace,
    known: list[LateStep],
    limits: Thresholds,
) -> list[LateStep]:
    """The late steps, in addition to the known, in which a rank arrived late because its host was blocked.

    Empty unless the variation of the steps determines the threshold of a late step.
    """
    min_ns = max(limits.min_late_ns, limits.late_step_share * usual.step_ns)
    if usual.min_ns < _UNEVEN * min_ns or not len(table.step):
        return []
    blocked_ns = table.sums(excess_ns(timeline, programs, _blocked_ns(timeline)))
    noise_ns = float(np.median(by_group(table.process, blocked_ns, timeline.n_processes, spread)))
    is_late = blocked_ns >= max(min_ns, limits.noise_factor * noise_ns)
    is_late &= table.rise_ns >= limits.source_share * blocked_ns
    is_late &= table.excess_ns >= limits.source_share * blocked_ns
    is_late &= shared_pause_ns(table, usual.min_ns, programs.program) == 0
    counted = {(late.process, late.step) for late in known}
    return [
        _late(table, i, float(blocked_ns[i]))
        for i in np.flatnonzero(is_late).tolist()
        if (int(table.process[i]), int(table.step[i])) not in counted
    ]


def _blocked_ns(timeline: Timeline) -> Array:
    """The time before each row in which its host was blocked: int64 (n,), 0 before the first row of a process."""
    rows = np.arange(len(timeline.rows))
    total = sum(
        timeline.rows.column("ledger_ns", rows, category - 1).astype(np.int64) for category in _BLOCKED
    )
    return np.where(timeline.is_first[: len(rows)], 0, np.diff(total, prepend=0))


def _late(table: Cells, i: int, blocked_ns: float) -> LateStep:
    return LateStep(
        process=int(table.process[i]),
        step=int(table.step[i]),
        first_row=int(table.first_row[i]),
        peak_row=int(table.peak_row[i]),
        late_ns=float(table.rise_ns[i]),
        excess_ns=blocked_ns,
        n_rounds=1,
    )
