"""Rounds as seen from each participating node: the evidence that ties the nodes' clocks together (see clocks).

The rounds are tables with a line per process (see round_tables). Processes are numbered by node, so the processes of a
node are consecutive lines, which are folded into one line.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered, order_of
from stallscope.diagnose.arrays.parallel import together
from stallscope.diagnose.arrays.round_tables import Block
from stallscope.diagnose.timeline.releases import ends_on_host_clock, host_until_release_ns
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import SYNCHRONISING_OPS, Op

_EARLY, _LATE = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class NodeRounds:
    """Rounds seen from nodes, one row each, sorted by node and round: the last arrival of the node's ranks, and
    their first release after it (UNKNOWN where no release was recorded).

    host_ns: the minimum host work of these ranks between arrival and release. is_last: nothing else was enqueued
    between the arrivals and the release. waits: the node's ranks cannot be released before the other side has entered;
    holds: the other side cannot before these have. Both are true for synchronising collectives; a send only holds, a
    receive only waits. has_ends: the releases are the ends of the collectives on the GPUs, without a delay by
    host work.
    """

    round: Array
    comm: Array
    node: Array
    arrival_ns: Array
    release_ns: Array
    host_ns: Array
    is_last: Array
    waits: Array
    holds: Array
    has_ends: bool = False

    def of(self, node: int) -> slice:
        """The rows of a node."""
        begin, end = np.searchsorted(self.node, [node, node + 1])
        return slice(int(begin), int(end))


def meetings(timeline: Timeline) -> NodeRounds:
    """The rounds of ranks on several nodes, as seen from each node."""
    release, is_last = timeline.releases
    host = host_until_release_ns(timeline.ts_ns, timeline.rows["wait_leave_ns"], timeline.wait_ns, is_last)
    ends = ends_on_host_clock(timeline.ts_ns, timeline.rows["gpu_start_ns"], timeline.rows["gpu_end_ns"])
    if ends is not None:
        known = ends != UNKNOWN
        release, is_last, host = np.where(known, ends, release), is_last | known, np.where(known, 0, host)
    waits_for_all = np.zeros(max(Op) + 1, bool)
    waits_for_all[list(SYNCHRONISING_OPS)] = True
    usable = waits_for_all[timeline.rows["op"]]
    usable |= timeline.is_p2p
    spans = spans_nodes(timeline)
    if not spans.all():
        usable &= spans[timeline.comm]
    rows = np.flatnonzero(usable)
    lines = _RowRanges.of(timeline)
    if len(timeline.meetings.irregular) or lines is None:
        met = _by_row(timeline, rows, release, host, is_last)
    else:
        met = _by_table(timeline, lines, rows, release, host, is_last)
    return replace(met, has_ends=ends is not None)


@dataclass(frozen=True)
class _RowRanges:
    """Lines of the tables that belong to one communicator and one node, together: arrays (k,), by communicator, node.

    first_cell: where the first line of each begins. n_lines: the number of lines.
    """

    comm: Array
    node: Array
    first_cell: Array
    n_lines: Array
    waits: Array
    holds: Array

    @staticmethod
    def of(timeline: Timeline) -> "_RowRanges | None":
        """The lines of a timeline; None where processes of one node make different calls in a communicator."""
        calls = timeline.calls
        order = np.lexsort((calls.slot, calls.comm))
        comm, node = calls.comm[order], timeline.node[calls.process[order]]
        op = timeline.rows.column("op", calls.first_row[order])
        kind = np.where(op == Op.SEND, 1, np.where(op == Op.RECV, 2, 0))
        begins = np.ones(len(comm), bool)
        begins[1:] = (np.diff(comm) != 0) | (np.diff(node) != 0)
        if (np.diff(kind)[~begins[1:]] != 0).any():
            return None
        first = np.flatnonzero(begins)
        sets = timeline.meetings
        cell = sets.first_cell[comm] + calls.slot[order] * sets.line_cells[comm]
        return _RowRanges(
            comm=comm[first],
            node=node[first],
            first_cell=cell[first],
            n_lines=np.diff(np.append(first, len(comm))),
            waits=kind[first] != 1,
            holds=kind[first] != 2,
        )


def _by_table(
    timeline: Timeline, lines: _RowRanges, rows: Array, release: Array, host: Array, is_last: Array
) -> NodeRounds:
    """The meetings where each process is in a round once. rows: the calls that tie processes."""
    sets = timeline.meetings
    arrived, released = np.full(sets.n_cells, _EARLY), np.full(sets.n_cells, _LATE)
    worked = np.full(sets.n_cells, _LATE)
    last = np.ones(sets.n_cells, bool)
    where = rows if len(rows) < len(timeline.process) else slice(None)

    def lay_out(cells: Array, value: Array) -> None:
        cells[sets.cell[where]] = value[where]

    values = (
        (arrived, timeline.ts_ns),
        (released, np.where(release == UNKNOWN, _LATE, release)),
        (worked, host),
        (last, is_last),
    )
    together(partial(lay_out, cells, value) for cells, value in values)
    parts = [_folded(block, lines, (arrived, released, worked, last)) for block in sets.blocks]
    if not parts:
        return _by_row(timeline, rows, release, host, is_last)
    part, column, arrival_ns, release_ns, host_ns, all_last = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    n_meetings = np.bincount(part, minlength=len(lines.comm))
    begin = np.cumsum(n_meetings) - n_meetings
    order = order_of(part, len(lines.comm))
    by_node = np.lexsort((lines.comm, lines.node))
    sizes = n_meetings[by_node]
    chosen = order[np.repeat(begin[by_node] - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())]
    part, arrival_ns, release_ns = part[chosen], arrival_ns[chosen], release_ns[chosen]
    return NodeRounds(
        round=sets.first_group[lines.comm[part]] + column[chosen],
        comm=lines.comm[part],
        node=lines.node[part],
        arrival_ns=arrival_ns,
        release_ns=np.where(release_ns == _LATE, UNKNOWN, release_ns),
        host_ns=host_ns[chosen],
        is_last=all_last[chosen],
        waits=lines.waits[part],
        holds=lines.holds[part],
    )


def _folded(block: Block, lines: _RowRanges, values: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
    """The folded lines of each part of a block, in columns with an arrival: the part, the column, the last arrival, the
    first release, the minimum host work until then, whether all are the last before a wait; arrays (k,), by part,
    column. values: the same by cell.
    """
    arrived, released, worked, last = values
    parts = np.flatnonzero(
        (lines.first_cell >= block.first) & (lines.first_cell < block.first + block.n_cells)
    )
    first = (lines.first_cell[parts] - block.first) // block.n_columns
    shape = (block.n_sets * block.n_members, block.n_columns)
    arrival_ns, release_ns, host_ns = np.empty((3, len(parts), block.n_columns), np.int64)
    all_last = np.empty((len(parts), block.n_columns), bool)
    folds = (
        (np.maximum, arrived, arrival_ns),
        (np.minimum, released, release_ns),
        (np.minimum, worked, host_ns),
        (np.logical_and, last, all_last),
    )
    together(
        partial(fold.reduceat, block.of(cells).reshape(shape), first, axis=0, out=out)
        for fold, cells, out in folds
    )
    part, column = np.nonzero(arrival_ns != _EARLY)
    here = part, column
    return parts[part], column, arrival_ns[here], release_ns[here], host_ns[here], all_last[here]


def _by_row(timeline: Timeline, rows: Array, release: Array, host: Array, is_last: Array) -> NodeRounds:
    """The meetings of arbitrary rows."""
    number = timeline.round[rows]
    node = timeline.node[timeline.process[rows]]
    group, n_groups = numbered(node, number)
    arrival, first_release = np.full(n_groups, _EARLY), np.full(n_groups, _LATE)
    np.maximum.at(arrival, group, timeline.ts_ns[rows])
    known = release[rows] != UNKNOWN
    np.minimum.at(first_release, group[known], release[rows][known])
    min_host = np.full(n_groups, _LATE)
    np.minimum.at(min_host, group, host[rows])
    all_last = np.ones(n_groups, bool)
    np.logical_and.at(all_last, group, is_last[rows])
    example = np.zeros(n_groups, np.int64)
    example[group] = np.arange(len(rows))
    op = timeline.rows.column("op", rows[example])
    return NodeRounds(
        round=number[example],
        comm=timeline.comm[rows][example],
        node=node[example],
        arrival_ns=arrival,
        release_ns=np.where(first_release == _LATE, UNKNOWN, first_release),
        host_ns=min_host,
        is_last=all_last,
        waits=op != Op.SEND,
        holds=op != Op.RECV,
    )


def spans_nodes(timeline: Timeline) -> Array:
    """By communicator: whether ranks of several nodes are in it."""
    n_comms = len(timeline.comm_hash)
    low, high = np.full(n_comms, timeline.n_processes), np.full(n_comms, -1)
    np.minimum.at(low, timeline.calls.comm, timeline.calls.process)
    np.maximum.at(high, timeline.calls.comm, timeline.calls.process)
    return timeline.node[np.minimum(low, timeline.n_processes - 1)] < timeline.node[high]
