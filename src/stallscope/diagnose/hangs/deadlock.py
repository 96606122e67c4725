"""Hangs without a missing rank: every rank has entered every round, and no rank makes progress.

A rank whose process has died within a round is named, because its GPU has left the round. Otherwise the ranks may have
entered the rounds of two communicators in different orders, so that their GPUs wait for each other. Then the rank whose
order differs from the rest of its program is named. If the order is the same everywhere, the device or the fabric holds
the round, and no rank can be named from host data.
"""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.hangs.hung_rounds import StuckRound, doing, ended_ns, patience_ns, waits_for_gpu
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import Clocks
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.diagnose.timeline.unseen_ranks import absent
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

_MAX_ORDERS = 32  # compared with each other
_AT_WORK = frozenset(
    {
        *(Category.ON_CPU, Category.PREEMPTED, Category.IO, Category.FAULT),
        *(Category.COPY, Category.ALLOC, Category.LAUNCH, Category.NONE),
    }
)
"""States in which a rank may make progress that no counter shows, such as a compilation or a checkpoint."""
_AT_WORK_PATIENCE = 6.0  # these states may last this many times as long as a blocked state


@dataclass(frozen=True)
class Deadlock:
    """odd: processes whose order of calls differs; none when all agree. waiting: all other processes.
    since_ns: the last arrival of all. for_ns: the time since then. row: a row of the timeline in the last round.
    n_unseen: the ranks of its communicator without a record. is_crossed: the orders differ, but no majority shows which
    order is wrong. states: the ledger categories of the ranks, by process.
    """

    odd: Array
    waiting: Array
    since_ns: int
    for_ns: int
    row: int
    n_unseen: int = 0
    is_crossed: bool = False
    states: tuple[Category, ...] = ()


def wedged(
    timeline: Timeline, programs: Programs, clocks: Clocks, *, trace: Trace, now_ns: int, limits: Thresholds
) -> Deadlock | None:
    """The standstill at the end of a trace: a collective is open and no rank makes progress; None without one."""
    if timeline.n_processes < 2:
        return None
    last_row = timeline.first[1:] - 1
    since = int(clocks.arrival_ns[last_row].max())
    patience = patience_ns(timeline, clocks.arrival_ns, limits)
    if now_ns - since < patience:
        return None
    states = _states(timeline, clocks, trace, since_ns=since, patience_ns=patience)
    if not states:
        return None
    odd = _out_of_order(timeline, programs)
    row = int(last_row[odd[0]] if len(odd) else last_row[0])
    return Deadlock(
        odd=odd,
        waiting=np.setdiff1d(np.arange(timeline.n_processes), odd),
        since_ns=since,
        for_ns=now_ns - since,
        row=row,
        n_unseen=absent(timeline, trace).n_unseen.get(int(timeline.comm[row]), 0),
        is_crossed=len(odd) == 0 and _orders_differ(timeline, programs),
        states=states,
    )


def round_with_dead_rank(
    timeline: Timeline, clocks: Clocks, *, trace: Trace, now_ns: int, limits: Thresholds
) -> StuckRound | None:
    """The round in which ranks died after they had entered it, if all remaining ranks wait; otherwise None.

    A rank with exit status 0 may have finished its work, so it is not reported.
    """
    ended = ended_ns(timeline, clocks, trace)
    remaining, gone = np.flatnonzero(ended == UNKNOWN), np.flatnonzero(ended != UNKNOWN)
    states = {int(process): doing(timeline, trace, int(process), int(ended[process])) for process in gone}
    dead = np.array([p for p, state in states.items() if state.exit_status not in (None, 0)], np.int64)
    if (
        not len(dead)
        or not len(remaining)
        or not all(waits_for_gpu(timeline, trace, int(p)) for p in remaining)
    ):
        return None
    row = int(timeline.first[dead[0] + 1]) - 1
    since = max(int(ended[dead].min()), int(clocks.arrival_ns[timeline.first[remaining + 1] - 1].max()))
    if now_ns - since < limits.dead_after_ns:
        return None
    return StuckRound(
        comm=int(timeline.comm[row]),
        seq=int(timeline.rows["seq"][row]),
        missing=dead,
        waiting=remaining,
        since_ns=since,
        for_ns=now_ns - since,
        is_circle=False,
        doing=tuple(replace(states[int(process)], has="not_completed") for process in dead),
        ranks=tuple(timeline.rank[dead].tolist()),
        nodes=tuple(timeline.node[dead].tolist()),
    )


def _states(
    timeline: Timeline, clocks: Clocks, trace: Trace, *, since_ns: int, patience_ns: float
) -> tuple[Category, ...]:
    """The last known state of each process, if no process makes progress; otherwise empty."""
    states: list[Category] = []
    for node, pid in zip(timeline.node.tolist(), timeline.pid.tolist(), strict=True):
        own = trace.snapshots[(trace.snapshots["node"] == node) & (trace.snapshots["pid"] == pid)]
        own = own[np.argsort(own["ts_ns"], kind="stable")]
        if not len(own) or not own[-1]["alive"]:
            return ()
        state = Category(int(own[-1]["category"]))
        still_ns = clocks.common_ns(node, int(own[-1]["ts_ns"])) - since_ns
        needed_ns = patience_ns * (_AT_WORK_PATIENCE if state in _AT_WORK else 1.0)
        if state != Category.WAIT_GPU and (still_ns < needed_ns or not _is_open(own, still_ns)):
            return ()
        states.append(state)
    return tuple(states)


def _is_open(snapshots: Array, still_ns: int) -> bool:
    """Whether a process has an open collective in its newest snapshot, with unchanged counts since the hang began."""
    newest = snapshots[-1]
    recent = snapshots[snapshots["ts_ns"] >= newest["ts_ns"] - still_ns]
    counts = recent[["n_collectives", "n_completed"]]
    is_known = newest["n_completed"] != UNKNOWN and newest["n_collectives"] != UNKNOWN
    has_open = newest["in_call"] == Op.SYNC or (is_known and newest["n_completed"] < newest["n_collectives"])
    return bool(has_open and len(np.unique(counts)) == 1)


def _out_of_order(timeline: Timeline, programs: Programs) -> Array:
    """Processes that have made the program's calls since their last release in another order."""
    odd = []
    for program in np.unique(programs.program):
        members = np.flatnonzero(programs.program == program)
        orders = {int(process): _since_release(timeline, programs, int(process)) for process in members}
        counts: dict[tuple[int, ...], int] = {}
        for order in orders.values():
            counts[order] = counts.get(order, 0) + 1
        majority = max(counts, key=lambda order: counts[order])
        if counts[majority] * 2 <= len(members):
            continue
        odd += [p for p, order in orders.items() if order != majority and _crosses(order, majority)]
    return np.array(odd, np.int64)


def _orders_differ(timeline: Timeline, programs: Programs) -> bool:
    """Whether two processes of a program have made the same calls since their last release in different orders."""
    for program in np.unique(programs.program):
        members = np.flatnonzero(programs.program == program)
        orders = sorted({_since_release(timeline, programs, int(process)) for process in members})[
            :_MAX_ORDERS
        ]
        if any(_crosses(first, second) for first in orders for second in orders):
            return True
    return False


def _since_release(timeline: Timeline, programs: Programs, process: int) -> tuple[int, ...]:
    rows = np.arange(timeline.first[process], timeline.first[process + 1])
    released = int(timeline.rows["wait_leave_ns"][rows[-1]])
    after = rows[timeline.ts_ns[rows] > released] if released != UNKNOWN else rows[-64:]
    return tuple(programs.key[after].tolist())


def _crosses(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether the common calls of two sequences are in different orders."""
    common = set(first) & set(second)
    return [key for key in first if key in common] != [key for key in second if key in common]
