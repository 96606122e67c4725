"""The path of a late request through the threads of its engine: the thread that held the request at each moment.

The path is followed backward from the thread that writes the response. A thread holds the request while it runs. A wait
that a thread of the engine ended is a hand-over: until the wakeup, the waking thread held the request. So messages over
sockets and pipes, signals through shared memory and released locks are followed from process to process. The time
between a wakeup by another process and the moment at which the thread runs is the pick-up.

Waits of less than 1 ms have no row, so a thread seems to run during them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.evidence_fields import RequestPart
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category

_WAITS = (Category.LOCK, Category.OTHER_OFF, Category.SLEEP, Category.NET, Category.CHILD)
"""Waits that another thread can end."""

_MAX_STEPS = 1000
"""The threads of a path may wake each other many times, even at the same moment."""

_MIN_PART_NS = 50_000
"""Shorter parts and states are not reported."""

PARTS = ("client", "front_end", "hand_over", "queue", "prefill", "decode")
"""The parts of the path of a request. front_end: the process with the connection, if other processes do the work."""


@dataclass(frozen=True)
class Segment:
    """An interval in which a thread held a request. category: NONE where the state of the thread is not known.

    by_pid: the process that got the CPU of a preempted thread. is_pickup: the thread had a message of another process
    and did not run yet.
    """

    pid: int
    tid: int
    begin_ns: int
    end_ns: int
    category: Category
    syscall_nr: int = UNKNOWN
    by_pid: int = UNKNOWN
    is_pickup: bool = False

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class Part:
    """A part of the path: its time, and the states of the threads that held the request, by process."""

    name: str
    states_ns: Counter[tuple[int, Category]] = field(default_factory=Counter)

    @property
    def ns(self) -> int:
        return self.states_ns.total()


class Waits:
    """The waits of the threads of an engine, by thread. rows: of OFFCPU."""

    def __init__(self, rows: Array):
        rows = rows[rows["duration_ns"] > 0]
        rows = rows[np.lexsort((rows["ts_ns"], rows["tid"]))]
        tids, begins = np.unique(rows["tid"], return_index=True)
        ends = [*begins.tolist()[1:], len(rows)]
        self._rows = {
            tid: rows[begin:end]
            for tid, begin, end in zip(tids.tolist(), begins.tolist(), ends, strict=False)
        }

    def running_ns(self, tid: int, begin_ns: int, end_ns: int) -> int:
        """How long a thread ran within an interval between its first and its last wait."""
        rows = self._rows[tid]
        ends_ns = rows["ts_ns"] + rows["duration_ns"]
        begin_ns, end_ns = max(begin_ns, int(rows["ts_ns"][0])), min(end_ns, int(ends_ns[-1]))
        off_ns = np.minimum(ends_ns, end_ns) - np.maximum(rows["ts_ns"], begin_ns)
        return max(end_ns - begin_ns - int(np.maximum(off_ns, 0).sum()), 0)

    def threads(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Process, thread, and the time from its first to its last wait."""
        for tid, rows in self._rows.items():
            yield (
                int(rows["pid"][0]),
                tid,
                (int(rows["ts_ns"][0]), int(rows["ts_ns"][-1] + rows["duration_ns"][-1])),
            )

    def last(self, tid: int, at_ns: int) -> Array | None:
        """The last wait of a thread that began before a moment; None without such a wait."""
        rows = self._rows.get(tid)
        if rows is None:
            return None
        i = int(np.searchsorted(rows["ts_ns"], at_ns, side="left"))
        row: Array | None = rows[i - 1] if i else None
        return row


def path(
    waits: Waits, pids: Collection[int], thread: tuple[int, int], begin_ns: int, end_ns: int
) -> list[Segment]:
    """The segments of an interval, disjoint and in order. pids: of the engine. thread: at its end."""
    (pid, tid), at_ns, out = thread, end_ns, list[Segment]()

    def held(
        since_ns: int,
        category: Category,
        *,
        syscall_nr: int = UNKNOWN,
        by_pid: int = UNKNOWN,
        is_pickup: bool = False,
    ) -> int:
        """Add the time since a moment. Returns the moment at which the path continues."""
        start_ns = max(since_ns, begin_ns)
        if start_ns < at_ns:
            out.append(Segment(pid, tid, start_ns, at_ns, category, syscall_nr, by_pid, is_pickup))
        return min(start_ns, at_ns)

    for _ in range(_MAX_STEPS):
        if at_ns <= begin_ns:
            break
        row = waits.last(tid, at_ns)
        if row is None:
            break
        category, waker_pid, waker_tid = (int(row[name]) for name in ("category", "waker_pid", "waker_tid"))
        ran_ns = int(row["ts_ns"] + row["duration_ns"])
        ready_ns = ran_ns - max(int(row["runnable_ns"]), 0) * (category != Category.PREEMPTED)
        at_ns = held(ran_ns, Category.ON_CPU)
        at_ns = held(ready_ns, Category.PREEMPTED, is_pickup=waker_pid in pids and waker_pid != pid)
        is_handed_over = category in _WAITS and waker_pid in pids and waker_tid != tid
        if is_handed_over and at_ns == ready_ns:
            pid, tid = waker_pid, waker_tid
        else:
            by_pid, syscall_nr = int(row["by_pid"]), int(row["syscall_nr"])
            at_ns = held(int(row["ts_ns"]), Category(category), syscall_nr=syscall_nr, by_pid=by_pid)
    held(begin_ns, Category.NONE)
    return out[::-1]


def parts(
    segments: Iterable[Segment], front_pid: int, *, part: str, served_ns: int | None, sends: Collection[int]
) -> list[Part]:
    """The PARTS of a path that have time.

    front_pid: the process with the connection if other processes do the work; otherwise 0. part: of a Late. served_ns:
    the engine began to work on the prompt; None in another part. sends: the system calls that wait for the client.
    """
    out = {name: Part(name) for name in PARTS}

    def add(name: str, each: Segment, ns: int) -> None:
        if ns > 0:
            out[name].states_ns[each.pid, each.category] += ns

    for each in segments:
        if each.is_pickup:
            add("hand_over", each, each.ns)
        elif each.category == Category.NET and each.syscall_nr in sends:
            add("client", each, each.ns)
        elif part == "pickup" or each.pid == front_pid:
            add("front_end", each, each.ns)
        elif served_ns is not None:
            queue_ns = min(max(served_ns - each.begin_ns, 0), each.ns)
            add("queue", each, queue_ns)
            add("prefill", each, each.ns - queue_ns)
        else:
            add("decode", each, each.ns)
    return [part for part in out.values() if part.ns]


def mean_parts(paths: Collection[list[Part]]) -> list[RequestPart] | None:
    """The mean parts of some paths, each with the process that has most of its time, and the states of its threads."""
    out = []
    for name in PARTS:
        states_ns = Counter[tuple[int, Category]]()
        for part in (part for each in paths for part in each if part.name == name):
            states_ns.update(part.states_ns)
        if states_ns.total() >= _MIN_PART_NS * len(paths):
            out.append(_mean_part(name, states_ns, len(paths)))
    return out or None


def _mean_part(name: str, states_ns: Counter[tuple[int, Category]], n: int) -> RequestPart:
    by_pid = Counter[int]()
    for (pid, _), ns in states_ns.items():
        by_pid[pid] += ns
    ((main_pid, _),) = by_pid.most_common(1)
    states = {
        category.name.lower() if category else "unknown": round(ns / n / 1e6, 3)
        for (pid, category), ns in states_ns.most_common()
        if pid == main_pid and ns >= _MIN_PART_NS * n
    }
    return RequestPart(name, round(states_ns.total() / n / 1e6, 3), main_pid, states)
