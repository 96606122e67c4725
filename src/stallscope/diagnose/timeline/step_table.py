"""Steps x processes: the lateness of each process in each step, and its own excess over its peers."""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.arrays.parallel import MUCH, in_pieces
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.programs import Programs, first_of_steps
from stallscope.diagnose.timeline.rounds import Rounds
from stallscope.diagnose.timeline.timeline import NO_WAIT_NS, Timeline
from stallscope.events.layout import Array

_STRETCHES_AT_ONCE = 1 << 12
_FEW = 0.05  # share of the rows up to which they are examined individually
_STEPS_AHEAD = 64
"""A host that runs further ahead waits in its launches for room in the queue (1,024 entries)."""
_WITHOUT_WAIT = 0.4
"""Share of the steps without a wait from which hosts run ahead, as with a wait in every other step."""


@dataclass(frozen=True)
class Cells:
    """Steps x processes: the rows of one process in one step form a cell; arrays (c,)."""

    process: Array
    step: Array
    first_row: Array
    end_row: Array
    peak_row: Array
    late_ns: Array
    rise_ns: Array
    excess_ns: Array
    whole_excess_ns: Array
    held_row: Array
    held_ns: Array
    self_ns: Array
    wait_ns: Array

    def without(self, rows: Array) -> "Cells":
        """The cells that contain none of some rows. rows: bool (n,)."""
        return part_of(self, self.sums(rows.astype(np.int64)) == 0)

    def seen(self, n_processes: int) -> Array:
        """The first and the last step of each process: int64 (n_processes, 2), -1 where it has none."""
        out = np.full((n_processes, 2), -1)
        out[self.process[::-1], 0] = self.step[::-1]  # the last assignment wins
        out[self.process, 1] = self.step
        return out

    def sums(self, value: Array) -> Array:
        """The sum of a value (n,) over the rows of each cell: (c,)."""
        return _sums(value, self.first_row, self.end_row)


def cells(
    timeline: Timeline, programs: Programs, matched: Rounds, *, excess: tuple[Array, Array], held_ns: Array
) -> Cells:
    """Lateness and own excess of each process in each step of the pattern (step >= 0).

    excess: float64 (n,) each, of self time and of host time (see excess.excess_ns). The larger excess counts:
    host time misses slow copies and allocations, and self time misses waits of victims inside a copy.
    held_ns: float64 (n,), how long the process held up others that were already waiting (see excess).
    whole_excess_ns: the excess until the end of the step; excess_ns ends at the peak.
    self_ns, wait_ns: the process's self time in the step, and its waits.

    rise_ns is the lateness gained in the step: the peak minus the lateness carried over from the step before. The
    carried lateness is the lateness at the step's first call minus the rank's own excess there. A process that waited
    in the step left a round together with the others, and then its own excess until the peak is gained as well.
    """
    n = len(timeline.rows)
    if not n:
        none = np.zeros(0, np.int64)
        real = none.astype(np.float64)
        return Cells(none, none, none, none, none, real, real, real, real, none, real, real, none)
    first = first_of_steps(timeline, programs)
    end = np.append(first[1:], n)
    late = _known(matched.late_ns)
    peak, held_row = _last_largest(late, first, end), _largest_of_few(held_ns, first, end)
    is_start = timeline.is_first[first]
    before = np.where(is_start, 0.0, late[np.maximum(first - 1, 0)])
    waited = _sums(timeline.wait_ns, first, end)
    length = timeline.ts_ns[end - 1] - timeline.ts_ns[np.where(is_start, first, first - 1)]
    at_first = np.maximum(np.maximum(excess[0][first], excess[1][first]), 0.0)
    carried = np.clip(late[first] - at_first, 0.0, np.maximum(before, 0.0))
    largest_excess = np.maximum(*(_largest_tail(value, first, peak) for value in excess))
    whole_excess = np.maximum(*(_sums(value, first, end) for value in excess))
    rise = np.maximum(late[peak] - carried, np.minimum(late[peak], largest_excess) * (waited > 0))
    kept = programs.step[first] >= 0
    return Cells(
        process=timeline.process[first][kept],
        step=programs.step[first][kept],
        first_row=first[kept],
        end_row=end[kept],
        peak_row=peak[kept],
        late_ns=late[peak][kept],
        rise_ns=rise[kept],
        excess_ns=largest_excess[kept],
        whole_excess_ns=np.maximum(largest_excess, whole_excess)[kept],
        held_row=held_row[kept],
        held_ns=held_ns[held_row][kept],
        self_ns=(length - waited)[kept].astype(np.float64),
        wait_ns=waited[kept],
    )


def _sums(value: Array, first: Array, end: Array) -> Array:
    """The sum of value over each stretch of rows first..end: (k,)."""
    out = np.empty(len(first), np.promote_types(value.dtype, np.int64))

    def add(here: slice) -> None:
        begin, ends = int(first[here.start]), end[here]
        before = np.zeros(ends[-1] - begin + 1, out.dtype)  # before[i]: sum of all up to row i, without it
        np.cumsum(value[begin : ends[-1]], out=before[1:])
        np.subtract(before[ends - begin], before[first[here] - begin], out=out[here])

    in_pieces(len(first), add, rows_at_once=_STRETCHES_AT_ONCE, is_much=len(value) >= MUCH)
    return out


def _largest_of_few(value: Array, first: Array, end: Array) -> Array:
    """As _last_largest, for values that are 0 in most rows and never negative."""
    rows = np.flatnonzero(value)
    if len(rows) > _FEW * len(value):
        return _last_largest(value, first, end)
    out = end - 1
    stretch = np.searchsorted(first, rows, side="right") - 1
    order = np.lexsort((rows, value[rows], stretch))
    is_largest = np.append(np.diff(stretch[order]) != 0, True)[: len(rows)]
    out[stretch[order[is_largest]]] = rows[order[is_largest]]
    return out


def _known(value: Array) -> Array:
    """The value with 0 where it is NaN."""
    is_unknown = np.isnan(value)
    if not is_unknown.any():
        return value
    value = value.copy()
    value[is_unknown] = 0.0
    return value


def _last_largest(value: Array, first: Array, end: Array) -> Array:
    """The row of the largest value in each stretch of rows, the last of equals; stretches cover all rows in order."""
    out = np.empty(len(first), np.int64)

    def find(here: slice) -> None:
        begin, ends = int(first[here.start]), end[here]
        own = value[begin : ends[-1]]
        starts = first[here] - begin
        largest = np.repeat(np.maximum.reduceat(own, starts), ends - first[here])
        rows = np.flatnonzero(own == largest)
        out[here] = rows[np.searchsorted(rows, ends - begin) - 1] + begin

    in_pieces(len(first), find, rows_at_once=_STRETCHES_AT_ONCE, is_much=len(value) >= MUCH)
    return out


def _largest_tail(value: Array, first: Array, last: Array) -> Array:
    """The largest sum of value over a tail of each stretch first..last (both included)."""
    out = np.empty(len(first))

    def find(here: slice) -> None:
        begin, after = int(first[here.start]), last[here] + 1
        before = np.zeros(after[-1] - begin + 1)  # before[i]: sum of all up to row i, without it
        np.cumsum(value[begin : after[-1]], out=before[1:])
        ends = np.stack([first[here], after], axis=1).ravel() - begin
        np.subtract(before[after - begin], np.minimum.reduceat(before, ends)[::2], out=out[here])

    in_pieces(len(first), find, rows_at_once=_STRETCHES_AT_ONCE, is_much=len(value) >= MUCH)
    return out


def median_step_ns(timeline: Timeline, table: Cells) -> float:
    """The median duration of a step of a process; 0 when unknown.

    A step lasts from its beginning to the beginning of the next, if processes wait for their GPUs in most steps.
    Otherwise the hosts run ahead, and only the mean over many steps equals the duration on the GPUs.
    """
    starts = timeline.ts_ns[table.first_row]
    n_steps = len(np.unique(table.step))
    runs_ahead = n_steps > 0 and not np.quantile(table.wait_ns, _WITHOUT_WAIT)
    apart = min(max(n_steps // 4, 1), _STEPS_AHEAD) if runs_ahead else 1
    n_between = table.step[apart:] - table.step[:-apart]
    same = (table.process[apart:] == table.process[:-apart]) & (n_between == apart)
    return float(np.median((starts[apart:] - starts[:-apart])[same])) / apart if same.any() else 0.0


def lengths_ns(timeline: Timeline, table: Cells, here: slice = slice(None)) -> Array:
    """From the arrival before each of some cells to its last: int64 (k,)."""
    before = np.maximum(table.first_row[here] - 1, 0)
    return np.asarray(timeline.ts_ns[table.end_row[here] - 1] - timeline.ts_ns[before])


def kinds(table: Cells) -> tuple[Array, Array]:
    """The number of calls of each cell and of the process's cell before it: int64 (c,) each.

    Steps that are equal in both are of one kind: a wait for the GPU may end in the next step.
    """
    n_calls = table.end_row - table.first_row
    is_first = np.append(True, np.diff(table.process) != 0)[: len(n_calls)]
    before = np.append(n_calls[:1], n_calls[:-1])
    return n_calls, np.where(is_first, n_calls, before)


def touched(step: Array, late: Array) -> Array:
    """Whether each step is late or follows a late step: the waits for a late step show in the interval that leads into
    the next step.
    """
    return np.asarray(np.isin(step, late) | np.isin(step - 1, late))


def judged(table: Cells, timeline: Timeline, limits: Thresholds, *, is_excerpt: bool = False) -> Cells:
    """The cells after the warm-up: the first steps, and further steps while they take several times the median.

    is_excerpt: the trace begins after the job's first steps, so no step is left out.
    """
    if is_excerpt:
        return part_of(table, table.step >= 0)
    starts = timeline.ts_ns[table.first_row]
    median_ns = median_step_ns(timeline, table)
    first_judged = _n_warm_up(table, timeline, limits)
    for step in range(first_judged, 10):
        now, after = starts[table.step == step], starts[table.step == step + 1]
        if (
            not len(now)
            or not len(after)
            or np.median(after) - np.median(now) <= limits.warm_up_factor * median_ns
        ):
            break
        first_judged = step + 1
    return part_of(table, table.step >= first_judged)


def _n_warm_up(table: Cells, timeline: Timeline, limits: Thresholds) -> int:
    """The steps of the pattern that are never judged: fewer if each of them is several steps of the job."""
    return -(-limits.warm_up_steps // n_steps_of_job(table, timeline))


def n_steps_of_job(table: Cells, timeline: Timeline) -> int:
    """The number of steps of the job in each step of the pattern, as with two models that train in turn.

    All ranks meet and wait at the end of each.
    """
    is_of_all = timeline.n_members[timeline.comm] == timeline.n_processes
    waits = (timeline.wait_ns > NO_WAIT_NS) & np.append(False, is_of_all[:-1])
    n_waits = float(np.median(table.sums(waits))) if len(table.step) else 0.0
    return max(int(n_waits), 1)


def part_of(table: Cells, mask: Array) -> Cells:
    """Some cells of a table. mask: bool (c,)."""
    return replace(table, **{name: getattr(table, name)[mask] for name in Cells.__dataclass_fields__})
