"""How much longer than its peers a rank took itself, call by call; and its ledger minus theirs."""

import numpy as np

from stallscope.diagnose.arrays.grouping import (
    by_group,
    median_of_others,
    medians,
    numbered,
    order_of,
    places,
)
from stallscope.diagnose.arrays.subsample import spread_out
from stallscope.diagnose.timeline.programs import Programs, first_of_steps
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES

_COUNTS = ("n_syncs", "n_allocs", "n_copies", "n_launches")
_FEW_CALLS = 0.1  # share of the calls up to which their rows are looked at alone
_ASKED_AT_ONCE = 1 << 12  # whose peers are looked up together: some million rows
_MOST_PEERS = 512  # a median of so many is as good as that of all


def excess_ns(line: Timeline, plan: Programs, value_ns: Array) -> Array:
    """A time of each interval (self_ns or host_ns) minus the median of the peers' in the same call.

    Where a program has one rank only, minus the rank's own median in the same place of the step: then only what
    comes and goes is seen, not what is always slow. Returns float64 (n,), 0 where nothing can be compared.
    """
    out = plan.calls.beyond_others(value_ns, line.is_whole)
    unknown = np.isnan(out)
    out[unknown] = 0.0
    alone = np.flatnonzero(unknown & line.is_whole & (plan.step >= 0))
    if len(alone):
        place, _ = numbered(line.process[alone], places(plan.step, line.process)[alone])
        usual = median_of_others(place, value_ns[alone])
        out[alone] = np.nan_to_num(value_ns[alone] - usual, nan=0.0)
    return out


def held_ns(line: Timeline, plan: Programs, host_excess: Array, *, least_ns: float = 0.0) -> Array:
    """How long a process held up others that were waiting already: float64 (n,), 0 where it did not.

    A process that is stopped or loses its CPU in the middle of a round arrived in time; its peers wait in the very
    same interval, longer than they usually do there, for as long as its host time exceeds theirs.
    host_excess: float64 (n,), the excess of host_ns. least_ns: less than this is not looked at.
    """
    out = np.zeros(len(host_excess))
    rows = np.flatnonzero((host_excess > 0) & (host_excess >= least_ns))
    if not len(rows):
        return out
    in_gpu_calls = line.in_gpu_calls_ns
    theirs = np.nan_to_num(medians_in_calls(plan, in_gpu_calls, rows), nan=0.0)
    # What they usually wait there, at least 0, is still to be taken off.
    may_be = theirs >= 0.5 * host_excess[rows]
    rows, theirs = rows[may_be], theirs[may_be]
    if not len(rows):
        return out
    longer = theirs - _usual_there(line, plan, in_gpu_calls, rows)
    is_held = longer >= 0.5 * host_excess[rows]
    out[rows[is_held]] = host_excess[rows[is_held]]
    return out


def medians_in_calls(plan: Programs, value: Array, rows: Array) -> Array:
    """For some rows the median of the other processes in the same call: float64 (len(rows),)."""
    is_asked = np.zeros(plan.n_calls, bool)
    is_asked[plan.key[rows]] = True
    if np.count_nonzero(is_asked) > _FEW_CALLS * plan.n_calls:
        return plan.calls.median_of_others(value, rows)
    all_rows = np.flatnonzero(is_asked[plan.key])
    found = median_of_others(plan.key[all_rows], value[all_rows])
    return found[np.searchsorted(all_rows, rows)]


def _usual_there(line: Timeline, plan: Programs, value: Array, rows: Array) -> Array:
    """For some rows the median over processes and steps of a value in that place of the program's step: all steps of
    up to _MOST_PEERS processes; NaN where none of these has it.
    """
    first = first_of_steps(line, plan)
    some = _some_rows(line, plan)

    def place_of(these: Array) -> tuple[Array, ...]:
        return plan.program[line.process[these]], these - first[
            np.searchsorted(first, these, side="right") - 1
        ]

    both = zip(place_of(rows), place_of(some), strict=True)
    place, n_places = numbered(*(np.concatenate(one) for one in both))
    asked, others = place[: len(rows)], place[len(rows) :]
    is_asked = np.zeros(n_places, bool)
    is_asked[asked] = True
    kept = is_asked[others]
    return by_group(others[kept], value[some[kept]], n_places, medians)[asked]


def ledger_excess_ns(line: Timeline, plan: Programs, rows: Array) -> tuple[Array, Array]:
    """Where the excess over their peers went in the interval of each of some rows.

    Returns float64 (k, N_CATEGORIES) ns by category, and float64 (k, 4) extra synchronise calls, allocations, copies
    and launches; 0 for intervals that are not whole. Peers are those with the same calls, of very many some; without
    any, the process's own usual step.
    """
    excess = np.zeros((len(rows), N_CATEGORIES + len(_COUNTS)))
    whole = np.flatnonzero(line.is_whole[rows])
    for begin in range(0, len(whole), _ASKED_AT_ONCE):
        here = whole[begin : begin + _ASKED_AT_ONCE]
        excess[here] = _more_than_peers(line, plan, rows[here])
    return excess[:, :N_CATEGORIES], excess[:, N_CATEGORIES:]


def _more_than_peers(line: Timeline, plan: Programs, own: Array) -> Array:
    """What each of some whole intervals has more than its peers' median, by category, then by count."""
    excess = np.zeros((len(own), N_CATEGORIES + len(_COUNTS)))
    peers = _peers(line, plan, own)
    of_row = np.repeat(np.arange(len(own)), [len(one) for one in peers])
    # Looked up in the order in which they stand: thousands of processes are too far apart to be asked in turn.
    asked, place = np.unique(np.concatenate([own, *peers]), return_inverse=True)
    columns = [("ledger_ns", i) for i in range(N_CATEGORIES)] + [(name, None) for name in _COUNTS]
    for i, (name, k) in enumerate(columns):
        grown = line.rows.column(name, asked, k).astype(np.float64)
        grown -= line.rows.column(name, np.maximum(asked - 1, 0), k)
        grown = grown[place]
        if grown.any():
            usual = by_group(of_row, grown[len(own) :], len(own), medians)
            excess[:, i] = grown[: len(own)] - np.nan_to_num(usual, nan=0.0)
    return excess


def _peers(line: Timeline, plan: Programs, rows: Array) -> list[Array]:
    """For each of some rows those of the same call in the other processes of the program, or of the same place in the
    own other steps.
    """
    is_asked = np.zeros(plan.n_calls, bool)
    is_asked[plan.key[rows]] = True
    same = _some_rows(line, plan)
    same = same[is_asked[plan.key[same]] & line.is_whole[same]]
    same = same[order_of(plan.key[same], plan.n_calls)]
    keys = plan.key[same]
    begin, end = (np.searchsorted(keys, plan.key[rows], side=side) for side in ("left", "right"))
    found = []
    for i, row in enumerate(rows.tolist()):
        peers = same[begin[i] : end[i]]
        peers = peers[line.process[peers] != line.process[row]]
        found.append(_own_other(line, plan, row) if not len(peers) and plan.step[row] >= 0 else peers)
    return found


def _some_rows(line: Timeline, plan: Programs) -> Array:
    """All rows of up to _MOST_PEERS processes of each program, evenly spread: int64, sorted."""
    is_chosen = np.zeros(line.n_processes, bool)
    for program in range(len(plan.has_steps)):
        members = np.flatnonzero(plan.program == program)
        is_chosen[members[spread_out(len(members), _MOST_PEERS)]] = True
    chosen = np.flatnonzero(is_chosen)
    if len(chosen) == line.n_processes:
        return np.arange(len(line.rows))
    return np.concatenate([np.arange(line.first[p], line.first[p + 1]) for p in chosen.tolist()])


def _own_other(line: Timeline, plan: Programs, row: int) -> Array:
    """Rows of the same process in the same place of its other steps."""
    process = int(line.process[row])
    own = np.arange(line.first[process], line.first[process + 1])
    place = places(plan.step[own], line.process[own])
    return own[(place == place[row - own[0]]) & (own != row) & line.is_whole[own] & (plan.step[own] >= 0)]
