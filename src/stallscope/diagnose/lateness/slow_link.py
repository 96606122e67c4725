"""A group whose collectives take far longer than before, or than in similar groups: a slow link between its ranks.

Requires GPU times. A collective cannot end before its last member has started, so the shortest of its members' times
from start to end is its transfer time, independent of the others' waits. The rounds of the same call are comparable in
groups of the same size that span the same number of nodes. Their lower quartile is the baseline. The cause may be
either GPU or the link between them, so no rank is named.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, numbered
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.columns import is_one_value
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import SYNCHRONISING_OPS

_TIMES_AS_LONG = 2.0  # times the baseline, for the sum of the transfers of a step
_LASTING = 0.5  # share of the steps since the first slow one that must be slow ...
_IN_BURSTS = 0.25  # ... or this share, if their excess takes a share of the time that counts
_MAX_GROUPS = 0.5  # share of the groups from which the fabric is slow rather than a link


@dataclass(frozen=True)
class SlowGroup:
    """processes: of the group. comm: number of its communicator. excess_ns: of a slow step (median). times: the
    length of its transfers, as a multiple of the baseline. first_row: the first row of its first slow step.
    n_steps: the number of slow steps.
    """

    processes: Array
    comm: int
    excess_ns: float
    times: float
    first_row: int
    n_steps: int


def slow_groups(
    timeline: Timeline, programs: Programs, *, step_ns: float, limits: Thresholds
) -> list[SlowGroup]:
    """The groups with a slow link; empty if the source does not have GPU times."""
    first_row, transfer_ns = transfers(timeline)
    known = np.flatnonzero((transfer_ns >= 0) & (programs.step[first_row] >= limits.warm_up_steps))
    if not len(known):
        return []
    rows, transfer_ns, comm = first_row[known], transfer_ns[known], timeline.comm_of_round[known]
    role = timeline.role[rows]
    kind, n_kinds = numbered(
        _n_nodes(timeline)[comm],
        role,
        timeline.rows["op"][rows],
        timeline.rows["datatype"][rows],
        timeline.rows["count"][rows],
    )
    baseline = by_group(kind, transfer_ns, n_kinds, lambda table: np.quantile(table, 0.25, axis=1))[kind]
    cell, n_cells = numbered(comm, programs.step[rows])
    spent, expected = (
        np.bincount(cell, weights=value, minlength=n_cells) for value in (transfer_ns, baseline)
    )
    min_ns = max(limits.steady_step_share * step_ns, limits.released_late_ns)
    is_slow = (spent >= _TIMES_AS_LONG * expected) & (spent - expected >= min_ns)
    of_cell = np.zeros(n_cells, np.int64)
    of_cell[cell[::-1]] = np.arange(len(cell))[::-1]
    slow_links = []
    for number in np.unique(comm[of_cell[is_slow]]).tolist():
        own = np.flatnonzero(comm[of_cell] == number)  # in order of the steps
        own = own[np.argmax(is_slow[own]) :]
        slow = own[is_slow[own]]
        excess_ns = float((spent - expected)[slow].sum())
        is_costly = excess_ns >= limits.late_step_share * step_ns * len(own)
        lasting = _IN_BURSTS if is_costly else _LASTING
        if len(slow) < max(limits.steady_steps, lasting * len(own)):
            continue
        slow_links.append(
            SlowGroup(
                processes=np.sort(timeline.calls.process[timeline.calls.comm == number]),
                comm=number,
                excess_ns=float(np.median((spent - expected)[slow])),
                times=float(np.median(spent[slow] / np.maximum(expected[slow], 1.0))),
                first_row=int(rows[of_cell[slow[0]]]),
                n_steps=len(slow),
            )
        )
    return [group for group in slow_links if not _is_fabric(slow_links, group, comm, role)]


def transfers(timeline: Timeline) -> tuple[Array, Array]:
    """By round: a row of it, and the shortest time of its members from start to end. UNKNOWN if the time of a member is
    unknown, or if the call does not synchronise.
    """
    row = np.zeros(timeline.n_rounds, np.int64)
    start_ns, end_ns = timeline.rows["gpu_start_ns"], timeline.rows["gpu_end_ns"]
    if not len(timeline.rows) or is_one_value(end_ns):  # the source does not have GPU times
        return row, np.full(timeline.n_rounds, UNKNOWN)
    is_known = (
        (start_ns != UNKNOWN) & (end_ns != UNKNOWN) & np.isin(timeline.rows["op"], list(SYNCHRONISING_OPS))
    )
    is_known &= ~timeline.is_p2p
    n_known = np.bincount(timeline.round[is_known], minlength=timeline.n_rounds)
    shortest = np.full(timeline.n_rounds, np.iinfo(np.int64).max)
    np.minimum.at(shortest, timeline.round[is_known], (end_ns - start_ns)[is_known])
    row[timeline.round] = np.arange(len(timeline.round))
    is_whole = (n_known == timeline.n_members[timeline.comm_of_round]) & (n_known > 1)
    return row, np.where(is_whole, shortest, UNKNOWN)


def _n_nodes(timeline: Timeline) -> Array:
    """The number of nodes that each communicator spans: int64 by number."""
    pairs = np.unique(np.stack([timeline.calls.comm, timeline.node[timeline.calls.process]]), axis=1)
    return np.bincount(pairs[0], minlength=len(timeline.comm_hash))


def _is_fabric(slow_links: list[SlowGroup], group: SlowGroup, comm: Array, role: Array) -> bool:
    """Whether most groups of the same role are slow."""
    same_role = np.unique(comm[role == role[comm == group.comm][0]])
    n_slow = sum(other.comm in same_role for other in slow_links)
    return n_slow > max(1, _MAX_GROUPS * len(same_role))
