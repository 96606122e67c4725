"""What a late rank cost the others: for each victim how much longer it waited than it would have anyway.

A late step shows in every round of the step; the sum over the rounds would count one delay many times. Victims would
have waited for the next one that is behind by its own doing. Lateness that they did not wait for was absorbed and costs
nothing; so may be what a GPU hid that had work enqueued (see hidden).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from stallscope.diagnose.arrays.grouping import order_of
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.rounds import Rounds
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array

_NO_WAIT_NS = 10_000  # shorter calls wait for nobody
_SHORT_WAIT = 0.05  # nor do those below this share of a step: copies of the input
_RUNS_AHEAD_STEPS = 2
_FEWEST_WAITS = 3
_TIGHT = 0.1  # quantile of bounds from above that is taken for the tightest
_STEPS_ASIDE = 3  # so many rows a process may be off the others before it is searched for
_ROWS_BESIDE = 2 * _STEPS_ASIDE + 2


@dataclass(frozen=True)
class Cost:
    """float64 (p,) by process, time it was kept waiting: lost_ns at most, least_ns for sure."""

    lost_ns: Array
    least_ns: Array


def longest_ns(group: Array, begin_ns: Array, end_ns: Array, *, n_groups: int) -> Array:
    """The longest interval of each run of intervals that overlap, summed by group: float64 (n_groups,).

    Who comes to the next round before the late one has come to this one was not held up in between.
    group: int64 (n,). begin_ns, end_ns: int64 (n,); empty and negative intervals count nothing.
    """
    real = end_ns > begin_ns
    group, begin_ns, end_ns = group[real], begin_ns[real], end_ns[real]
    if not len(group):
        return np.zeros(n_groups)
    if not ((group[1:] > group[:-1]) | ((group[1:] == group[:-1]) & (begin_ns[1:] >= begin_ns[:-1]))).all():
        order = np.lexsort((begin_ns, group))
        group, begin_ns, end_ns = group[order], begin_ns[order], end_ns[order]
    # One running maximum for all groups: each group is moved behind the one before it.
    base = begin_ns.min()
    shift = group * (int(end_ns.max() - base) + 1) - base
    reached = np.maximum.accumulate(end_ns + shift)
    run = np.flatnonzero(np.append(True, (begin_ns + shift)[1:] >= reached[:-1]))
    longest = np.maximum.reduceat(end_ns - begin_ns, run)
    return np.bincount(group[run], weights=longest, minlength=n_groups)


@dataclass(frozen=True)
class Waits:
    """What the cost of every process is worked out from. released_ns: see _releases(); released_in: the step after
    each. in_each_step: whether the job waits in most steps.
    """

    place: "_Place"
    released_ns: Array
    released_in: Array
    in_each_step: bool

    @staticmethod
    def of(line: Timeline, arrival_ns: Array, *, step: Array, step_ns: float, first_step: int = 0) -> "Waits":
        """step: int64 (n,), the step of each row, see programs. step_ns: the usual step. first_step: those before it
        are warm-up, and no stretch with some of them is like the others.
        """
        place = _Place.of(line, arrival_ns)
        released_ns, released_in = _releases(line, arrival_ns, place, step=step, step_ns=step_ns)
        is_warm = released_in >= first_step
        if np.count_nonzero(is_warm) >= _FEWEST_WAITS:
            released_ns, released_in = released_ns[is_warm], released_in[is_warm]
        return Waits(place, released_ns, released_in, _share_of_steps_with_waits(line))

    @cached_property
    def between_releases_ns(self) -> Array:
        """How long each process waited between two releases: float64 (k - 1, p)."""
        ends = [self.place.at(moment, "right") + 1 for moment in self.released_ns.tolist()]
        before = self.place.synced_ns[np.minimum(np.array(ends), self.place.first[1:])]
        return np.diff(before, axis=0).astype(np.float64)


@dataclass(frozen=True)
class RowsByRound:
    """Rows by round, and where each round begins among them: int64 (k,), (n_rounds + 1,). behind_ns: float64 (k,), how
    late each is by its own doing; 0 for those that are late steps themselves. ends: by peak row of a late step, where
    its rows end.
    """

    rows: Array
    start: Array
    behind_ns: Array
    ends: Mapping[int, int]

    @staticmethod
    def of(met: Rounds, table: Cells, late: list[LateStep], *, among: list[LateStep]) -> "RowsByRound":
        """The rows of all rounds in which a late step may have held up others. among: all late steps."""
        is_asked = np.zeros(met.n_rounds, bool)
        ends = _ends(table, late)
        for one in late:
            is_asked[met.round[_late_rows(met, one, ends[one.peak_row])]] = True
        rows = np.flatnonzero(is_asked[met.round])
        rows = rows[order_of(met.round[rows], met.n_rounds)]
        behind_ns = np.maximum(np.nan_to_num(met.late_ns[rows], nan=0.0), 0.0)
        late_at = np.flatnonzero(behind_ns)
        behind_ns[late_at] = np.minimum(behind_ns[late_at], _own_ns(table, among, rows[late_at]))
        start = np.searchsorted(met.round[rows], np.arange(met.n_rounds + 1))
        return RowsByRound(rows, start, behind_ns, ends)


def _late_rows(met: Rounds, one: LateStep, end: int) -> Array:
    """The rows of a late step, up to the end of the step, in which it is about as late as at its peak."""
    late_ns = met.late_ns[one.first_row : end]
    return one.first_row + np.flatnonzero(late_ns >= 0.5 * one.late_ns)


def _ends(table: Cells, late: list[LateStep]) -> dict[int, int]:
    """By peak row of each late step, where the rows of the step end."""
    peaks = np.array([one.peak_row for one in late], np.int64)
    if not len(table.step):
        return {row: row + 1 for row in peaks.tolist()}
    ends = table.end_row[np.maximum(np.searchsorted(table.first_row, peaks, side="right") - 1, 0)]
    return dict(zip(peaks.tolist(), np.maximum(ends, peaks + 1).tolist(), strict=True))


def _own_ns(table: Cells, among: list[LateStep], rows: Array) -> Array:
    """By row, what its process took longer than its peers in the step; 0 in late steps and outside of steps."""
    if not len(table.step) or not len(rows):
        return np.zeros(len(rows))
    excess_ns = table.excess_ns.copy()
    late = np.array([one.peak_row for one in among], np.int64)
    excess_ns[np.maximum(np.searchsorted(table.first_row, late, side="right") - 1, 0)] = 0.0
    cell = np.maximum(np.searchsorted(table.first_row, rows, side="right") - 1, 0)
    inside = (rows >= table.first_row[cell]) & (rows < table.end_row[cell])
    return np.where(inside, excess_ns[cell], 0.0)


def cost(
    line: Timeline,
    met: Rounds,
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
    """What these late steps of one process cost every other one.

    among: all late steps, of whatever process. share: see shares(). passed_on: float64 by late step, see hidden.
    step_ns: the usual step, as far as a delay is looked for behind its peak.
    """
    lost, least = np.zeros(line.n_processes), np.zeros(line.n_processes)
    place, job_waits = waits.place, waits.in_each_step
    if late and len(waits.released_ns):
        return _waited_longer(waits, arrival_ns, late=late, among=among)
    for one, part in zip(late, passed_on.tolist(), strict=True):
        direct = _waited_for(line, met, arrival_ns, one=one, by_round=by_round)
        late_before = max(float(np.nan_to_num(met.late_ns[one.peak_row])) - one.late_ns, 0.0)
        direct = np.maximum(direct - late_before, 0.0)
        begin, end = arrival_ns[one.peak_row] - one.late_ns, arrival_ns[one.peak_row] + step_ns
        window = place.between(begin, end)
        waited = place.grown(place.waited_ns, window)
        # The late one's own copies and allocations may be the delay itself.
        in_syncs = place.grown(place.synced_ns, window)[one.process]
        own = max(waited[one.process] - one.excess_ns, in_syncs)
        indirect = np.clip(waited - own, 0, one.late_ns)
        is_recorded = place.at(arrival_ns[one.peak_row], "right") < place.first[1:]
        absorbed = (waited < limits.absorbed_share * direct) & job_waits & is_recorded
        each = np.where(direct > 0, np.where(absorbed, waited, direct), indirect)
        if not job_waits:
            each, part = _delayed(line, arrival_ns, place, one=one, step_ns=step_ns), 0.0
        each[one.process] = 0
        each *= share.get((one.process, one.step), 1.0)
        lost += each
        # A job that waits in each step has no more than a step's work in its queues.
        least += np.maximum(each * part, each - step_ns if job_waits else 0.0)
    return Cost(lost, least)


def shares(arrival_ns: Array, among: list[LateStep]) -> dict[tuple[int, int], float]:
    """By process and step of some late steps, its part in what the others waited meanwhile: 1 where it alone was late;
    while several are, the others wait for all of them, and each is to blame for an equal part.
    """
    if not among:
        return {}
    end = np.array([arrival_ns[one.peak_row] for one in among], np.float64)
    begin = end - np.array([max(one.excess_ns, 1.0) for one in among])
    edges = np.unique(np.concatenate([begin, end]))
    starts, ends = np.searchsorted(edges, begin), np.searchsorted(edges, end)
    n_late = np.cumsum(np.bincount(starts, minlength=len(edges)) - np.bincount(ends, minlength=len(edges)))
    parts = np.append(0.0, np.cumsum(np.diff(edges) / np.maximum(n_late[:-1], 1)))
    whole = (parts[ends] - parts[starts]) / (end - begin)
    return {(one.process, one.step): float(part) for one, part in zip(among, whole, strict=True)}


def _waited_for(
    line: Timeline, met: Rounds, arrival_ns: Array, *, one: LateStep, by_round: RowsByRound
) -> Array:
    """Time each process that shares a late round of the step sat there until the late one came, beyond what it would
    have sat there for the next one.
    """
    own, start = _late_rows(met, one, by_round.ends[one.peak_row]), by_round.start
    if not len(own):
        return np.zeros(line.n_processes)
    here = [slice(start[r], start[r + 1]) for r in met.round[own].tolist()]
    next_ns = np.array([by_round.behind_ns[part].max() for part in here])
    until = arrival_ns[own]
    others, begin, until = _by_row(
        [by_round.rows[part] for part in here], (until - met.late_ns[own] + next_ns).astype(np.int64), until
    )
    begin = np.maximum(arrival_ns[others], begin)
    return longest_ns(line.process[others], begin, until, n_groups=line.n_processes)


def _by_row(parts: list[Array], *values: Array) -> tuple[Array, ...]:
    """The rows of all parts, sorted as longest_ns wants them, and for each the values (k,) of its part."""
    counts = [len(part) for part in parts]
    if min(counts) == max(counts):  # of successive rounds of the same processes each has a row in turn
        in_turn = np.stack(parts, axis=1).ravel()
        if (in_turn[1:] > in_turn[:-1]).all():
            return in_turn, *(np.tile(value, counts[0]) for value in values)
    rows = np.concatenate(parts)
    order = np.argsort(rows)
    return rows[order], *(np.repeat(value, counts)[order] for value in values)


@dataclass(frozen=True)
class _Place:
    """To find every process's row at a moment at once: key, sorted, is process x span_ns + time since base_ns.

    first: int64 (p + 1,), where each process's rows begin. waited_ns, synced_ns: running sums of time in all calls
    that can wait for the GPU, and in synchronise calls for others only, before each row.
    """

    key: Array
    span_ns: int
    base_ns: int
    first: Array
    waited_ns: Array
    synced_ns: Array

    @staticmethod
    def of(line: Timeline, arrival_ns: Array) -> "_Place":
        base = int(arrival_ns.min(initial=0))
        span = int(arrival_ns.max(initial=0)) - base + 2
        key = np.repeat(np.arange(line.n_processes) * span - base, np.diff(line.first))
        key += arrival_ns
        return _Place(
            key=np.maximum.accumulate(key, out=key),
            span_ns=span,
            base_ns=base,
            first=line.first,
            waited_ns=_before_each(line.in_gpu_calls_ns),
            synced_ns=_before_each(line.wait_ns),
        )

    def at(self, t_ns: float, side: Literal["left", "right"]) -> Array:
        """Each process's first row at or after (left), or after (right), a moment: int64 (p,).

        Processes keep step with each other, so that most are found beside where the first one is.
        """
        inside = min(max(int(t_ns) - self.base_ns, -1), self.span_ns - 1)
        wanted = np.arange(len(self.first) - 1) * self.span_ns + inside
        if len(self.key) < _ROWS_BESIDE:
            return np.searchsorted(self.key, wanted, side=side)
        guess = int(np.searchsorted(self.key[: self.first[1]], wanted[0], side=side))
        begin = np.clip(self.first[:-1] + (guess - _STEPS_ASIDE), 0, len(self.key) - _ROWS_BESIDE)
        beside = self.key[begin + np.arange(_ROWS_BESIDE)[:, None]]
        n_before = np.count_nonzero(beside < wanted if side == "left" else beside <= wanted, axis=0)
        is_found = ((n_before > 0) | (begin == 0)) & (
            (n_before < _ROWS_BESIDE) | (begin + _ROWS_BESIDE == len(self.key))
        )
        found = begin + n_before
        if not is_found.all():
            left = np.flatnonzero(~is_found)
            found[left] = np.searchsorted(self.key, wanted[left], side=side)
        return found

    def between(self, begin_ns: float, end_ns: float) -> tuple[Array, Array]:
        """The rows by process whose intervals end within a window or are the first after it: first, and after last."""
        return self.at(begin_ns, "right"), np.minimum(self.at(end_ns, "left") + 1, self.first[1:])

    def grown(self, total_ns: Array, rows: tuple[Array, Array]) -> Array:
        """By process, what a running sum grew by over some rows: float64 (p,)."""
        return np.maximum(total_ns[rows[1]] - total_ns[rows[0]], 0).astype(np.float64)


def _before_each(value: Array) -> Array:
    """The sum of all values before each one, and of all: int64 (n + 1,)."""
    total = np.zeros(len(value) + 1, np.int64)
    np.cumsum(value, out=total[1:])
    return total


def _releases(
    line: Timeline, arrival_ns: Array, place: "_Place", *, step: Array, step_ns: float
) -> tuple[Array, Array]:
    """When a job that runs ahead was released from its waits, on the common clock, and the step that came then: int64
    (k,) each, those of the process that waits most. Empty where it synchronises in most steps, or too seldom to tell
    anything.
    """
    if not line.n_processes:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    own = slice(*place.first[int(np.argmax(np.diff(place.synced_ns[place.first]))) :][:2].tolist())
    n_syncs = line.rows.column("n_syncs", np.arange(own.start, own.stop))
    synced = np.diff(n_syncs.astype(np.int64), prepend=0) > 0
    edge = np.flatnonzero(synced | (line.wait_ns[own] > max(_NO_WAIT_NS, _SHORT_WAIT * step_ns))) + own.start
    if len(edge) < _FEWEST_WAITS or np.median(np.diff(step[edge])) < _RUNS_AHEAD_STEPS:
        return edge[:0], edge[:0]
    leave = line.rows["wait_leave_ns"][edge]
    shift = arrival_ns[edge] - line.rows["ts_ns"][edge]
    return np.where(leave != UNKNOWN, leave + shift, arrival_ns[edge]), step[edge]


def _waited_longer(waits: Waits, arrival_ns: Array, *, late: list[LateStep], among: list[LateStep]) -> Cost:
    """For jobs that run ahead: how much longer each process waited at the end of stretches with late steps than of
    those without. Several late processes in a stretch share that in proportion.

    Where too few are without late steps, a stretch would have lasted at most as many usual steps as it has; how much of
    the delays was hidden is not known.
    """
    process, waited = late[0].process, waits.between_releases_ns
    mine, everyones = (_late_in(waits.released_ns, arrival_ns, steps) for steps in (late, among))
    n_steps = np.diff(waits.released_in)
    quiet = (everyones == 0) & (n_steps > 0) & (n_steps >= 0.5 * np.median(n_steps))
    share = np.divide(mine, everyones, out=np.zeros_like(mine), where=everyones > 0)

    def lost_ns(longer: Array) -> Array:
        lost: Array = (np.clip(longer, 0, everyones[:, None]) * share[:, None]).sum(axis=0)
        lost[process] = 0
        return lost

    if quiet.sum() >= _FEWEST_WAITS:
        usual = np.median(waited[quiet] / n_steps[quiet, None], axis=0) * n_steps[:, None]
        return Cost(lost_ns(waited - usual), lost_ns(waited - usual))
    beyond = np.diff(waits.released_ns) - n_steps * _step_at_most_ns(waits, late, arrival_ns)
    return Cost(lost_ns(waited), lost_ns(np.minimum(beyond[:, None], waited)))


def _step_at_most_ns(waits: Waits, late: list[LateStep], arrival_ns: Array) -> float:
    """What a step takes without the delays of a process, at most: what it takes in the shortest stretches, and what the
    steps that the process enqueued after its last delay in a stretch took to the release.
    """
    n_steps, n_stretches = np.diff(waits.released_in), len(waits.released_in) - 1
    last_late, since_ns = np.full(n_stretches, -1), np.zeros(n_stretches)
    for one in late:
        number = int(np.searchsorted(waits.released_ns, arrival_ns[one.peak_row], side="right")) - 1
        if 0 <= number < n_stretches and one.step > last_late[number]:
            last_late[number], since_ns[number] = one.step, arrival_ns[one.peak_row]
    n_after = waits.released_in[1:] - 1 - last_late
    known, long = (last_late >= 0) & (n_after > 0), (n_steps > 0) & (n_steps >= 0.5 * np.median(n_steps))
    bounds = (
        (waits.released_ns[1:] - since_ns)[known] / n_after[known],
        np.diff(waits.released_ns)[long] / n_steps[long],
    )
    return min((float(np.quantile(bound, _TIGHT)) for bound in bounds if len(bound)), default=0.0)


def _late_in(released_ns: Array, arrival_ns: Array, late: list[LateStep]) -> Array:
    """Lateness in each stretch between two releases: float64 (k - 1,)."""
    out = np.zeros(len(released_ns) - 1)
    for one in late:
        number = int(np.searchsorted(released_ns, arrival_ns[one.peak_row], side="right")) - 1
        if 0 <= number < len(out):
            out[number] += one.late_ns
    return out


def _share_of_steps_with_waits(line: Timeline) -> bool:
    """Whether the job waits regularly: at least one interval in fifty holds a real wait, on most processes."""
    if not len(line.rows):
        return False
    each = np.add.reduceat(line.in_gpu_calls_ns > _NO_WAIT_NS, line.first[:-1], dtype=np.int64)
    return bool(np.median(each / np.diff(line.first)) >= 0.02)


def _delayed(line: Timeline, arrival_ns: Array, place: _Place, *, one: LateStep, step_ns: float) -> Array:
    """For jobs that run ahead: how much longer than usual each process took for its next ten steps' calls."""
    begin, window = arrival_ns[one.peak_row] - one.late_ns, 10 * step_ns + one.late_ns
    first, last = place.at(begin, "left"), place.at(begin + window, "left") - 1
    n_calls = last - first
    whole_first, whole_last = place.first[:-1], place.first[1:] - 1
    usual = (arrival_ns[whole_last] - arrival_ns[whole_first]) / np.maximum(whole_last - whole_first, 1)
    took = (arrival_ns[np.maximum(last, 0)] - arrival_ns[np.minimum(first, len(arrival_ns) - 1)]).astype(
        np.float64
    )
    return np.where(n_calls >= 2, np.clip(took - usual * n_calls, 0, one.late_ns), 0.0)
