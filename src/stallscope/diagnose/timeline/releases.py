"""When processes were released from their waits. No rank is released before every member has entered the round.

A source with GPU times on the host's clock, such as a profiler, provides the end of the collective itself.
"""

import numpy as np

from stallscope.events.columns import is_one_value
from stallscope.events.layout import UNKNOWN, Array

_MAX_AHEAD_NS = 60_000_000_000  # a host is never this far ahead of its GPU: such times are from another clock


def released(ts_ns: Array, leave_ns: Array, first: Array) -> tuple[Array, Array]:
    """The first release of each row's process from a wait after that arrival, int64 (n,), UNKNOWN without a recorded
    release; and whether the release was before the next arrival, bool (n,).

    ts_ns, leave_ns: int64 (n,), of rows by process and time: the arrival, and the end of the last wait before it.
    first: int64 (p + 1,), the first row of each process, and n.
    """
    n = len(ts_ns)
    is_last = np.zeros(n, bool)
    if n < 2:
        return np.full(n, UNKNOWN, np.int64), is_last
    np.greater(leave_ns[1:], ts_ns[:-1], out=is_last[:-1])
    ends_of_processes = first[1:] - 1
    # A row that is not the last before a wait is released by the wait after a later row of its process.
    is_last[ends_of_processes] = True
    ends = np.flatnonzero(is_last)
    is_last[ends_of_processes] = False
    release_ns = np.where(is_last[ends], leave_ns[np.minimum(ends + 1, n - 1)], UNKNOWN)
    return np.repeat(release_ns, np.diff(ends, prepend=-1)), is_last


def host_until_release_ns(ts_ns: Array, leave_ns: Array, wait_ns: Array, is_last: Array) -> Array:
    """Host work between an arrival and the release from it: int64 (n,), 0 where is_last is false.

    A release that host work delays does not show when the collective ended. ts_ns, leave_ns: as for released().
    wait_ns: int64 (n,), the waits in the interval that leads up to each row. is_last: bool (n,), see released().
    """
    host_ns = np.zeros(len(ts_ns), np.int64)
    np.subtract(leave_ns[1:], ts_ns[:-1], out=host_ns[:-1])
    host_ns[:-1] -= wait_ns[1:]
    np.maximum(host_ns, 0, out=host_ns)
    host_ns *= is_last
    return host_ns


def ends_on_host_clock(ts_ns: Array, gpu_start_ns: Array, gpu_end_ns: Array) -> Array | None:
    """The ends of collectives on the host's clock: int64 (n,), UNKNOWN where the end is unknown; None without any.

    ts_ns: int64 (n,), arrivals. The GPU's times are on the host's clock if no collective starts before its arrival, and
    none starts a minute after it.
    """
    if is_one_value(gpu_end_ns):
        return None
    known = (gpu_start_ns != UNKNOWN) & (gpu_end_ns != UNKNOWN)
    after_ns = (gpu_start_ns - ts_ns)[known]
    if not len(after_ns) or after_ns.min() < 0 or after_ns.max() > _MAX_AHEAD_NS:
        return None
    return np.where(known, gpu_end_ns, UNKNOWN)
