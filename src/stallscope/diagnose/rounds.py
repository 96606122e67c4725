"""Rounds: which arrivals belong together, and how late each is among them."""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.clocks import Clocks
from stallscope.diagnose.groups import median_of_others, numbered
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import CollectiveFlag


@dataclass(frozen=True)
class Rounds:
    """round: int64 (n,) by row. n_arrived: int64 by round. late_ns: float64 (n,), arrival minus the median of the
    others' arrivals; NaN for a rank alone in its round. last_ns: int64 by round, the last arrival.
    """

    round: Array
    n_arrived: Array
    late_ns: Array
    last_ns: Array

    @property
    def n_rounds(self) -> int:
        return len(self.n_arrived)


def rounds(line: Timeline, clocks: Clocks, limits: Thresholds) -> Rounds:
    """The rounds of a timeline. Lateness below twice the error counts as none: that of the clocks, and for
    ranks captured late that of finding their rounds.
    """
    arrival_ns = clocks.arrival_ns
    number, n_rounds = numbered(line.comm, line.rows["seq"])
    last_ns = np.full(n_rounds, np.iinfo(np.int64).min)
    np.maximum.at(last_ns, number, arrival_ns)
    late_ns = arrival_ns - median_of_others(number, arrival_ns, line.member)
    error_ns = _clock_error_ns(line, clocks, number, n_rounds=n_rounds) + _matching_error_ns(line, late_ns)
    error_ns *= limits.clock_error_factor
    return Rounds(
        round=number,
        n_arrived=np.bincount(number, minlength=n_rounds),
        late_ns=np.where(np.abs(late_ns) < error_ns, 0.0, late_ns),
        last_ns=last_ns,
    )


def _clock_error_ns(line: Timeline, clocks: Clocks, number: Array, *, n_rounds: int) -> Array:
    """By row: how wrong its lateness can be, as the largest error of the clocks in the round; 0 within one node."""
    node = line.node[line.process]
    low, high = np.full(n_rounds, np.iinfo(np.int64).max), np.full(n_rounds, -1)
    np.minimum.at(low, number, node)
    np.maximum.at(high, number, node)
    worst = np.zeros(n_rounds)
    np.maximum.at(worst, number, clocks.error_ns[node])
    return np.where(low < high, worst, 0.0)[number]


def _matching_error_ns(line: Timeline, late_ns: Array) -> Array:
    """By row: how far a rank that was captured late usually is from its rounds; 0 for the others.

    Such ranks are put into rounds by their rhythm. Where ranks run ahead that may be wrong by a call or two, and all
    of them then are early or late by about as much; one slow rank does not change the median of them.
    """
    error = np.zeros(len(late_ns))
    rows = np.flatnonzero((line.rows["flags"] & CollectiveFlag.LATE_ATTACH > 0) & np.isfinite(late_ns))
    if len(rows):
        edges = np.flatnonzero(np.diff(line.process[rows])) + 1
        usual = [float(np.median(part)) for part in np.split(np.abs(late_ns[rows]), edges)]
        error[rows] = float(np.median(usual))
    return error
