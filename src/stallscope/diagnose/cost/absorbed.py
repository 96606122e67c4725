"""What part of a delay of a host its GPU passed on, and what part it hid: it had work enqueued, and went on meanwhile.

Without the GPUs' own times this is a model. From one wait to the next a host enqueues work as it goes; the GPU does it
in order. How long the host then waits tells how much of it was left, and so how much there was in all, if it lies
evenly over what the host does. The same host without its delays would have waited for more of it. A wait for others
looks like work that was left: what is passed on is rather told too low than too high.
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
_NO_WAIT_NS = 10_000  # shorter calls wait for nothing
_TAIL = 0.3  # share of what a host does at the end that may bring less work than the rest
_MOST = 0.5  # share of a delay that says of what kind it is, or where it lies


@dataclass(frozen=True)
class HostTimes:
    """self_ns: (n,), of each row. rows: int64 (k,), those of late steps, sorted. delay_ns: float64 (k,), how much of it
    they have more than their peers.
    """

    self_ns: Array
    rows: Array
    delay_ns: Array

    @staticmethod
    def of(line: Timeline, plan: Programs, late: list[LateStep]) -> "HostTimes":
        """Those of all late steps, of whatever process."""
        rows, self_ns = np.zeros(0, np.int64), line.self_ns
        if late and not line.is_p2p.any():
            rows = np.unique(np.concatenate([np.arange(one.first_row, one.peak_row + 1) for one in late]))
        more = self_ns[rows] - medians_in_calls(plan, self_ns, rows)
        return HostTimes(self_ns, rows, np.nan_to_num(np.maximum(more, 0.0), nan=0.0))


def passed_on(line: Timeline, times: HostTimes, late: list[LateStep]) -> Array:
    """The part of each late step of one process that its GPU passed on: float64 (k,), from 0 to 1.

    Where ranks send to each other a GPU waits for what it receives, and hides as much: nothing is sure. Nor is it where
    a process does not wait at all.
    """
    if line.is_p2p.any():
        return np.zeros(len(late))
    out = np.ones(len(late))
    if not late:
        return out
    begin, end = line.first[late[0].process : late[0].process + 2].tolist()
    own = np.arange(begin, end)
    host_ns, delay_ns = times.self_ns[own].astype(np.float64), np.zeros(len(own))
    here = slice(*np.searchsorted(times.rows, [begin, end]))
    delay_ns[times.rows[here] - begin] = times.delay_ns[here]
    emptied = np.concatenate([[0.0], np.cumsum(_in_emptying_calls_ns(line, own))])
    ends, wait_ns, after_ns = _waits(line, own, self_ns=times.self_ns)
    stretch = np.searchsorted(ends, np.arange(len(own)))  # the wait that each row leads up to
    parts: dict[int, float] = {}
    for i, one in enumerate(late):
        first, last = one.first_row - begin, one.peak_row - begin
        if emptied[last + 1] - emptied[first] >= _MOST * one.excess_ns:
            continue
        longest = first + int(np.argmax(delay_ns[first : last + 1]))
        number = int(stretch[longest])
        if longest in ends and after_ns[number] >= _MOST * delay_ns[longest]:
            number += 1  # it came after the wait that lies in the same interval
        if number >= len(ends):
            out[i] = 0.0
            continue
        if number not in parts:
            rows_in = slice(int(ends[number - 1]) + 1 if number else 0, int(ends[number]) + 1)
            left_over = number - 1 if number else None
            parts[number] = passed_on_by(
                *_spent(host_ns, delay_ns, rows_in, ends=ends, after_ns=after_ns, before=left_over),
                wait_ns=float(wait_ns[number]),
            )
        out[i] = parts[number]
    return out


def _in_emptying_calls_ns(line: Timeline, own: Array) -> Array:
    """By row of a process, time in calls that leave its GPU no work to go on with: blocking copies, allocations."""
    total = np.zeros(len(own), np.int64)
    for category in _EMPTYING:
        total += line.rows.column("ledger_ns", own, category - 1).astype(np.int64)
    return np.asarray(np.diff(total, prepend=total[:1]))


def _waits(line: Timeline, own: Array, *, self_ns: Array) -> tuple[Array, Array, Array]:
    """Which of the rows of a process had a wait in the interval before them, how long it was, and what the host did
    after it until the row: (w,) each.
    """
    n_syncs = line.rows.column("n_syncs", own).astype(np.int64)
    waited = np.maximum(line.wait_ns[own], 0)
    ends = np.flatnonzero((waited > _NO_WAIT_NS) | (np.diff(n_syncs, prepend=n_syncs[:1]) > 0))
    leave = line.rows["wait_leave_ns"][own[ends]]
    after = np.where(leave != UNKNOWN, line.ts_ns[own[ends]] - leave, self_ns[own[ends]])
    return ends, waited[ends], np.clip(after, 0, self_ns[own[ends]]).astype(np.float64)


def _spent(
    host_ns: Array, delay_ns: Array, rows: slice, *, ends: Array, after_ns: Array, before: int | None
) -> tuple[Array, Array]:
    """What the host did from one wait to the next, piece by piece, and how much of each piece was a delay.

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
    """What part of the delays in a stretch the wait at its end passed on.

    What the pieces from the k-th on brought was done in their time and the wait, for every k; they brought as much for
    each ns of what the host usually takes. That is the most they can have brought.
    """
    usual = spent_ns - delay_ns
    total = float(delay_ns.sum())
    usual_from = np.cumsum(usual[::-1])[::-1]
    brings = usual_from > max(_TAIL * usual_from[0], 0.0)
    if total <= 0 or not brings.any():
        return 1.0
    spent_from = np.cumsum(spent_ns[::-1])[::-1]
    work = float(((wait_ns + spent_from[brings]) / usual_from[brings]).min())
    left = max((work - 1.0) * float(usual_from[0]), wait_ns)
    return float(np.clip(1.0 - (left - wait_ns) / total, 0.0, 1.0))
