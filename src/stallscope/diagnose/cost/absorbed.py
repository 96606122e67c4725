"""Splits a host delay into the part that the GPU absorbed, by working on its queue, and the part that it passed on.

Without GPU times this is a model. Between two waits a host enqueues work, and the GPU does the work in order. The
length of the next wait shows the remaining work, and so the total work if it is spread evenly over the host's time.
Without its delays the same host would have waited longer for that work. A wait for other ranks looks like remaining
work, so the part that is passed on is more likely underestimated than overestimated.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.row_ranges import largest_in, rows_of
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.timeline.excess import medians_in_calls
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.timeline import NO_WAIT_NS, Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category

QUEUE_EMPTYING = (Category.COPY, Category.ALLOC)
"""Calls that wait for the GPU's queued work first, and vary with it."""
_EMPTYING = (Category.DEVICE, *QUEUE_EMPTYING)
_TAIL = 0.3  # share of the host's time at the end in which it may enqueue less work than before
_MOST = 0.5  # share of a delay that decides its kind and its position


@dataclass(frozen=True)
class HostTimes:
    """self_ns: (n,), of each row. rows: int64 (k,), the rows of late steps, sorted. delay_ns: float64 (k,), the excess
    of their self time over their peers.
    """

    self_ns: Array
    rows: Array
    delay_ns: Array

    @staticmethod
    def of(timeline: Timeline, programs: Programs, late: list[LateStep]) -> "HostTimes":
        """The times of the late steps of all processes."""
        rows, self_ns = np.zeros(0, np.int64), timeline.self_ns
        if late and not timeline.is_p2p.any():
            first, last = _rows(late)
            rows = np.unique(rows_of(first, last + 1)[0])
        more = self_ns[rows] - medians_in_calls(programs, self_ns, rows)
        return HostTimes(self_ns, rows, np.nan_to_num(np.maximum(more, 0.0), nan=0.0))


def passed_on(timeline: Timeline, times: HostTimes, late: list[LateStep]) -> Array:
    """The part of each late step of one process that its GPU passed on: float64 (k,), from 0 to 1.

    The part is 0 if it cannot be bounded: if ranks send to each other, as a GPU then also waits for its peers, and if a
    process does not wait at all.
    """
    if timeline.is_p2p.any():
        return np.zeros(len(late))
    out = np.ones(len(late))
    if not late:
        return out
    begin, end = timeline.first[late[0].process : late[0].process + 2].tolist()
    rows_of_process = np.arange(begin, end)
    host_ns, delay_ns = times.self_ns[rows_of_process].astype(np.float64), np.zeros(len(rows_of_process))
    here = slice(*np.searchsorted(times.rows, [begin, end]))
    delay_ns[times.rows[here] - begin] = times.delay_ns[here]
    emptied = np.concatenate([[0.0], np.cumsum(_in_emptying_calls_ns(timeline, rows_of_process))])
    ends, wait_ns, after_ns = _waits(timeline, rows_of_process, self_ns=times.self_ns)
    stretch = np.searchsorted(ends, np.arange(len(rows_of_process)))  # the wait that each row leads up to
    first, last = (rows - begin for rows in _rows(late))
    excess_ns = np.array([step.excess_ns for step in late])
    examined = np.flatnonzero(emptied[last + 1] - emptied[first] < _MOST * excess_ns)
    if not len(examined):
        return out
    longest = largest_in(delay_ns, first[examined], last[examined] + 1)
    number = stretch[longest]
    at_wait = np.flatnonzero(np.isin(longest, ends))
    # The delay came after the wait in the same interval.
    number[at_wait] += after_ns[number[at_wait]] >= _MOST * delay_ns[longest[at_wait]]
    has_wait = number < len(ends)
    out[examined[~has_wait]] = 0.0
    examined, number = examined[has_wait], number[has_wait]
    numbers, which = np.unique(number, return_inverse=True)
    out[examined] = _parts(host_ns, delay_ns, numbers, ends=ends, after_ns=after_ns, wait_ns=wait_ns)[which]
    return out


def _rows(late: list[LateStep]) -> tuple[Array, Array]:
    """The first row and the peak row of late steps: int64 (k,) each."""
    return (
        np.array([step.first_row for step in late], np.int64),
        np.array([step.peak_row for step in late], np.int64),
    )


def _parts(
    host_ns: Array, delay_ns: Array, numbers: Array, *, ends: Array, after_ns: Array, wait_ns: Array
) -> Array:
    """The part of the delays before each wait that the wait passed on: float64 (k,). numbers: of the waits.

    Stretches of the same length are examined together.
    """
    out = np.empty(len(numbers))
    begin = np.where(numbers > 0, ends[numbers - 1] + 1, 0)
    size = ends[numbers] + 1 - begin
    kinds, kind = np.unique(np.stack([size, numbers > 0]), axis=1, return_inverse=True)
    for i, (n_rows, has_wait_before) in enumerate(kinds.T.tolist()):
        which = np.flatnonzero(kind.ravel() == i)
        stretch, rows = numbers[which], begin[which][:, None] + np.arange(n_rows)
        before = (after_ns[stretch - 1], delay_ns[ends[stretch - 1]]) if has_wait_before else None
        spent_ns, late_ns = _spent(host_ns[rows], delay_ns[rows], after_ns[stretch], before=before)
        out[which] = passed_on_by(spent_ns, late_ns, wait_ns=wait_ns[stretch])
    return out


def _in_emptying_calls_ns(timeline: Timeline, rows: Array) -> Array:
    """By row of a process, the time in calls that empty the GPU's queue: blocking copies, allocations."""
    total = np.zeros(len(rows), np.int64)
    for category in _EMPTYING:
        total += timeline.rows.column("ledger_ns", rows, category - 1).astype(np.int64)
    return np.asarray(np.diff(total, prepend=total[:1]))


def _waits(timeline: Timeline, rows: Array, *, self_ns: Array) -> tuple[Array, Array, Array]:
    """The rows of a process with a wait in their interval, the length of the wait, and the host time after the wait:
    (w,) each.
    """
    n_syncs = timeline.rows.column("n_syncs", rows).astype(np.int64)
    waited = np.maximum(timeline.wait_ns[rows], 0)
    ends = np.flatnonzero((waited > NO_WAIT_NS) | (np.diff(n_syncs, prepend=n_syncs[:1]) > 0))
    leave = timeline.rows["wait_leave_ns"][rows[ends]]
    after = np.where(leave != UNKNOWN, timeline.ts_ns[rows[ends]] - leave, self_ns[rows[ends]])
    return ends, waited[ends], np.clip(after, 0, self_ns[rows[ends]]).astype(np.float64)


def _spent(
    spent_ns: Array,
    delay_ns: Array,
    after_ns: Array,
    *,
    before: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """The host time between two waits, in pieces, and the delay in each piece: float64 (k, m) each.

    spent_ns, delay_ns: float64 (k, m), of the rows of k stretches. after_ns: (k,), host time after the wait at the end
    of each. before: the host time after the wait at the beginning, and the delay in the row of that wait: (k,) each;
    None at the start of the trace.
    """
    is_after = after_ns >= _MOST * delay_ns[:, -1]
    delay_ns[:, -1] = np.where(is_after, np.maximum(delay_ns[:, -1] - after_ns, 0.0), delay_ns[:, -1])
    spent_ns[:, -1] = np.maximum(spent_ns[:, -1] - after_ns, 0.0)
    if before is not None:
        host_ns, late_ns = before
        late_ns = np.where(host_ns >= _MOST * late_ns, late_ns, 0.0)
        spent_ns = np.column_stack([host_ns, spent_ns])
        delay_ns = np.column_stack([late_ns, delay_ns])
    return spent_ns, np.minimum(delay_ns, spent_ns)


def passed_on_by(spent_ns: Array, delay_ns: Array, *, wait_ns: Array) -> Array:
    """The share of the delays in each stretch that the wait at its end passed on: float64 (k,).

    spent_ns, delay_ns: float64 (k, m), see _spent(). wait_ns: (k,).

    For every j, the work enqueued by the pieces from the j-th on was done in their time and in the wait. The work is
    proportional to the host time without delays. This bounds the work from above.
    """
    total = delay_ns.sum(axis=1)
    undelayed_from = np.cumsum((spent_ns - delay_ns)[:, ::-1], axis=1)[:, ::-1]
    spent_from = np.cumsum(spent_ns[:, ::-1], axis=1)[:, ::-1]
    counts = undelayed_from > np.maximum(_TAIL * undelayed_from[:, :1], 0.0)
    bounds = np.full(counts.shape, np.inf)
    np.divide(wait_ns[:, None] + spent_from, undelayed_from, out=bounds, where=counts)
    is_known = (total > 0) & counts.any(axis=1)
    work = np.where(is_known, bounds.min(axis=1), 1.0)
    remaining = np.maximum((work - 1.0) * undelayed_from[:, 0], wait_ns)
    part = 1.0 - (remaining - wait_ns) / np.where(is_known, total, 1.0)
    return np.where(is_known, np.clip(part, 0.0, 1.0), 1.0)
