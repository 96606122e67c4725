"""The time ledger from raw events: how long the GPU threads of one process spent in each category.

The kernel side keeps the same ledger while it runs (bpf/sched.bpf.c). This module computes it afterwards from calls
and scheduler events, for recordings, and checks the kernel's arithmetic.

Every thread is at each moment in one Category. Inside a traced call it is in the category of the
outermost call. Off the CPU it is in the category of the reason; preempted and stopped take precedence over the call.
The process is in the state of its most active GPU thread (see names.Category). So the categories always sum to the
elapsed time.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES, Category

_OVERRIDING = (Category.PREEMPTED, Category.STOPPED)


@dataclass(frozen=True)
class ThreadEvents:
    """The records of one GPU thread, each group sorted by time; times int64 ns on one clock.

    call_enter_ns, call_leave_ns, call_category: outermost traced calls; leave is a large number while open.
    off_ns, on_ns, woken_ns, off_category: intervals off the CPU; woken_ns is when it became runnable again
    (on_ns where unknown).
    first_ns, last_ns: the known part of the thread's life.
    """

    call_enter_ns: Array
    call_leave_ns: Array
    call_category: Array
    off_ns: Array
    on_ns: Array
    woken_ns: Array
    off_category: Array
    first_ns: int
    last_ns: int


def account(threads: list[ThreadEvents], at_ns: Array) -> Array:
    """Time in ns that the process has spent in each category until each moment.

    at_ns: int64 (n,), sorted. Returns int64 (n, N_CATEGORIES), running sums from the first thread's first
    event; open intervals are charged up to the moment. Rows sum to at_ns minus that first event.
    """
    sums_ns = np.zeros((len(at_ns), N_CATEGORIES), np.int64)
    if not threads or not len(at_ns):
        return sums_ns
    edges, states = combine([states_of(thread) for thread in threads])
    lengths = np.diff(edges, append=max(int(at_ns[-1]), int(edges[-1])))
    segment = np.searchsorted(edges, at_ns, side="right") - 1
    since_edge_ns = np.where(segment >= 0, at_ns - edges[np.maximum(segment, 0)], 0)
    for category in range(1, N_CATEGORIES + 1):
        finished_ns = np.concatenate([[0], np.cumsum(np.where(states == category, lengths, 0))])
        current_ns = np.where(states[np.maximum(segment, 0)] == category, since_edge_ns, 0)
        sums_ns[:, category - 1] = np.where(segment >= 0, finished_ns[np.maximum(segment, 0)] + current_ns, 0)
    return sums_ns


def states_of(thread: ThreadEvents) -> tuple[Array, Array]:
    """The thread's category over time: edges int64 (n,), and the category from each edge on (n,)."""
    edges = np.unique(
        np.concatenate(
            [
                [thread.first_ns, thread.last_ns],
                *(thread.call_enter_ns, thread.call_leave_ns),
                *(thread.off_ns, thread.woken_ns, thread.on_ns),
            ]
        ).astype(np.int64)
    )
    edges = edges[(edges >= thread.first_ns) & (edges <= thread.last_ns)]
    call = _category_at(edges, thread.call_enter_ns, thread.call_leave_ns, thread.call_category)
    blocked = _category_at(edges, thread.off_ns, thread.woken_ns, thread.off_category)
    runnable = _category_at(
        edges, thread.woken_ns, thread.on_ns, np.full(len(thread.on_ns), Category.PREEMPTED)
    )
    off = np.where(blocked > 0, blocked, runnable)
    state = np.where(np.isin(off, _OVERRIDING), off, np.where(call > 0, call, off))
    state = np.where(state == 0, int(Category.ON_CPU), state)
    state[edges >= thread.last_ns] = Category.NONE
    return edges, state


def combine(threads: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The state of a process: the largest state of its threads at each moment. Shapes as in states_of()."""
    edges = np.unique(np.concatenate([edges for edges, _ in threads]))
    state = np.zeros(len(edges), np.int64)
    for own_edges, own_state in threads:
        index = np.searchsorted(own_edges, edges, side="right") - 1
        state = np.maximum(state, np.where(index >= 0, own_state[np.maximum(index, 0)], 0))
    return edges, state


def waits_or_device(enter_ns: Array, leave_ns: Array, enqueued_ns: Array) -> Array:
    """Whether a synchronise call waits for other ranks or only for the rank's own device.

    enter_ns, leave_ns: int64 (n,) outermost synchronise calls of all threads of the process, sorted by entry.
    enqueued_ns: int64 (m,) sorted moments at which the process enqueued collectives.
    Returns categories (n,): WAIT_GPU where a collective was enqueued since the previous call ended, or DEVICE.
    """
    previous_end = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(leave_ns)[:-1]])
    n_before_entry = np.searchsorted(enqueued_ns, enter_ns, side="right")
    n_before_previous_end = np.searchsorted(enqueued_ns, np.minimum(previous_end, enter_ns), side="right")
    return np.where(n_before_entry > n_before_previous_end, int(Category.WAIT_GPU), int(Category.DEVICE))


def _category_at(at_ns: Array, begin_ns: Array, end_ns: Array, category: Array) -> Array:
    """The category of the interval that each moment lies in, 0 outside; intervals sorted, not overlapping."""
    if not len(begin_ns):
        return np.zeros(len(at_ns), np.int64)
    i = np.searchsorted(begin_ns, at_ns, side="right") - 1
    covered = (i >= 0) & (at_ns < end_ns[np.maximum(i, 0)])
    return np.where(covered, category[np.maximum(i, 0)], 0).astype(np.int64)
