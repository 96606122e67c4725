"""The excess of each rank's self time over its peers, call by call, and the excess by ledger category."""

import numpy as np

from stallscope.diagnose.arrays.grouping import (
    by_group,
    median_of_others,
    medians,
    numbered,
    order_of,
    positions_in_run,
)
from stallscope.diagnose.arrays.subsample import spread_out
from stallscope.diagnose.timeline.programs import Programs, first_of_steps
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES

_COUNTS = ("n_syncs", "n_allocs", "n_copies", "n_launches")
_FEW_CALLS = 0.1  # share of the calls up to which only their rows are examined
_QUERIED_AT_ONCE = 1 << 12  # rows whose peers are looked up at once: some million rows
_MAX_PEERS = 512  # the median of this many peers is as accurate as the median of all


def excess_ns(timeline: Timeline, programs: Programs, value_ns: Array) -> Array:
    """A time of each interval (self_ns or host_ns) minus the median of the peers in the same call.

    The only rank of a program is compared with its own median at the same position of the step. That shows transient
    delays, but not a call that is always slow. If a whole node is one program, its ranks may be late together: the
    larger of both comparisons counts. A comparison with own steps leaves out the part by which the ranks of the other
    programs exceed their own steps as well, since the whole job then became slower. Returns float64 (n,), 0 without a
    comparison.
    """
    out = programs.calls.beyond_others(value_ns, timeline.is_whole)
    is_unknown = np.isnan(out)
    out[is_unknown] = 0.0
    is_node = _is_node_program(timeline, programs)[timeline.process]
    alone = np.flatnonzero((is_unknown | is_node) & timeline.is_whole & (programs.step >= 0))
    if len(alone):
        position, _ = numbered(
            timeline.process[alone], positions_in_run(programs.step, timeline.process)[alone]
        )
        peer_median_ns = median_of_others(position, value_ns[alone])
        own = np.nan_to_num(value_ns[alone] - peer_median_ns, nan=0.0)
        own *= _own_share(timeline, programs, alone, own)
        out[alone] = np.where(is_unknown[alone], own, np.maximum(out[alone], own))
    return out


def _own_share(timeline: Timeline, programs: Programs, rows: Array, more_ns: Array) -> Array:
    """The share of each excess that the ranks of other programs do not have in the same step: float64 (k,), 0 to 1.

    rows: int64 (k,), rows that are compared with other steps of their process. more_ns: float64 (k,), their excess.
    """
    cell, n_cells = numbered(timeline.process[rows], programs.step[rows])
    in_step_ns = np.bincount(cell, weights=more_ns, minlength=n_cells)
    row = rows[np.unique(cell, return_index=True)[1]]
    group, n_groups = numbered(programs.program[timeline.process[row]], programs.step[row])
    step = programs.step[row[np.unique(group, return_index=True)[1]]]
    of_others_ns = median_of_others(step, by_group(group, in_step_ns, n_groups, medians))
    shared_ns = np.maximum(np.nan_to_num(of_others_ns, nan=0.0), 0.0)[group]
    share = 1.0 - np.minimum(shared_ns / np.maximum(in_step_ns, 1.0), 1.0)
    return np.asarray(share[cell])


def _is_node_program(timeline: Timeline, programs: Programs) -> Array:
    """Whether a node's processes are all processes of a program, as a pipeline stage on its own node: bool (p,)."""
    if not timeline.n_processes or timeline.node.min() == timeline.node.max():
        return np.zeros(timeline.n_processes, bool)
    pairs = np.unique(np.stack([timeline.node, programs.program]), axis=1)
    n_programs, n_nodes = (
        np.bincount(each)[of] for each, of in zip(pairs, (timeline.node, programs.program), strict=True)
    )
    return np.asarray((n_programs == 1) & (n_nodes == 1))


def held_ns(timeline: Timeline, programs: Programs, host_excess: Array, *, min_ns: float = 0.0) -> Array:
    """How long a process held up others that were already waiting: float64 (n,), otherwise 0.

    A process that is stopped or loses its CPU in the middle of a round has arrived in time. Its peers wait in the same
    interval, longer than at this position in other steps, by as much as its host time exceeds their host time.
    host_excess: float64 (n,), the excess of host_ns. min_ns: the smallest excess that is examined.
    """
    out = np.zeros(len(host_excess))
    rows = np.flatnonzero((host_excess > 0) & (host_excess >= min_ns))
    if not len(rows):
        return out
    in_gpu_calls = timeline.in_gpu_calls_ns
    peer_ns = np.nan_to_num(medians_in_calls(programs, in_gpu_calls, rows), nan=0.0)
    # A first filter: the baseline wait, at least 0, is not subtracted yet.
    may_be = peer_ns >= 0.5 * host_excess[rows]
    rows, peer_ns = rows[may_be], peer_ns[may_be]
    if not len(rows):
        return out
    longer = peer_ns - _baseline_ns(timeline, programs, in_gpu_calls, rows)
    is_held = longer >= 0.5 * host_excess[rows]
    out[rows[is_held]] = host_excess[rows[is_held]]
    return out


def medians_in_calls(programs: Programs, value: Array, rows: Array) -> Array:
    """For some rows the median of the other processes in the same call: float64 (len(rows),)."""
    is_queried = np.zeros(programs.n_calls, bool)
    is_queried[programs.key[rows]] = True
    if np.count_nonzero(is_queried) > _FEW_CALLS * programs.n_calls:
        return programs.calls.median_of_others(value, rows)
    all_rows = np.flatnonzero(is_queried[programs.key])
    peer_median = median_of_others(programs.key[all_rows], value[all_rows])
    return peer_median[np.searchsorted(all_rows, rows)]


def _baseline_ns(timeline: Timeline, programs: Programs, value: Array, rows: Array) -> Array:
    """For some rows the median over processes and steps of a value at the same position of the program's step.

    The median is over all steps of up to _MAX_PEERS processes; NaN where none of them has that position.
    """
    first = first_of_steps(timeline, programs)
    some = _some_rows(timeline, programs)

    def position_of(these: Array) -> tuple[Array, ...]:
        return programs.program[timeline.process[these]], these - first[
            np.searchsorted(first, these, side="right") - 1
        ]

    both = zip(position_of(rows), position_of(some), strict=True)
    position, n_positions = numbered(*(np.concatenate(pair) for pair in both))
    queried, others = position[: len(rows)], position[len(rows) :]
    is_queried = np.zeros(n_positions, bool)
    is_queried[queried] = True
    kept = is_queried[others]
    return by_group(others[kept], value[some[kept]], n_positions, medians)[queried]


def ledger_excess_ns(timeline: Timeline, programs: Programs, rows: Array) -> tuple[Array, Array]:
    """The excess over the peers in the interval of each of some rows, by ledger category.

    Returns float64 (k, N_CATEGORIES) ns by category, and float64 (k, 4) extra synchronise calls, allocations, copies
    and launches; 0 for intervals that are not whole. Peers make the same calls; at most _MAX_PEERS are compared.
    A process without peers is compared with its own other steps.
    """
    excess = np.zeros((len(rows), N_CATEGORIES + len(_COUNTS)))
    whole = np.flatnonzero(timeline.is_whole[rows])
    for begin in range(0, len(whole), _QUERIED_AT_ONCE):
        here = whole[begin : begin + _QUERIED_AT_ONCE]
        excess[here] = _more_than_peers(timeline, programs, rows[here])
    return excess[:, :N_CATEGORIES], excess[:, N_CATEGORIES:]


def _more_than_peers(timeline: Timeline, programs: Programs, own: Array) -> Array:
    """The excess of each of some whole intervals over its peers' median, by category, then by count."""
    excess = np.zeros((len(own), N_CATEGORIES + len(_COUNTS)))
    peers = _peers(timeline, programs, own)
    of_row = np.repeat(np.arange(len(own)), [len(rows) for rows in peers])
    # One sorted lookup: the rows of thousands of processes are too far apart in memory for a lookup per row.
    queried, position = np.unique(np.concatenate([own, *peers]), return_inverse=True)
    columns = [("ledger_ns", i) for i in range(N_CATEGORIES)] + [(name, None) for name in _COUNTS]
    for i, (name, k) in enumerate(columns):
        grown = timeline.rows.column(name, queried, k).astype(np.float64)
        grown -= timeline.rows.column(name, np.maximum(queried - 1, 0), k)
        grown = grown[position]
        if grown.any():
            peer_median_ns = by_group(of_row, grown[len(own) :], len(own), medians)
            excess[:, i] = grown[: len(own)] - np.nan_to_num(peer_median_ns, nan=0.0)
    return excess


def _peers(timeline: Timeline, programs: Programs, rows: Array) -> list[Array]:
    """For each of some rows the rows of the same call in the other processes of the program. A row without any gets the
    rows at the same position of the process's other steps.
    """
    is_queried = np.zeros(programs.n_calls, bool)
    is_queried[programs.key[rows]] = True
    same = _some_rows(timeline, programs)
    same = same[is_queried[programs.key[same]] & timeline.is_whole[same]]
    same = same[order_of(programs.key[same], programs.n_calls)]
    keys = programs.key[same]
    begin, end = (np.searchsorted(keys, programs.key[rows], side=side) for side in ("left", "right"))
    is_alone = _is_node_program(timeline, programs)
    out = []
    for i, row in enumerate(rows.tolist()):
        peers = same[begin[i] : end[i]]
        peers = peers[timeline.process[peers] != timeline.process[row]]
        is_own = (not len(peers) or is_alone[timeline.process[row]]) and programs.step[row] >= 0
        out.append(_rows_in_other_steps(timeline, programs, row) if is_own else peers)
    return out


def _some_rows(timeline: Timeline, programs: Programs) -> Array:
    """All rows of up to _MAX_PEERS processes of each program, evenly spread: int64, sorted."""
    is_chosen = np.zeros(timeline.n_processes, bool)
    for program in range(len(programs.has_steps)):
        members = np.flatnonzero(programs.program == program)
        is_chosen[members[spread_out(len(members), _MAX_PEERS)]] = True
    chosen = np.flatnonzero(is_chosen)
    if len(chosen) == timeline.n_processes:
        return np.arange(len(timeline.rows))
    return np.concatenate([np.arange(timeline.first[p], timeline.first[p + 1]) for p in chosen.tolist()])


def _rows_in_other_steps(timeline: Timeline, programs: Programs, row: int) -> Array:
    """Rows of the same process at the same position of its other steps."""
    process = int(timeline.process[row])
    own = np.arange(timeline.first[process], timeline.first[process + 1])
    position = positions_in_run(programs.step[own], timeline.process[own])
    return own[
        (position == position[row - own[0]])
        & (own != row)
        & timeline.is_whole[own]
        & (programs.step[own] >= 0)
    ]
