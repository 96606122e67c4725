"""Splits a host delay into the part that the GPU absorbed, by working on its queue, and the part that it passed on.

Without GPU times this is a model. Between two waits a host enqueues work, and the GPU does the work in order. The
length of the next wait shows the remaining work, and so the total work if it is spread evenly over the host's time.
Without its delays the same host would have waited longer for that work. A wait for other ranks looks like remaining
work, so the part that is passed on is more likely underestimated than overestimated.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.timeline.excess import medians_in_calls
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category

_EMPTYING = (Category.DEVICE, Category.COPY, Category.ALLOC)
_NO_WAIT_NS = 10_000  # shorter calls are not waits
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
    def of(line: Timeline, plan: Programs, late: list[LateStep]) -> "HostTimes":
        """The times of the late steps of all processes."""
        rows, self_ns = np.zeros(0, np.int64), line.self_ns
        if late and not line.is_p2p.any():
            rows = np.unique(np.concatenate([np.arange(step.first_row, step.peak_row + 1) for step in late]))
        more = self_ns[rows] - medians_in_calls(plan, self_ns, rows)
        return HostTimes(self_ns, rows, np.nan_to_num(np.maximum(more, 0.0), nan=0.0))


def passed_on(line: Timeline, times: HostTimes, late: list[LateStep]) -> Array:
    """The part of each late step of one process that its GPU passed on: float64 (k,), from 0 to 1.

    The part is 0 if it cannot be bounded: if ranks send to each other, as a GPU then also waits for its peers, and if a
    process does not wait at all.
    """
    if line.is_p2p.any():
        return np.zeros(len(late))
    out = np.ones(len(late))
    if not late:
        return out
    begin, end = line.first[late[0].process : late[0].process + 2].tolist()
    rows_of_process = np.arange(begin, end)
    host_ns, delay_ns = times.self_ns[rows_of_process].astype(np.float64), np.zeros(len(rows_of_process))
    here = slice(*np.searchsorted(times.rows, [begin, end]))
    delay_ns[times.rows[here] - begin] = times.delay_ns[here]
    emptied = np.concatenate([[0.0], np.cumsum(_in_emptying_calls_ns(line, rows_of_process))])
    ends, wait_ns, after_ns = _waits(line, rows_of_process, self_ns=times.self_ns)
    stretch = np.searchsorted(ends, np.arange(len(rows_of_process)))  # the wait that each row leads up to
    parts: dict[int, float] = {}
    for i, step in enumerate(late):
        first, last = step.first_row - begin, step.peak_row - begin
        if emptied[last + 1] - emptied[first] >= _MOST * step.excess_ns:
            continue
        longest = first + int(np.argmax(delay_ns[first : last + 1]))
        number = int(stretch[longest])
        if longest in ends and after_ns[number] >= _MOST * delay_ns[longest]:
            number += 1  # it came after the wait in the same interval
        if number >= len(ends):
            out[i] = 0.0
            continue
        if number not in parts:
            rows_in = slice(int(ends[number - 1]) + 1 if number else 0, int(ends[number]) + 1)
            before = number - 1 if number else None
            parts[number] = passed_on_by(
                *_spent(host_ns, delay_ns, rows_in, ends=ends, after_ns=after_ns, before=before),
                wait_ns=float(wait_ns[number]),
            )
        out[i] = parts[number]
    return out


def _in_emptying_calls_ns(line: Timeline, rows: Array) -> Array:
    """By row of a process, the time in calls that empty the GPU's queue: blocking copies, allocations."""
    total = np.zeros(len(rows), np.int64)
    for category in _EMPTYING:
        total += line.rows.column("ledger_ns", rows, category - 1).astype(np.int64)
    return np.asarray(np.diff(total, prepend=total[:1]))


def _waits(line: Timeline, rows: Array, *, self_ns: Array) -> tuple[Array, Array, Array]:
    """The rows of a process with a wait in their interval, the length of the wait, and the host time after the wait:
    (w,) each.
    """
    n_syncs = line.rows.column("n_syncs", rows).astype(np.int64)
    waited = np.maximum(line.wait_ns[rows], 0)
    ends = np.flatnonzero((waited > _NO_WAIT_NS) | (np.diff(n_syncs, prepend=n_syncs[:1]) > 0))
    leave = line.rows["wait_leave_ns"][rows[ends]]
    after = np.where(leave != UNKNOWN, line.ts_ns[rows[ends]] - leave, self_ns[rows[ends]])
    return ends, waited[ends], np.clip(after, 0, self_ns[rows[ends]]).astype(np.float64)


def _spent(
    host_ns: Array, delay_ns: Array, rows: slice, *, ends: Array, after_ns: Array, before: int | None
) -> tuple[Array, Array]:
    """The host time between two waits, in pieces, and the delay in each piece.

    before: the wait at the beginning, None at the start of the trace.
    """
    spent, delay = host_ns[rows].copy(), delay_ns[rows].copy()
    last = rows.stop - 1
    after = after_ns[np.searchsorted(ends, last)]
    delay[-1] = max(delay[-1] - after, 0.0) if after >= _MOST * delay[-1] else delay[-1]
    spent[-1] = max(spent[-1] - after, 0.0)
    if before is None:
        return spent, np.minimum(delay, spent)
    row = int(ends[before])
    first = float(after_ns[before])
    late = delay_ns[row] if first >= _MOST * delay_ns[row] else 0.0
    spent, delay = np.append(first, spent), np.append(late, delay)
    return spent, np.minimum(delay, spent)


def passed_on_by(spent_ns: Array, delay_ns: Array, *, wait_ns: float) -> float:
    """The share of the delays in a stretch that the wait at its end passed on.

    For every k, the work enqueued by the pieces from the k-th on was done in their time and in the wait. The work is
    proportional to the host time without delays. This bounds the work from above.
    """
    undelayed = spent_ns - delay_ns
    total = float(delay_ns.sum())
    undelayed_from = np.cumsum(undelayed[::-1])[::-1]
    counts = undelayed_from > max(_TAIL * undelayed_from[0], 0.0)
    if total <= 0 or not counts.any():
        return 1.0
    spent_from = np.cumsum(spent_ns[::-1])[::-1]
    work = float(((wait_ns + spent_from[counts]) / undelayed_from[counts]).min())
    remaining = max((work - 1.0) * float(undelayed_from[0]), wait_ns)
    return float(np.clip(1.0 - (remaining - wait_ns) / total, 0.0, 1.0))
