"""Late steps of ranks whose hosts were blocked in a launch because the launch queue was full: victims of another rank.

A host that runs ahead does not wait in a synchronise call. If its GPU waits in a collective for a rank further behind,
the host continues until the queue is full, and then blocks in a launch. That looks like host work. It is detected from
the arrivals: the host had entered a round, the last member came only while the host was blocked, and that member made
no call for most of that time.
"""

from collections.abc import Sequence

import numpy as np

from stallscope.diagnose.arrays.row_ranges import largest_in
from stallscope.diagnose.timeline.rounds import Rounds
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import Category

_EXAMINED_CALLS = 512  # calls of a process before it blocked: a queue holds 1,024 launches
_MOST = 0.5  # share of the time for which the host was blocked


def held_in_launches(timeline: Timeline, matched: Rounds, spans: Sequence[tuple[int, int]]) -> Array:
    """Whether each late step was spent in a launch that waited for a rank further behind: bool (k,).

    spans: first and last row of each, of one process in order. Only time on the CPU and in launches counts.
    """
    if not spans:
        return np.zeros(0, bool)
    first, last = np.array(spans, np.int64).T
    blocked_row = largest_in(
        timeline.host_ns, first, last + 1
    )  # the row before which the process was busy the longest
    out = np.zeros(len(blocked_row), bool)
    candidates = np.flatnonzero(_may_be_queued(timeline, blocked_row))
    candidates = candidates[_may_have_entered(timeline, matched, blocked_row[candidates])]
    before = [_entered(timeline, matched, row) for row in blocked_row[candidates].tolist()]
    last_of = _last_members(matched, np.unique(np.concatenate([np.zeros(0, np.int64), *before])))
    for i, rounds in zip(candidates.tolist(), before, strict=True):
        last = [last_of[number] for number in rounds.tolist()]
        out[i] = _has_same_gap(timeline, matched, int(blocked_row[i]), last)
    return out


def _may_be_queued(timeline: Timeline, rows: Array) -> Array:
    """Whether most of the time before each of some rows was spent on the CPU or in launches: bool (k,)."""
    before = np.maximum(rows - 1, 0)
    spent = np.zeros(len(rows))
    for category in (Category.ON_CPU, Category.LAUNCH):
        after, ahead = (timeline.rows.column("ledger_ns", at, category - 1) for at in (rows, before))
        spent += after.astype(np.float64) - ahead
    return np.asarray(
        ~timeline.is_first[rows] & (spent >= _MOST * (timeline.ts_ns[rows] - timeline.ts_ns[before]))
    )


def _may_have_entered(timeline: Timeline, matched: Rounds, rows: Array) -> Array:
    """Whether _entered() may return a round for each row: bool (k,).

    The latest end of all earlier rounds of the process decides, and not only of the last _EXAMINED_CALLS.
    """
    last_ns = matched.last_ns[matched.round]
    base = last_ns.min()
    shift = timeline.process * (last_ns.max() - base + 1) - base
    latest_ns = (np.maximum.accumulate(last_ns + shift) - shift)[rows - 1]
    begin, end = matched.arrival_ns[rows - 1], matched.arrival_ns[rows]
    return np.asarray(latest_ns >= begin + _MOST * (end - begin))


def _entered(timeline: Timeline, matched: Rounds, row: int) -> Array:
    """Rounds that a process had entered before it blocked, and whose last member came while it was blocked."""
    begin, end = matched.arrival_ns[row - 1], matched.arrival_ns[row]
    first = max(int(timeline.first[timeline.process[row]]), row - _EXAMINED_CALLS)
    entered = matched.round[first:row]
    last_ns = matched.last_ns[entered]
    return np.asarray(entered[(last_ns >= begin + _MOST * (end - begin)) & (last_ns <= end)])


def _last_members(matched: Rounds, rounds: Array) -> dict[int, int]:
    """The row of the last member of each of some rounds."""
    if not len(rounds):
        return {}
    members = np.flatnonzero(np.isin(matched.round, rounds))
    order = members[np.lexsort((matched.arrival_ns[members], matched.round[members]))]
    last = order[np.flatnonzero(np.diff(matched.round[order], append=-1))]
    return dict(zip(matched.round[last].tolist(), last.tolist(), strict=True))


def _has_same_gap(timeline: Timeline, matched: Rounds, row: int, last: list[int]) -> bool:
    """Whether a last member of the rounds made no call for most of the time in which the host was blocked."""
    begin, end = matched.arrival_ns[row - 1], matched.arrival_ns[row]
    for other in last:
        if timeline.process[other] == timeline.process[row] or timeline.is_first[other]:
            continue
        together = min(matched.arrival_ns[other], end) - max(matched.arrival_ns[other - 1], begin)
        if together >= _MOST * (end - begin):
            return True
    return False
