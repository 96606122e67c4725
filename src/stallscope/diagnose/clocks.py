"""All arrivals on one clock, and clock readings as wall time.

One host: its CLOCK_MONOTONIC serves as it is.
"""

import numpy as np

from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.trace import Clock, Trace


def arrivals_ns(line: Timeline) -> Array:
    """Arrivals on the common clock: int64 (n,)."""
    return line.rows["ts_ns"].astype(np.int64)


def wall_ns(trace: Trace, at_ns: float, node: int = 0) -> int | None:
    """Wall time of a moment of a node's monotonic clock, by its nearest reading; None without readings."""
    readings = [clock for clock in trace.clocks if clock.node == node]
    if not readings:
        return None
    nearest: Clock = min(readings, key=lambda clock: abs(clock.monotonic_ns - at_ns))
    return int(at_ns) - nearest.monotonic_ns + nearest.wall_ns
