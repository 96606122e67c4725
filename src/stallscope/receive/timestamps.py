"""Checks timestamps from senders, and replaces implausible ones."""

from typing import NamedTuple

import numpy as np

from stallscope.receive.decoded import Array

EARLIEST_NS = 946_684_800 * 10**9
"""2000-01-01: an earlier time comes from an unset clock, or from a unit other than ns."""

AHEAD_NS = 86_400 * 10**9
"""One day: a time that is further ahead of the hub's clock is wrong."""


class Times(NamedTuple):
    """ts_ns: int64 (n,). n_replaced: number of records without a plausible time, which got the next best time."""

    ts_ns: Array
    n_replaced: int


def believable(times_ns: Array, now_ns: int) -> Array:
    """Whether each time (uint64 ns) is plausible."""
    return (times_ns >= EARLIEST_NS) & (times_ns <= now_ns + AHEAD_NS)


def moments(times_ns: Array, observed_ns: Array | None, now_ns: int) -> Times:
    """Times of the records: the event time, otherwise the observed time, otherwise the current time."""
    is_own = believable(times_ns, now_ns)
    if is_own.all():
        return Times(times_ns.astype(np.int64), 0)
    out = np.full(len(times_ns), now_ns, np.int64)
    if observed_ns is not None:
        is_observed = believable(observed_ns, now_ns)
        out[is_observed] = observed_ns[is_observed].astype(np.int64)
    out[is_own] = times_ns[is_own].astype(np.int64)
    return Times(out, int((~is_own).sum()))
