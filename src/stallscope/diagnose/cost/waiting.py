"""The cost of a late rank: for each victim, its additional waiting time because of that rank.

A late step shows in every round of the step, so the sum over the rounds would count a delay many times. Without the
late rank, victims would have waited for the next rank that is late because of its own time. Lateness without a wait was
absorbed and costs nothing. A GPU with enqueued work may absorb a delay as well (see absorbed).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from stallscope.diagnose.arrays.grouping import order_of
from stallscope.diagnose.arrays.row_ranges import rows_of
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.rounds import Rounds
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import NO_WAIT_NS, Timeline
from stallscope.events.layout import UNKNOWN, Array

_SHORT_WAIT = 0.05  # nor are calls below this share of a step, such as copies of the input
_RUNS_AHEAD_STEPS = 2
_FEWEST_WAITS = 3
_TIGHT = 0.1  # quantile of the upper bounds that counts as the tightest bound
_ROWS_ASIDE = 3  # rows by which a process may be off the others before a full search
_ROWS_NEARBY = 2 * _ROWS_ASIDE + 2
_WAITS_AT_ONCE = 1 << 15  # rows of late rounds per operation: their values fit the processor's cache


@dataclass(frozen=True)
class Cost:
    """float64 (p,) by process, the time it was kept waiting: lost_ns at most, min_ns at least."""

    lost_ns: Array
    min_ns: Array


def longest_ns(group: Array, begin_ns: Array, end_ns: Array, *, n_groups: int) -> Array:
    """The longest interval of each run of intervals that overlap, summed by group: float64 (n_groups,).

    A process that enters the next round before the late process has entered this round was not held up in between.
    group: int64 (n,). begin_ns, end_ns: int64 (n,); empty and negative intervals do not count.
    """
    real = end_ns > begin_ns
    group, begin_ns, end_ns = group[real], begin_ns[real], end_ns[real]
    if not len(group):
        return np.zeros(n_groups)
    if not ((group[1:] > group[:-1]) | ((group[1:] == group[:-1]) & (begin_ns[1:] >= begin_ns[:-1]))).all():
        order = np.lexsort((begin_ns, group))
        group, begin_ns, end_ns = group[order], begin_ns[order], end_ns[order]
    # A single running maximum covers all groups: each group is shifted behind the previous group.
    base = begin_ns.min()
    shift = group * (int(end_ns.max() - base) + 1) - base
    reached = np.maximum.accumulate(end_ns + shift)
    run = np.flatnonzero(np.append(True, (begin_ns + shift)[1:] >= reached[:-1]))
    longest = np.maximum.reduceat(end_ns - begin_ns, run)
    return np.bincount(group[run], weights=longest, minlength=n_groups)


@dataclass(frozen=True)
class Waits:
    """The input of every process's cost. released_ns: see _releases(); released_in: the step after each release.
    in_each_step: whether the job waits in most steps.
    """

    row_index: "_RowIndex"
    released_ns: Array
    released_in: Array
    in_each_step: bool

    @staticmethod
    def of(
        timeline: Timeline, arrival_ns: Array, *, step: Array, step_ns: float, first_step: int = 0
    ) -> "Waits":
        """step: int64 (n,), the step of each row, see programs. step_ns: the median step. first_step: earlier steps
        are warm-up, and stretches with such steps are left out.
        """
        row_index = _RowIndex.of(timeline, arrival_ns)
        released_ns, released_in = _releases(timeline, arrival_ns, row_index, step=step, step_ns=step_ns)
        is_warm = released_in >= first_step
        if np.count_nonzero(is_warm) >= _FEWEST_WAITS:
            released_ns, released_in = released_ns[is_warm], released_in[is_warm]
        return Waits(row_index, released_ns, released_in, _waits_regularly(timeline))

    @cached_property
    def between_releases_ns(self) -> Array:
        """The time each process waited between two releases: float64 (k - 1, p)."""
        ends = [self.row_index.at(moment, "right") + 1 for moment in self.released_ns.tolist()]
        before = self.row_index.synced_ns[np.minimum(np.array(ends), self.row_index.first[1:])]
        return np.diff(before, axis=0).astype(np.float64)


@dataclass(frozen=True)
class RowsByRound:
    """Rows by round, and the first row of each round: int64 (k,), (n_rounds + 1,).

    behind_ns: float64 (k,), the lateness of each row because of its rank's own time; 0 in late steps. ends: by peak row
    of a late step, the end of its rows.
    """

    rows: Array
    start: Array
    behind_ns: Array
    ends: Mapping[int, int]

    @staticmethod
    def of(matched: Rounds, table: Cells, late: list[LateStep], *, among: list[LateStep]) -> "RowsByRound":
        """The rows of all rounds in which a late step may have held up others. among: all late steps."""
        ends = _ends(table, late)
        is_examined = np.zeros(matched.n_rounds, bool)
        is_examined[matched.round[_late_rows(matched, late, ends)[0]]] = True
        rows = np.flatnonzero(is_examined[matched.round])
        rows = rows[order_of(matched.round[rows], matched.n_rounds)]
        behind_ns = np.maximum(np.nan_to_num(matched.late_ns[rows], nan=0.0), 0.0)
        late_at = np.flatnonzero(behind_ns)
        behind_ns[late_at] = np.minimum(behind_ns[late_at], _own_ns(table, among, rows[late_at]))
        start = np.searchsorted(matched.round[rows], np.arange(matched.n_rounds + 1))
        return RowsByRound(rows, start, behind_ns, ends)


def _late_rows(matched: Rounds, late: list[LateStep], ends: Mapping[int, int]) -> tuple[Array, Array]:
    """The rows of late steps, up to their ends, with at least half of the peak lateness, and the number of each row's
    step: int64 (k,) twice.
    """
    first = np.array([step.first_row for step in late], np.int64)
    end = np.array([ends[step.peak_row] for step in late], np.int64)
    rows, of_step = rows_of(first, end)
    late_ns = np.array([step.late_ns for step in late])
    is_late = matched.late_ns[rows] >= 0.5 * late_ns[of_step]
    return rows[is_late], of_step[is_late]


def _ends(table: Cells, late: list[LateStep]) -> dict[int, int]:
    """By peak row of each late step, the end of the step's rows."""
    peaks = np.array([step.peak_row for step in late], np.int64)
    if not len(table.step):
        return {row: row + 1 for row in peaks.tolist()}
    ends = table.end_row[np.maximum(np.searchsorted(table.first_row, peaks, side="right") - 1, 0)]
    return dict(zip(peaks.tolist(), np.maximum(ends, peaks + 1).tolist(), strict=True))


def _own_ns(table: Cells, among: list[LateStep], rows: Array) -> Array:
    """By row, the excess of its process over its peers in the step; 0 in late steps and outside of steps."""
    if not len(table.step) or not len(rows):
        return np.zeros(len(rows))
    excess_ns = table.excess_ns.copy()
    late = np.array([step.peak_row for step in among], np.int64)
    excess_ns[np.maximum(np.searchsorted(table.first_row, late, side="right") - 1, 0)] = 0.0
    cell = np.maximum(np.searchsorted(table.first_row, rows, side="right") - 1, 0)
    inside = (rows >= table.first_row[cell]) & (rows < table.end_row[cell])
    return np.where(inside, excess_ns[cell], 0.0)


def cost(
    timeline: Timeline,
    matched: Rounds,
    arrival_ns: Array,
    *,
    waits: Waits,
    by_round: RowsByRound,
    late: list[LateStep],
    among: list[LateStep],
    share: Mapping[tuple[int, int], float],
    passed_on: Array,
    step_ns: float,
    limits: Thresholds,
) -> Cost:
    """The cost of these late steps of one process for every other process.

    among: the late steps of all processes. share: see shares(). passed_on: float64 by late step, see absorbed.
    step_ns: the median step, up to which a delay is searched after its peak.
    """
    lost, least = np.zeros(timeline.n_processes), np.zeros(timeline.n_processes)
    row_index, job_waits = waits.row_index, waits.in_each_step
    if late and len(waits.released_ns):
        return _waited_longer(waits, arrival_ns, late=late, among=among)
    if not job_waits:
        for step in late:
            each = _delayed(arrival_ns, row_index, step=step, step_ns=step_ns)
            each[step.process] = 0
            lost += each * share.get((step.process, step.step), 1.0)
        return Cost(lost, least)
    n_rows = sum(by_round.ends[step.peak_row] - step.first_row for step in late) * timeline.n_processes
    most = max(_WAITS_AT_ONCE * len(late) // max(n_rows, 1), 1)
    for i in range(0, len(late), most):
        some, numbers = late[i : i + most], np.arange(len(late[i : i + most]))
        process = np.array([step.process for step in some])
        peak = np.array([step.peak_row for step in some])
        late_ns, excess_ns = (
            np.array([getattr(step, name) for step in some])[:, None] for name in ("late_ns", "excess_ns")
        )
        direct = _waited_for(timeline, matched, arrival_ns, late=some, by_round=by_round)
        late_before = np.maximum(np.nan_to_num(matched.late_ns[peak])[:, None] - late_ns, 0.0)
        direct = np.maximum(direct - late_before, 0.0)
        begin, end = arrival_ns[peak] - late_ns[:, 0], arrival_ns[peak] + step_ns
        window = row_index.between(begin, end)
        waited = row_index.grown(row_index.waited_ns, window)
        # The late process's own copies and allocations may be the delay itself.
        own_window = (window[0][numbers, process], window[1][numbers, process])
        in_syncs = row_index.grown(row_index.synced_ns, own_window)
        own = np.maximum(waited[numbers, process] - excess_ns[:, 0], in_syncs)[:, None]
        indirect = np.clip(waited - own, 0, late_ns)
        is_recorded = row_index.at(arrival_ns[peak], "right") < row_index.first[1:]
        absorbed = (waited < limits.absorbed_share * direct) & is_recorded
        each = np.where(direct > 0, np.where(absorbed, waited, direct), indirect)
        each[numbers, process] = 0
        each *= np.array([share.get((step.process, step.step), 1.0) for step in some])[:, None]
        lost += each.sum(axis=0)
        # Such a job has at most one step of work in its queues.
        least += np.maximum(each * passed_on[i : i + most, None], each - step_ns).sum(axis=0)
    return Cost(lost, least)


def shares(arrival_ns: Array, among: list[LateStep]) -> dict[tuple[int, int], float]:
    """By process and step of late steps, the share of the others' waiting time that the step caused.

    The share is 1 for the only late step at a time. Late steps at the same time cause equal shares.
    """
    if not among:
        return {}
    end = np.array([arrival_ns[step.peak_row] for step in among], np.float64)
    begin = end - np.array([max(step.excess_ns, 1.0) for step in among])
    edges = np.unique(np.concatenate([begin, end]))
    starts, ends = np.searchsorted(edges, begin), np.searchsorted(edges, end)
    n_late = np.cumsum(np.bincount(starts, minlength=len(edges)) - np.bincount(ends, minlength=len(edges)))
    parts = np.append(0.0, np.cumsum(np.diff(edges) / np.maximum(n_late[:-1], 1)))
    whole = (parts[ends] - parts[starts]) / (end - begin)
    return {(step.process, step.step): float(part) for step, part in zip(among, whole, strict=True)}


def _waited_for(
    timeline: Timeline, matched: Rounds, arrival_ns: Array, *, late: list[LateStep], by_round: RowsByRound
) -> Array:
    """The time each member of the late rounds of each step waited for the late process, beyond its wait for the next
    late process: float64 (k, p).
    """
    n, start = timeline.n_processes, by_round.start
    late_rows, of_step = _late_rows(matched, late, by_round.ends)
    if not len(late_rows):
        return np.zeros((len(late), n))
    of_round = matched.round[late_rows]
    first, end = start[of_round], start[of_round + 1]
    slot, of_late_row = rows_of(first, end)
    next_late_ns = np.maximum.reduceat(by_round.behind_ns[slot], np.cumsum(end - first) - (end - first))
    others, until = by_round.rows[slot], arrival_ns[late_rows]
    begin = (until - matched.late_ns[late_rows] + next_late_ns).astype(np.int64)
    begin = np.maximum(arrival_ns[others], begin[of_late_row])
    kept = np.flatnonzero(until[of_late_row] > begin)
    of_late_row = of_late_row[kept]
    peak_ns = arrival_ns[np.array([step.peak_row for step in late])][of_step]
    return longest_ns(
        of_step[of_late_row] * n + timeline.process[others[kept]],
        begin[kept] - peak_ns[of_late_row],
        (until - peak_ns)[of_late_row],
        n_groups=len(late) * n,
    ).reshape(len(late), n)


@dataclass(frozen=True)
class _RowIndex:
    """Finds the row of every process at a moment in one search. key: sorted, process x span_ns + time since base_ns.

    first: int64 (p + 1,), the first row of each process. waited_ns, synced_ns: running sums of the time in all calls
    that can wait for the GPU, and in synchronise calls only, before each row.
    """

    key: Array
    span_ns: int
    base_ns: int
    first: Array
    waited_ns: Array
    synced_ns: Array

    @staticmethod
    def of(timeline: Timeline, arrival_ns: Array) -> "_RowIndex":
        base, last = (int(arrival_ns.min()), int(arrival_ns.max())) if len(arrival_ns) else (0, 0)
        span = last - base + 2
        key = np.repeat(np.arange(timeline.n_processes) * span - base, np.diff(timeline.first))
        key += arrival_ns
        return _RowIndex(
            key=np.maximum.accumulate(key, out=key),
            span_ns=span,
            base_ns=base,
            first=timeline.first,
            waited_ns=_before_each(timeline.in_gpu_calls_ns),
            synced_ns=_before_each(timeline.wait_ns),
        )

    def at(self, t_ns: float | Array, side: Literal["left", "right"]) -> Array:
        """Each process's first row at or after (left), or after (right), a moment: int64 (p,); (k, p) for k moments.

        Processes advance together, so most rows are near the position of the first process's row.
        """
        inside = np.clip(np.asarray(t_ns).astype(np.int64) - self.base_ns, -1, self.span_ns - 1)[..., None]
        target = np.arange(len(self.first) - 1) * self.span_ns + inside
        if len(self.key) < _ROWS_NEARBY:
            return np.searchsorted(self.key, target, side=side)
        guess = np.searchsorted(self.key[: self.first[1]], target[..., :1], side=side)
        begin = np.clip(self.first[:-1] + (guess - _ROWS_ASIDE), 0, len(self.key) - _ROWS_NEARBY)
        n_before = np.zeros(begin.shape, np.int64)
        for i in range(_ROWS_NEARBY):
            nearby = self.key[begin + i]
            n_before += nearby < target if side == "left" else nearby <= target
        is_nearby = ((n_before > 0) | (begin == 0)) & (
            (n_before < _ROWS_NEARBY) | (begin + _ROWS_NEARBY == len(self.key))
        )
        row = begin + n_before
        if not is_nearby.all():
            row[~is_nearby] = np.searchsorted(self.key, target[~is_nearby], side=side)
        return np.asarray(row)

    def between(self, begin_ns: Array, end_ns: Array) -> tuple[Array, Array]:
        """The rows by process whose intervals overlap each window: the first, and the row after the last."""
        return self.at(begin_ns, "right"), np.minimum(self.at(end_ns, "left") + 1, self.first[1:])

    def grown(self, total_ns: Array, rows: tuple[Array, Array]) -> Array:
        """The growth of a running sum over stretches of rows: float64, in the shape of the rows."""
        return np.maximum(total_ns[rows[1]] - total_ns[rows[0]], 0).astype(np.float64)


def _before_each(value: Array) -> Array:
    """The sum of the values before each value, and the total: int64 (n + 1,)."""
    total = np.zeros(len(value) + 1, np.int64)
    np.cumsum(value, out=total[1:])
    return total


def _releases(
    timeline: Timeline, arrival_ns: Array, row_index: "_RowIndex", *, step: Array, step_ns: float
) -> tuple[Array, Array]:
    """The releases of a job that runs ahead, on the common clock, and the step after each: int64 (k,) each.

    The releases come from the process that waits most. Empty if it synchronises in most steps, or too rarely.
    """
    if not timeline.n_processes:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    longest = int(np.argmax(np.diff(row_index.synced_ns[row_index.first])))
    own = slice(*row_index.first[longest : longest + 2].tolist())
    n_syncs = timeline.rows.column("n_syncs", np.arange(own.start, own.stop))
    synced = np.diff(n_syncs.astype(np.int64), prepend=0) > 0
    edge = (
        np.flatnonzero(synced | (timeline.wait_ns[own] > max(NO_WAIT_NS, _SHORT_WAIT * step_ns))) + own.start
    )
    if len(edge) < _FEWEST_WAITS or np.median(np.diff(step[edge])) < _RUNS_AHEAD_STEPS:
        return edge[:0], edge[:0]
    leave = timeline.rows["wait_leave_ns"][edge]
    shift = arrival_ns[edge] - timeline.rows["ts_ns"][edge]
    return np.where(leave != UNKNOWN, leave + shift, arrival_ns[edge]), step[edge]


def _waited_longer(waits: Waits, arrival_ns: Array, *, late: list[LateStep], among: list[LateStep]) -> Cost:
    """For jobs that run ahead: the additional wait of each process at the end of stretches with late steps.

    It is compared with stretches without late steps. Several late processes in a stretch share it in proportion.

    With too few stretches without late steps, a stretch would have lasted at most the longest possible steps; the
    absorbed part of the delays is unknown.
    """
    process, waited = late[0].process, waits.between_releases_ns
    own_late, all_late = (_late_in(waits.released_ns, arrival_ns, steps) for steps in (late, among))
    n_steps = np.diff(waits.released_in)
    quiet = (all_late == 0) & (n_steps > 0) & (n_steps >= 0.5 * np.median(n_steps))
    share = np.divide(own_late, all_late, out=np.zeros_like(own_late), where=all_late > 0)

    def lost_ns(longer: Array) -> Array:
        lost: Array = (np.clip(longer, 0, all_late[:, None]) * share[:, None]).sum(axis=0)
        lost[process] = 0
        return lost

    if quiet.sum() >= _FEWEST_WAITS:
        expected = np.median(waited[quiet] / n_steps[quiet, None], axis=0) * n_steps[:, None]
        return Cost(lost_ns(waited - expected), lost_ns(waited - expected))
    beyond = np.diff(waits.released_ns) - n_steps * _step_at_most_ns(waits, late, arrival_ns)
    return Cost(lost_ns(waited), lost_ns(np.minimum(beyond[:, None], waited)))


def _step_at_most_ns(waits: Waits, late: list[LateStep], arrival_ns: Array) -> float:
    """An upper bound of the step time without the delays of a process.

    It follows from the shortest stretches, and from the time between the process's last delay in a stretch and the
    release, divided by the steps in between.
    """
    n_steps, n_stretches = np.diff(waits.released_in), len(waits.released_in) - 1
    last_late, since_ns = np.full(n_stretches, -1), np.zeros(n_stretches)
    for step in late:
        stretch = int(np.searchsorted(waits.released_ns, arrival_ns[step.peak_row], side="right")) - 1
        if 0 <= stretch < n_stretches and step.step > last_late[stretch]:
            last_late[stretch], since_ns[stretch] = step.step, arrival_ns[step.peak_row]
    n_after = waits.released_in[1:] - 1 - last_late
    known, long = (last_late >= 0) & (n_after > 0), (n_steps > 0) & (n_steps >= 0.5 * np.median(n_steps))
    bounds = (
        (waits.released_ns[1:] - since_ns)[known] / n_after[known],
        np.diff(waits.released_ns)[long] / n_steps[long],
    )
    return min((float(np.quantile(bound, _TIGHT)) for bound in bounds if len(bound)), default=0.0)


def _late_in(released_ns: Array, arrival_ns: Array, late: list[LateStep]) -> Array:
    """The lateness in each stretch between two releases: float64 (k - 1,)."""
    out = np.zeros(len(released_ns) - 1)
    for step in late:
        stretch = int(np.searchsorted(released_ns, arrival_ns[step.peak_row], side="right")) - 1
        if 0 <= stretch < len(out):
            out[stretch] += step.late_ns
    return out


def _waits_regularly(timeline: Timeline) -> bool:
    """Whether the job waits regularly: at least 2 % of the intervals of most processes contain a wait."""
    if not len(timeline.rows):
        return False
    each = np.add.reduceat(timeline.in_gpu_calls_ns > NO_WAIT_NS, timeline.first[:-1], dtype=np.int64)
    return bool(np.median(each / np.diff(timeline.first)) >= 0.02)


def _delayed(arrival_ns: Array, row_index: _RowIndex, *, step: LateStep, step_ns: float) -> Array:
    """For jobs that run ahead: the additional time of each process for the calls of its next ten steps."""
    begin, window = arrival_ns[step.peak_row] - step.late_ns, 10 * step_ns + step.late_ns
    first, last = row_index.at(begin, "left"), row_index.at(begin + window, "left") - 1
    n_calls = last - first
    whole_first, whole_last = row_index.first[:-1], row_index.first[1:] - 1
    mean_ns = (arrival_ns[whole_last] - arrival_ns[whole_first]) / np.maximum(whole_last - whole_first, 1)
    took = (arrival_ns[np.maximum(last, 0)] - arrival_ns[np.minimum(first, len(arrival_ns) - 1)]).astype(
        np.float64
    )
    return np.where(n_calls >= 2, np.clip(took - mean_ns * n_calls, 0, step.late_ns), 0.0)
