"""Rounds: the arrivals that belong together, and the lateness of each arrival within its round."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group
from stallscope.diagnose.arrays.parallel import ROWS_AT_ONCE, in_pieces
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import Clocks
from stallscope.diagnose.timeline.late_attach import is_counted_late
from stallscope.diagnose.timeline.node_rounds import spans_nodes
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import SYNCHRONISING_OPS

_MIN_RELEASES = 5
_OFTEN = 0.8  # share of the waits after collectives whose round is known
_RARELY = 0.02  # share of the releases that may be too early: a record may be missing
_RELEASED_TOGETHER_NS = 100_000  # a collective ends on all ranks within this time


@dataclass(frozen=True)
class Rounds:
    """round: int64 (n,) by row. n_arrived: int64 by round. late_ns: float64 (n,), arrival minus the median of the
    other ranks' arrivals; NaN for a rank alone in its round. arrival_ns: int64 (n,), on the common clock.
    matching_error_ns: error of the rounds of ranks attached late; lateness below twice this error counts as 0.
    """

    round: Array
    n_arrived: Array
    late_ns: Array
    arrival_ns: Array
    matching_error_ns: float = 0.0

    @property
    def n_rounds(self) -> int:
        return len(self.n_arrived)

    @cached_property
    def last_ns(self) -> Array:
        """The last arrival of each round: int64 (n_rounds,)."""
        last = np.full(self.n_rounds, np.iinfo(np.int64).min)
        np.maximum.at(last, self.round, self.arrival_ns)
        return last


def rounds(timeline: Timeline, clocks: Clocks, limits: Thresholds) -> Rounds:
    """The rounds of a timeline. Lateness below twice the error counts as 0.

    The error is the clock error; for ranks attached late, the error of matching their rounds is added.
    """
    late_ns = timeline.meetings.beyond_others(clocks.arrival_ns)
    of_clocks_ns, matching_error_ns = _row_error_ns(timeline, clocks), _matching_error_ns(timeline, late_ns)
    if matching_error_ns is not None and _is_confirmed(timeline):
        matching_error_ns = None

    def leave_out(here: slice) -> None:
        error_ns = np.zeros(here.stop - here.start)
        if of_clocks_ns is not None:
            error_ns += of_clocks_ns[timeline.calls.pair[here]]
        if matching_error_ns is not None:
            error_ns += matching_error_ns[here]
        late_ns[here][np.abs(late_ns[here]) < limits.clock_error_factor * error_ns] = 0.0

    if of_clocks_ns is not None or matching_error_ns is not None:
        in_pieces(len(late_ns), leave_out, rows_at_once=ROWS_AT_ONCE)
    return Rounds(
        round=timeline.round,
        n_arrived=np.bincount(timeline.round, minlength=timeline.n_rounds),
        late_ns=late_ns,
        arrival_ns=clocks.arrival_ns,
        matching_error_ns=0.0 if matching_error_ns is None else float(matching_error_ns.max(initial=0.0)),
    )


def _is_confirmed(timeline: Timeline) -> bool:
    """Whether the releases of all ranks confirm the rounds of ranks attached late, on one clock.

    A host that waits in most steps is never released before the last rank has entered the round. If a rank's rounds
    were off by a step, this rank or another rank would be released too early, even if one rank is late in every step.
    """
    if timeline.n_processes == 0 or timeline.node.min() != timeline.node.max():
        return False
    released_ns, is_last = timeline.releases
    is_known = (released_ns != UNKNOWN) & np.isin(timeline.rows["op"], SYNCHRONISING_OPS)
    is_known &= (np.bincount(timeline.round, minlength=timeline.n_rounds) > 1)[timeline.round]
    last_ns = np.full(timeline.n_rounds, np.iinfo(np.int64).min)
    np.maximum.at(last_ns, timeline.round, timeline.ts_ns)
    is_early = is_known & (released_ns + _RELEASED_TOGETHER_NS < last_ns[timeline.round])
    n_last, n_waits, n_early = (
        np.bincount(timeline.process, weights=weights, minlength=timeline.n_processes)
        for weights in (is_last, is_known & is_last, is_early & is_last)
    )
    is_enough = n_waits >= np.maximum(_MIN_RELEASES, _OFTEN * n_last)
    return bool(is_enough.all() and (n_early <= _RARELY * n_waits).all())


def clock_error_ns(timeline: Timeline, clocks: Clocks) -> Array | None:
    """The error of lateness by round: the largest clock error in its communicator; 0 within one node. None for a single
    node.
    """
    if timeline.n_processes == 0 or timeline.node.min() == timeline.node.max():
        return None
    worst = np.zeros(len(timeline.comm_hash))
    np.maximum.at(worst, timeline.calls.comm, clocks.error_ns[timeline.node[timeline.calls.process]])
    return np.where(spans_nodes(timeline), worst, 0.0)[timeline.comm_of_round]


def _row_error_ns(timeline: Timeline, clocks: Clocks) -> Array | None:
    """The error of lateness by membership: the error of the node's own clock, or the median clock error of the
    communicator if that is larger. None for a single node.
    """
    if timeline.n_processes == 0 or timeline.node.min() == timeline.node.max():
        return None
    own = clocks.error_ns[timeline.node[timeline.calls.process]]
    of_others = by_group(timeline.calls.comm, own, len(timeline.comm_hash), _upper_medians)
    return np.where(
        spans_nodes(timeline)[timeline.calls.comm], np.maximum(own, of_others[timeline.calls.comm]), 0.0
    )


def _upper_medians(table: Array) -> Array:
    middle = table.shape[1] // 2
    return np.asarray(np.partition(table, middle, axis=1)[:, middle])


def _matching_error_ns(timeline: Timeline, late_ns: Array) -> Array | None:
    """The matching error by row: the typical distance of late-attached ranks from their rounds; 0 for other ranks. None
    without a late-attached rank.

    Such ranks are assigned to rounds by their rhythm. If ranks run ahead, the assignment may be wrong by a call or two,
    and all of these ranks are early or late by a similar amount. A single slow rank does not change their median.
    """
    is_late = is_counted_late(timeline.rows["flags"])
    rows = np.flatnonzero(is_late & np.isfinite(late_ns)) if is_late.any() else ()
    if not len(rows):
        return None
    edges = np.flatnonzero(np.diff(timeline.process[rows])) + 1
    typical = [float(np.median(part)) for part in np.split(np.abs(late_ns[rows]), edges)]
    error = np.zeros(len(late_ns))
    error[rows] = float(np.median(typical))
    return error
