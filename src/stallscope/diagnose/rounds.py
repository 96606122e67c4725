"""Rounds: which arrivals belong together, and how late each is among them."""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.groups import median_of_others, numbered
from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import Array


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


def rounds(line: Timeline, arrival_ns: Array) -> Rounds:
    """The rounds of a timeline.

    arrival_ns: int64 (n,), arrivals of the rows on one clock (see clocks).
    """
    number, n_rounds = numbered(line.comm, line.rows["seq"])
    last_ns = np.full(n_rounds, np.iinfo(np.int64).min)
    np.maximum.at(last_ns, number, arrival_ns)
    return Rounds(
        round=number,
        n_arrived=np.bincount(number, minlength=n_rounds),
        late_ns=arrival_ns - median_of_others(number, arrival_ns),
        last_ns=last_ns,
    )
