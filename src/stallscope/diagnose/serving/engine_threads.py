"""The activity of an engine's threads within a time interval: intervals off the CPU, and sampled code locations.

An interval off the CPU is known from 1 ms on. Samples are counted per second, so their times are accurate to a second.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.processes.code_locations import user_line
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, HostKind, OffCpuFlag, SampleRole
from stallscope.events.trace import Trace

SENDS = (1, 20, 44, 46, 307)
"""write, writev, sendto, sendmsg, sendmmsg (x86-64)."""

_SECOND_NS = 10**9


@dataclass(frozen=True)
class Threads:
    """The rows of one engine. pids: its processes."""

    trace: Trace
    pids: tuple[int, ...]
    offcpu: Array
    samples: Array
    host: Array

    @staticmethod
    def of(trace: Trace, node: int, pids: tuple[int, ...]) -> "Threads":
        def own(rows: Array) -> Array:
            return rows[(rows["node"] == node) & np.isin(rows["pid"], pids)]

        off = own(trace.offcpu)
        return Threads(trace, pids, split_at_wakeup(off), own(trace.samples), own(trace.host_events))

    def off(self, begin_ns: int, end_ns: int) -> Array:
        """Intervals off the CPU that overlap this interval."""
        rows = self.offcpu
        return rows[(rows["ts_ns"] < end_ns) & (rows["ts_ns"] + rows["duration_ns"] > begin_ns)]

    def sampled(self, begin_ns: int, end_ns: int) -> Array:
        """Samples of the seconds that overlap this interval."""
        rows = self.samples
        return rows[(rows["ts_ns"] > begin_ns) & (rows["ts_ns"] - _SECOND_NS < end_ns)]

    def line_of(self, rows: Array, weight: Callable[[Array], int]) -> str:
        """The most frequent line of the user's code in these rows; empty without stacks."""
        lines = Counter[str]()
        for row in rows:
            frames = self.trace.stacks.get(int(row["stack"]), ())
            if row["stack"] != UNKNOWN and (line := user_line(frames)):
                lines[line] += weight(row)
        return lines.most_common(1)[0][0] if lines else ""

    def running_line(self, begin_ns: int, end_ns: int, *, of_others: bool = False) -> str:
        """The line that ran most often: of the followed threads, or of the threads that they wait for."""
        rows = self.sampled(begin_ns, end_ns)
        role = SampleRole.SAME_PROCESS if of_others else SampleRole.GPU
        chosen = rows[(rows["category"] == Category.ON_CPU) & (rows["role"] == role)]
        return self.line_of(chosen, lambda row: int(row["n"]))

    def is_throttled(self, begin_ns: int, end_ns: int) -> bool:
        """Whether a control group had used up its CPU quota about this time."""
        rows = self.host[self.host["kind"] == HostKind.THROTTLED]
        ends = rows["ts_ns"] + np.maximum(rows["duration_ns"], _SECOND_NS)
        return bool(((rows["ts_ns"] < end_ns + _SECOND_NS) & (ends > begin_ns - _SECOND_NS)).any())


def split_at_wakeup(off: Array) -> Array:
    """Intervals off the CPU; the time after the wakeup is a separate interval in which the CPU was taken."""
    off = off[off["duration_ns"] > 0].copy()
    is_woken = (off["runnable_ns"] > 0) & (off["category"] != Category.PREEMPTED)
    runnable = off[is_woken].copy()
    off["duration_ns"][is_woken] -= runnable["runnable_ns"]
    runnable["ts_ns"] += runnable["duration_ns"] - runnable["runnable_ns"]
    runnable["duration_ns"], runnable["category"] = runnable["runnable_ns"], Category.PREEMPTED
    runnable["by_pid"], runnable["by_comm"], runnable["stack"] = UNKNOWN, b"", UNKNOWN
    return np.concatenate([off, runnable])


def overlap_ns(rows: Array, begin_ns: int, end_ns: int) -> Array:
    """The time of each row within the interval: int64 (n,)."""
    begins = np.maximum(rows["ts_ns"], begin_ns)
    return np.maximum(np.minimum(rows["ts_ns"] + rows["duration_ns"], end_ns) - begins, 0)


def most_of_a_thread(rows: Array, begin_ns: int, end_ns: int) -> int:
    """The largest sum of overlaps of one thread, in ns."""
    if not len(rows):
        return 0
    _, thread = np.unique(rows["tid"], return_inverse=True)
    return int(np.bincount(thread, weights=overlap_ns(rows, begin_ns, end_ns)).max())


def is_throttled_row(rows: Array) -> Array:
    """Whether the thread was kept off the CPU by a quota: bool (n,)."""
    return rows["flags"] & OffCpuFlag.THROTTLED > 0
