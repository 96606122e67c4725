"""Times that senders give: which can be true, and what stands for one that cannot."""

from typing import NamedTuple

import numpy as np

from stallscope.receive.decoded import Array

EARLIEST_NS = 946_684_800 * 10**9
"""2000-01-01: what is older is an unset clock, or a unit that is not ns."""

AHEAD_NS = 86_400 * 10**9
"""A day: what is further ahead of the hub's clock is no clock."""


class Times(NamedTuple):
    """ts_ns: int64 (n,). n_replaced: how many did not say when they happened, and got the next best time."""

    ts_ns: Array
    n_replaced: int


def believable(times_ns: Array, now_ns: int) -> Array:
    """Which of the times (uint64 ns) can be true."""
    return (times_ns >= EARLIEST_NS) & (times_ns <= now_ns + AHEAD_NS)


def moments(times_ns: Array, observed_ns: Array | None, now_ns: int) -> Times:
    """When records happened: their own time, else when they were observed, else now."""
    is_own = believable(times_ns, now_ns)
    if is_own.all():
        return Times(times_ns.astype(np.int64), 0)
    out = np.full(len(times_ns), now_ns, np.int64)
    if observed_ns is not None:
        is_observed = believable(observed_ns, now_ns)
        out[is_observed] = observed_ns[is_observed].astype(np.int64)
    out[is_own] = times_ns[is_own].astype(np.int64)
    return Times(out, int((~is_own).sum()))
