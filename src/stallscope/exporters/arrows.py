"""Arrows from a culprit's late arrival to the moments at which the waiting ranks were released."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose import Verdict
from stallscope.events.layout import UNKNOWN, Array
from stallscope.exporters.trace_context import TraceContext

_MIN_LATE_NS = 1_000_000
"""Smaller delays get no arrow: the ranks of a healthy job differ by as much."""


@dataclass(frozen=True)
class Waits:
    """The finished waits of one process, sorted, on the common clock: int64 (n,) each."""

    enter_ns: Array
    leave_ns: Array

    def around(self, at_ns: int) -> int:
        """The index of the wait that contains a moment; -1 for none."""
        i = int(np.searchsorted(self.leave_ns, at_ns, side="left"))
        return i if i < len(self.leave_ns) and self.enter_ns[i] <= at_ns else UNKNOWN


@dataclass(frozen=True)
class Arrows:
    """Numbers of arrows, from 1. from_row: by row of the timeline; to_wait: by (process, index of the wait)."""

    from_row: dict[int, tuple[int, ...]] = field(default_factory=dict)
    to_wait: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


def waits(context: TraceContext, process: int) -> Waits:
    """The waits recorded with the arrivals of a process."""
    rows = context.timeline.rows[context.timeline.process == process]
    pairs = np.unique(rows[rows["wait_leave_ns"] > 0][["wait_enter_ns", "wait_leave_ns"]])
    node = int(context.timeline.node[process])
    enter, leave = (context.common_ns(node, pairs[name]) for name in ("wait_enter_ns", "wait_leave_ns"))
    known = (pairs["wait_enter_ns"] > 0) & (leave >= enter)
    order = np.argsort(leave[known], kind="stable")
    return Waits(enter[known][order], leave[known][order])


def arrows(context: TraceContext, verdicts: list[Verdict]) -> Arrows:
    """The arrows of the late rounds of the ranks in the verdicts: one per wait, from the rank that ended it."""
    timeline, matched = context.timeline, context.matched
    ranks = {
        rank for verdict in verdicts if verdict.kind in ("straggler", "device") for rank in verdict.ranks
    }
    culprits = np.flatnonzero(np.isin(timeline.rank, sorted(ranks)))
    arrival_ns = context.clocks.arrival_ns
    late = np.isin(timeline.process, culprits) & (np.nan_to_num(matched.late_ns) >= _MIN_LATE_NS)
    late &= arrival_ns == matched.last_ns[matched.round]
    by_round = np.argsort(matched.round, kind="stable")
    start = np.searchsorted(matched.round[by_round], np.arange(matched.n_rounds + 1))
    of_process = {process: waits(context, process) for process in range(timeline.n_processes)}
    from_row: defaultdict[int, list[int]] = defaultdict(list)
    to_wait: dict[tuple[int, int], tuple[int, ...]] = {}
    for row in sorted(np.flatnonzero(late).tolist(), key=lambda row: (int(arrival_ns[row]), row)):
        others = by_round[start[matched.round[row]] : start[matched.round[row] + 1]]
        for process in timeline.process[others].tolist():
            wait = (
                of_process[process].around(int(arrival_ns[row]))
                if process != timeline.process[row]
                else UNKNOWN
            )
            if wait != UNKNOWN and (process, wait) not in to_wait:
                number = len(to_wait) + 1
                from_row[row].append(number)
                to_wait[process, wait] = (number,)
    return Arrows({row: tuple(numbers) for row, numbers in from_row.items()}, to_wait)
