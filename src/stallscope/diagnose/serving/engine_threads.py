"""The activity of an engine's threads within a time interval: intervals off the CPU, and sampled code locations.

An interval off the CPU is known from 1 ms on. Samples are counted per second, so their times are accurate to a second.
The sampler slows down if an engine has many Python processes, so a sample stands for the time since the last sample.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stallscope.diagnose.processes.code_locations import LOCKS, function, user_line
from stallscope.diagnose.serving.request_path import Waits
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, HostKind, OffCpuFlag, SampleRole
from stallscope.events.trace import Trace

SENDS = (1, 20, 44, 46, 307)
"""write, writev, sendto, sendmsg, sendmmsg (x86-64)."""

RECEIVES = (0, 19, 45, 47, 299)
"""read, readv, recvfrom, recvmsg, recvmmsg (x86-64)."""

POLLS = (7, 23, 270, 271)
"""poll, select, pselect6, ppoll (x86-64): a call on a socket with a timeout waits in them."""

FULL_PIPE = b"full pipe"
"""How the object of a sample at a full pipe begins."""

FILE_LOCKS = (72, 73)
"""fcntl, flock (x86-64)."""

WRITES = (1, 20)
"""write, writev: to a socket, a pipe or a file."""

_EVENT_WAIT = re.compile(r"/selectors\.py:\d+ ")

_SECOND_NS = 10**9
_MAX_SAMPLE_NS = 3 * _SECOND_NS
"""A sample does not stand for more time: nothing was sampled before it."""

BUSY = (Category.ON_CPU, Category.PREEMPTED)
_ON_GPU = (Category.LAUNCH, Category.COPY, Category.ALLOC, Category.DEVICE, Category.WAIT_GPU)
_ALWAYS_BUSY = 0.7
"""A thread that is busy in more than this share of the seconds is always busy, like the loop of an engine."""

_HABIT = 0.3
"""A thread that spends this share of the time also outside late intervals in the same way does not cause them."""


@dataclass(frozen=True)
class Running:
    """A line of code, and the time that its function ran beyond its typical time."""

    line: str
    excess_ns: int


@dataclass(frozen=True)
class Threads:
    """The rows of one engine. pids: its processes. offcpu: intervals, split at the wakeup. waits: whole intervals.

    samples: as with_times() returns them.
    """

    trace: Trace
    pids: tuple[int, ...]
    offcpu: Array
    samples: Array
    host: Array
    waits: Waits

    @staticmethod
    def of(trace: Trace, node: int, pids: tuple[int, ...]) -> "Threads":
        def own(rows: Array) -> Array:
            return rows[(rows["node"] == node) & np.isin(rows["pid"], pids)]

        off = own(trace.offcpu)
        return Threads(
            trace,
            pids,
            split_at_wakeup(off),
            with_times(own(trace.samples)),
            own(trace.host_events),
            Waits(off),
        )

    def off(self, begin_ns: int, end_ns: int) -> Array:
        """Intervals off the CPU that overlap this interval."""
        rows = self.offcpu
        return rows[(rows["ts_ns"] < end_ns) & (rows["ts_ns"] + rows["duration_ns"] > begin_ns)]

    def sampled(self, begin_ns: int, end_ns: int) -> Array:
        """Samples of the times that overlap this interval."""
        return _in(self.samples, begin_ns, end_ns)

    @cached_property
    def at_full_pipes(self) -> list[int]:
        """The processes whose threads were sampled at a full pipe at any time."""
        is_at_pipe = np.char.startswith(self.samples["object"], FULL_PIPE)
        return np.unique(self.samples["owner_pid"][is_at_pipe]).tolist()

    def line_of(self, rows: Array, weight: str) -> str:
        """The most frequent line of the user's code in these rows; empty without stacks. weight: a column."""
        lines = Counter[str]()
        for row in rows:
            frames = self.trace.stacks.get(int(row["stack"]), ())
            if row["stack"] != UNKNOWN and (line := user_line(frames)):
                lines[line] += int(row[weight])
        return lines.most_common(1)[0][0] if lines else ""

    def running(
        self,
        begin_ns: int,
        end_ns: int,
        *,
        pid: int,
        without: Collection[int] = (),
        only: Collection[int] | None = None,
    ) -> Running | None:
        """The function of a process that ran, or wanted a CPU; the function with most time beyond its typical time.

        without: threads that are left out. only: threads that are examined; None: all.
        """
        rows = self.samples
        rows = rows[(rows["pid"] == pid) & (rows["owner_pid"] == pid) & ~np.isin(rows["tid"], list(without))]
        if only is not None:
            rows = rows[np.isin(rows["tid"], list(only))]
        busy = rows[np.isin(rows["category"], BUSY)]
        n_late = _seconds(_in(rows, begin_ns, end_ns))
        n_other = _seconds(rows) - n_late
        inside, always = self._functions(_in(busy, begin_ns, end_ns)), self._functions(busy)
        excess = {
            name: lines.total() - n_late * (always[name].total() - lines.total()) / max(n_other, 1)
            for name, lines in inside.items()
        }
        if not excess:
            return None
        name = max(excess, key=lambda each: (excess[each], inside[each].total()))
        return Running(inside[name].most_common(1)[0][0], int(max(excess[name], 0)))

    def sampled_in_states(self, begin_ns: int, end_ns: int, rows: Array) -> Array:
        """Samples of the threads of these rows in the states of these rows."""
        samples = self.sampled(begin_ns, end_ns)
        is_same = np.isin(samples["tid"], rows["tid"]) & np.isin(samples["category"], rows["category"])
        return samples[is_same]

    def frequent_line(
        self,
        begin_ns: int,
        end_ns: int,
        *,
        pid: int,
        tids: Collection[int],
        category: Category,
        is_sampled: bool = False,
    ) -> str:
        """The most frequent line of threads of a process in a state, by samples of this time, or of the whole trace.

        is_sampled: only by samples of this time; empty without them.
        """
        rows = self.samples
        is_own = (
            (rows["owner_pid"] == pid) & np.isin(rows["tid"], list(tids)) & (rows["category"] == category)
        )
        own = rows[is_own]
        line = self.line_of(_in(own, begin_ns, end_ns), "n")
        return line if line or is_sampled else self.line_of(own, "n")

    def _functions(self, rows: Array) -> dict[tuple[str, str], Counter[str]]:
        """Sampled time by function and line of the user's code."""
        out: dict[tuple[str, str], Counter[str]] = {}
        for row in rows:
            frames = self.trace.stacks.get(int(row["stack"]), ()) if row["stack"] != UNKNOWN else ()
            # A thread on the CPU in a wait has just been woken.
            if (line := user_line(frames)) and not LOCKS.search(frames[0]) and not waits_for_events(line):
                out.setdefault(function(line), Counter())[line] += int(row["ns"])
        return out

    def always_busy(self, pid: int) -> list[int]:
        """The threads of a process that run in most of its seconds, or use the GPU, as the loop of an engine does."""
        rows = self.samples[
            (self.samples["pid"] == pid) & np.isin(self.samples["category"], (*BUSY, *_ON_GPU))
        ]
        tids = np.unique(rows["tid"])
        n_seconds = _seconds(rows)
        return [tid for tid in tids.tolist() if _seconds(rows[rows["tid"] == tid]) > _ALWAYS_BUSY * n_seconds]

    def busy_ns(self, begin_ns: int, end_ns: int, *, pid: int, tid: int) -> int:
        """The time that a thread ran, wanted a CPU or used the GPU, by its samples that overlap this interval."""
        rows = self.sampled(begin_ns, end_ns)
        is_busy = (rows["pid"] == pid) & (rows["tid"] == tid) & np.isin(rows["category"], (*BUSY, *_ON_GPU))
        return int(rows["ns"][is_busy].sum())

    def is_habit(self, row: Array, late: Array) -> bool:
        """Whether a thread is often off the CPU like this outside the late intervals. late: int64 (n, 2), disjoint."""
        rows = self.offcpu
        same = rows[(rows["pid"] == row["pid"]) & (rows["tid"] == row["tid"])]
        same = same[(same["category"] == row["category"]) & (2 * same["duration_ns"] >= row["duration_ns"])]
        inside_ns = sum(int(overlap_ns(same, begin, end).sum()) for begin, end in late.tolist())
        outside_ns = int(same["duration_ns"].sum()) - inside_ns
        late_ns = int((late[:, 1] - late[:, 0]).sum())
        span_ns = int(rows["ts_ns"].max() - rows["ts_ns"].min())
        return outside_ns * late_ns > _HABIT * inside_ns * max(span_ns - late_ns, 1)

    def is_throttled(self, begin_ns: int, end_ns: int) -> bool:
        """Whether a control group had used up its CPU quota about this time."""
        rows = self.host[self.host["kind"] == HostKind.THROTTLED]
        ends = rows["ts_ns"] + np.maximum(rows["duration_ns"], _SECOND_NS)
        return bool(((rows["ts_ns"] < end_ns + _SECOND_NS) & (ends > begin_ns - _SECOND_NS)).any())


def with_times(samples: Array) -> Array:
    """Rows of SAMPLES with two more columns. begin_ns: time of the previous sample. ns: the time that they represent.

    The sampler takes one thread of each process at a time, and the other threads of a few processes less often.
    """
    rows = np.zeros(len(samples), [*samples.dtype.descr, ("begin_ns", "<i8"), ("ns", "<i8")])
    for name in samples.dtype.names or ():
        rows[name] = samples[name]
    is_first = rows["role"] == SampleRole.GPU
    series = [is_first, *(~is_first & (rows["pid"] == pid) for pid in np.unique(rows["pid"]))]
    for is_in in series:
        span_ns, n_rounds = _rounds(rows[is_in])
        rows["begin_ns"][is_in] = rows["ts_ns"][is_in] - span_ns
        rows["ns"][is_in] = rows["n"][is_in] * span_ns // n_rounds
    return rows


def _rounds(rows: Array) -> tuple[Array, Array]:
    """The time since the row before it, and the number of samples of a thread, for each row of a series: int64 (n,)."""
    times, inverse = np.unique(rows["ts_ns"], return_inverse=True)
    n_rounds = np.zeros(len(times), np.int64)
    keys, of_key = np.unique(rows[["ts_ns", "owner_pid", "tid"]], return_inverse=True)
    totals = np.bincount(of_key, weights=rows["n"], minlength=len(keys)).astype(np.int64)
    np.maximum.at(n_rounds, np.searchsorted(times, keys["ts_ns"]), totals)
    spans_ns = np.diff(times, prepend=times[:1] - _SECOND_NS)
    return np.minimum(spans_ns, _MAX_SAMPLE_NS)[inverse], np.maximum(n_rounds, 1)[inverse]


def _in(samples: Array, begin_ns: int, end_ns: int) -> Array:
    return samples[(samples["ts_ns"] > begin_ns) & (samples["begin_ns"] < end_ns)]


def _seconds(samples: Array) -> int:
    """The number of seconds with samples."""
    return len(np.unique(samples["ts_ns"]))


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


def waits_for_events(line: str) -> bool:
    """Whether the innermost line of a thread is the wait of an event loop: on a CPU, it has just been woken."""
    return bool(_EVENT_WAIT.search(line))


def most_of_a_thread(rows: Array, begin_ns: int, end_ns: int) -> int:
    """The largest sum of overlaps of one thread, in ns."""
    if not len(rows):
        return 0
    _, thread = np.unique(rows["tid"], return_inverse=True)
    return int(np.bincount(thread, weights=overlap_ns(rows, begin_ns, end_ns)).max())


def is_throttled_row(rows: Array) -> Array:
    """Whether the thread was kept off the CPU by a quota: bool (n,)."""
    return rows["flags"] & OffCpuFlag.THROTTLED > 0
