"""What a late rank cost the others: for each victim the union, in time, of the intervals it waited.

A late step shows in every round of the step; the sum over the rounds would count one delay many times. Lateness
that the victims did not wait for was absorbed and costs nothing.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.blame import LateStep
from stallscope.diagnose.rounds import Rounds
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import Array


@dataclass(frozen=True)
class Cost:
    """lost_ns: float64 (p,) by process, time it was kept waiting. is_lower_bound: something could not be counted."""

    lost_ns: Array
    is_lower_bound: bool


def union_ns(group: Array, begin_ns: Array, end_ns: Array, *, n_groups: int) -> Array:
    """Length of the union of the intervals of each group: float64 (n_groups,).

    group: int64 (n,). begin_ns, end_ns: int64 (n,); empty and negative intervals count nothing.
    """
    real = end_ns > begin_ns
    group, begin_ns, end_ns = group[real], begin_ns[real], end_ns[real]
    out = np.zeros(n_groups)
    if not len(group):
        return out
    order = np.lexsort((begin_ns, group))
    group, begin_ns, end_ns = group[order], begin_ns[order], end_ns[order]
    # One running maximum for all groups: each group is moved behind the one before it.
    base = begin_ns.min()
    span = int(end_ns.max() - base) + 1
    shifted_end = end_ns - base + group * span
    reached = np.maximum.accumulate(shifted_end)
    before = np.concatenate([[np.iinfo(np.int64).min], reached[:-1]])
    np.add.at(out, group, shifted_end - np.clip(before, begin_ns - base + group * span, shifted_end))
    return out


def cost(
    line: Timeline,
    met: Rounds,
    arrival_ns: Array,
    *,
    late: list[LateStep],
    step_ns: float,
    limits: Thresholds,
) -> Cost:
    """What these late steps of one process cost every other one.

    step_ns: the usual step, as far as a delay is looked for behind its peak.
    """
    lost = np.zeros(line.n_processes)
    by_round = np.argsort(met.round, kind="stable")
    round_start = np.searchsorted(met.round[by_round], np.arange(met.n_rounds + 1))
    first_row = np.searchsorted(line.process, np.arange(line.n_processes + 1))
    job_waits = _share_of_steps_with_waits(line)
    for one in late:
        direct = _waited_for(line, met, arrival_ns, one=one, by_round=by_round, round_start=round_start)
        begin, end = arrival_ns[one.peak_row] - one.late_ns, arrival_ns[one.peak_row] + step_ns
        waited = _waits_between(line, arrival_ns, first_row, begin_ns=begin, end_ns=end)
        own = waited[one.process]
        indirect = np.clip(waited - own, 0, one.late_ns)
        absorbed = (waited < limits.absorbed_share * direct) & job_waits
        each = np.where(direct > 0, np.where(absorbed, waited, direct), indirect)
        if not job_waits:
            each = _delayed(line, arrival_ns, first_row, one=one, step_ns=step_ns)
        each[one.process] = 0
        lost += each
    return Cost(lost, is_lower_bound=bool(line.is_p2p.any()) or not job_waits)


def _waited_for(
    line: Timeline, met: Rounds, arrival_ns: Array, *, one: LateStep, by_round: Array, round_start: Array
) -> Array:
    """Time each process that shares a late round of the step sat between its arrival and the late one's."""
    own = np.arange(one.first_row, one.first_row + 1)
    last = one.first_row
    while last + 1 < len(line.rows) and line.process[last + 1] == one.process and last < one.peak_row:
        last += 1
    own = np.arange(one.first_row, last + 1)
    own = own[np.nan_to_num(met.late_ns[own], nan=0.0) >= 0.5 * one.late_ns]
    rows = [by_round[round_start[r] : round_start[r + 1]] for r in met.round[own].tolist()]
    counts = [len(part) for part in rows]
    if not rows:
        return np.zeros(line.n_processes)
    others = np.concatenate(rows)
    until = np.repeat(arrival_ns[own], counts)
    return union_ns(line.process[others], arrival_ns[others], until, n_groups=line.n_processes)


def _waits_between(
    line: Timeline, arrival_ns: Array, first_row: Array, *, begin_ns: float, end_ns: float
) -> Array:
    """Time in calls that wait for the GPU, in the intervals that end within a window or are the first after it."""
    out = np.zeros(line.n_processes)
    for process in range(line.n_processes):
        a, b = int(first_row[process]), int(first_row[process + 1])
        i = a + int(np.searchsorted(arrival_ns[a:b], begin_ns, side="right"))
        j = min(a + int(np.searchsorted(arrival_ns[a:b], end_ns, side="left")) + 1, b)
        out[process] = float((line.interval_ns - line.host_ns)[i:j].sum())
    return out


def _share_of_steps_with_waits(line: Timeline) -> bool:
    """Whether the job waits regularly: at least one interval in fifty holds a real wait, on most processes."""
    waits = line.interval_ns - line.host_ns > 10_000
    each = np.bincount(line.process, weights=waits, minlength=line.n_processes)
    rows = np.bincount(line.process, minlength=line.n_processes)
    return bool(np.median(each / np.maximum(rows, 1)) >= 0.02)


def _delayed(line: Timeline, arrival_ns: Array, first_row: Array, *, one: LateStep, step_ns: float) -> Array:
    """For jobs that run ahead: how much longer than usual each process took for its next ten steps' calls."""
    out = np.zeros(line.n_processes)
    begin, window = arrival_ns[one.peak_row] - one.late_ns, 10 * step_ns + one.late_ns
    for process in range(line.n_processes):
        a, b = int(first_row[process]), int(first_row[process + 1])
        times = arrival_ns[a:b]
        i, j = np.searchsorted(times, [begin, begin + window])
        if j - i < 2 or b - a < 20:
            continue
        usual = float(np.median(np.diff(times))) if step_ns <= 0 else (times[-1] - times[0]) / (b - a - 1)
        out[process] = min(max(float(times[j - 1] - times[i]) - usual * (j - i - 1), 0.0), one.late_ns)
    return out
