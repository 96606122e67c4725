"""Late steps in jobs whose ranks have uneven work: a delay of a host, in steps that vary more than the delay.

Uneven work (rollouts, sequence lengths) varies the waits for the GPU and the time in which a host launches work. The
time in which a host was blocked (a lock, a disk, the network, an allocation, sleep) hardly varies, and neither does the
other time of a host beyond its launches. So their excess over the peers shows smaller delays.
"""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians
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
_MANY_LAUNCHES = 0.75  # quantile of the differences in launches from which their cost is measured


def with_host_delays(
    timeline: Timeline,
    programs: Programs,
    table: Cells,
    *,
    usual: Pace,
    known: list[LateStep],
    limits: Thresholds,
) -> list[LateStep]:
    """The known late steps, and further steps in which a rank arrived late because of a delay of its host.

    Known steps with such a delay get the threshold of these delays. Only the known steps unless the variation of the
    steps determines the threshold of a late step.
    """
    min_ns = max(limits.min_late_ns, limits.late_step_share * usual.step_ns)
    if usual.min_ns < _UNEVEN * min_ns or not len(table.step):
        return known
    has_pause = shared_pause_ns(table, usual.min_ns, programs.program) > 0
    delays: dict[tuple[int, int], LateStep] = {}
    for delay_ns in (_blocked_ns(timeline, programs, table), _beyond_launches_ns(timeline, programs, table)):
        threshold_ns = max(min_ns, limits.noise_factor * _noise_ns(table, delay_ns, timeline.n_processes))
        is_late = (delay_ns >= threshold_ns) & ~has_pause
        is_late &= table.rise_ns >= limits.source_share * delay_ns
        is_late &= table.excess_ns >= limits.source_share * delay_ns
        for i in np.flatnonzero(is_late).tolist():
            late = _late(table, i, float(delay_ns[i]), threshold_ns)
            delays.setdefault((late.process, late.step), late)
    kept = [
        late if other is None or late.is_held else replace(late, threshold_ns=other.threshold_ns)
        for late in known
        for other in [delays.pop((late.process, late.step), None)]
    ]
    return kept + list(delays.values())


def _noise_ns(table: Cells, delay_ns: Array, n_processes: int) -> float:
    """The variation of a delay from step to step, or between the ranks if it is larger (robust deviations)."""
    in_steps = by_group(table.process, delay_ns, n_processes, spread)
    of_ranks = by_group(table.process, delay_ns, n_processes, medians)
    known = np.isfinite(of_ranks)
    return max(float(np.median(in_steps[known])), float(spread(of_ranks[known][None])[0]))


def _beyond_launches_ns(timeline: Timeline, programs: Programs, table: Cells) -> Array:
    """By how much a host's time in each cell exceeds its peers' beyond the cost of its additional launches: (c,)."""
    more_ns = table.sums(excess_ns(timeline, programs, timeline.host_ns))
    n_more = table.sums(excess_ns(timeline, programs, _grown(timeline, "n_launches")))
    apart = np.abs(n_more)
    many = apart >= max(float(np.quantile(apart, _MANY_LAUNCHES)), 1.0)
    cost_ns = max(float(np.median(more_ns[many] / n_more[many])), 0.0) if many.any() else 0.0
    return np.asarray(more_ns - cost_ns * n_more)


def _blocked_ns(timeline: Timeline, programs: Programs, table: Cells) -> Array:
    """By how much longer each process was blocked in each cell than its peers: float64 (c,)."""
    spent = sum(_grown(timeline, "ledger_ns", category - 1) for category in _BLOCKED)
    return table.sums(excess_ns(timeline, programs, np.asarray(spent)))


def _grown(timeline: Timeline, name: str, k: int | None = None) -> Array:
    """The growth of a column in the interval before each row: int64 (n,), 0 before the first row of a process."""
    rows = np.arange(len(timeline.rows))
    total = timeline.rows.column(name, rows, k).astype(np.int64)
    return np.where(timeline.is_first[: len(rows)], 0, np.diff(total, prepend=0))


def _late(table: Cells, i: int, delay_ns: float, threshold_ns: float) -> LateStep:
    return LateStep(
        process=int(table.process[i]),
        step=int(table.step[i]),
        first_row=int(table.first_row[i]),
        peak_row=int(table.peak_row[i]),
        late_ns=float(table.rise_ns[i]),
        excess_ns=delay_ns,
        n_rounds=1,
        threshold_ns=threshold_ns,
    )
