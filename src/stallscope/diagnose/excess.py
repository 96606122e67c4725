"""How much longer than its peers a rank took itself, call by call; and its ledger minus theirs."""

import numpy as np

from stallscope.diagnose.groups import median_of_others, numbered
from stallscope.diagnose.programs import Programs
from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import Array


def excess_ns(line: Timeline, plan: Programs, value_ns: Array) -> Array:
    """A time of each interval (self_ns or host_ns) minus the median of the peers' in the same call.

    Where a program has one rank only, minus the rank's own median in the same place of the step: then only what
    comes and goes is seen, not what is always slow. Returns float64 (n,), 0 where nothing can be compared.
    """
    usable = np.flatnonzero(line.is_whole)
    out = np.full(len(line.rows), np.nan)
    out[usable] = value_ns[usable] - _of_peers(line, plan, value_ns, usable)
    alone = usable[np.isnan(out[usable]) & (plan.step[usable] >= 0)]
    if len(alone):
        places, _ = numbered(line.process[alone], _place(plan.step, line.process)[alone])
        out[alone] = value_ns[alone] - median_of_others(places, value_ns[alone])
    return np.nan_to_num(out, nan=0.0)


def _of_peers(line: Timeline, plan: Programs, value_ns: Array, rows: Array) -> Array:
    """The median over the other processes with the same call, for some rows: float64 (len(rows),)."""
    return median_of_others(plan.key[rows], value_ns[rows], plan.member[line.process[rows]])


def held_ns(line: Timeline, plan: Programs, host_excess: Array) -> Array:
    """How long a process held up others that were waiting already: float64 (n,), 0 where it did not.

    A process that is stopped or loses its CPU in the middle of a round arrived in time; its peers wait in the very
    same interval, longer than they usually do there, for as long as its host time exceeds theirs.
    host_excess: float64 (n,), the excess of host_ns.
    """
    in_gpu_calls = line.interval_ns - line.host_ns
    theirs = np.nan_to_num(_of_peers(line, plan, in_gpu_calls, np.arange(len(in_gpu_calls))), nan=0.0)
    places, n_places = numbered(plan.program[line.process], _place(plan.step, line.process))
    if not n_places:
        return np.zeros(0)
    usual = np.zeros(n_places)
    order = np.argsort(places, kind="stable")
    for place, values in enumerate(np.split(in_gpu_calls[order], np.cumsum(np.bincount(places))[:-1])):
        usual[place] = np.median(values)
    longer = theirs - usual[places]
    return np.where((host_excess > 0) & (longer >= 0.5 * host_excess), host_excess, 0.0)


def ledger_excess_ns(line: Timeline, plan: Programs, first: int, last: int) -> tuple[Array, Array]:
    """Where the excess of one process over its peers went, from row `first` to row `last` (both included).

    Returns float64 (N_CATEGORIES,) ns by category, and float64 (4,) extra synchronise calls, allocations, copies
    and launches. Peers are those with the same calls; without any, the process's own usual step.
    """
    rows = np.arange(first, last + 1)
    rows = rows[line.is_whole[rows]]
    ledger, counts = _differences(line, rows)
    peer_rows = [_peers(line, plan, row) for row in rows.tolist()]
    for i, others in enumerate(peer_rows):
        if not len(others):
            continue
        their_ledger, their_counts = _differences(line, others)
        ledger[i] -= np.median(their_ledger, axis=0)
        counts[i] -= np.median(their_counts, axis=0)
    return ledger.sum(axis=0), counts.sum(axis=0)


def _differences(line: Timeline, rows: Array) -> tuple[Array, Array]:
    """Ledger (k, N_CATEGORIES) and call counts (k, 4) of the intervals before some rows."""
    now, before = line.rows[rows], line.rows[np.maximum(rows - 1, 0)]
    ledger = (now["ledger_ns"] - before["ledger_ns"]).astype(np.float64)
    names = ("n_syncs", "n_allocs", "n_copies", "n_launches")
    counts = [now[name].astype(np.float64) - before[name] for name in names]
    return ledger, np.stack(counts, axis=1)


def _peers(line: Timeline, plan: Programs, row: int) -> Array:
    """Rows of the same call in the other processes of the program, or of the same place in the own other steps."""
    same = np.flatnonzero(plan.key == plan.key[row])
    same = same[(line.process[same] != line.process[row]) & line.is_whole[same]]
    if len(same) or plan.step[row] < 0:
        return same
    own = np.flatnonzero(line.process == line.process[row])
    place = _place(plan.step, line.process)[own]
    return own[(place == place[row - own[0]]) & (own != row) & line.is_whole[own] & (plan.step[own] >= 0)]


def _place(step: Array, process: Array) -> Array:
    """How many rows of the same step of the same process come before each row."""
    n = len(step)
    begins = np.ones(n, bool)
    begins[1:] = (np.diff(step) != 0) | (np.diff(process) != 0)
    start = np.maximum.accumulate(np.where(begins, np.arange(n), 0))
    return np.arange(n) - start
