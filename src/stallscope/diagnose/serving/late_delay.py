"""A late part of a request with the activity of the engine in this time."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from stallscope.diagnose.serving.engine_threads import (
    BUSY,
    FULL_PIPE,
    SENDS,
    Threads,
    most_of_a_thread,
    overlap_ns,
    waits_for_events,
)
from stallscope.diagnose.serving.late_requests import Late
from stallscope.diagnose.serving.request_path import Part, Segment, parts, path
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category

HALF = 0.5
"""A reason explains a delay if it covers this share of it."""


@dataclass(frozen=True)
class RunningThread:
    """A thread that ran. line: the most frequent line of its code."""

    pid: int
    line: str


@dataclass(frozen=True)
class Delay:
    """A late request with its context. requests: of the same engine. off: of its threads, in the late interval.

    late_spans: all late intervals, disjoint: int64 (n, 2).
    """

    late: Late
    threads: Threads
    requests: Array
    off: Array
    late_spans: Array = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def begin_ns(self) -> int:
        return self.late.begin_ns

    @property
    def end_ns(self) -> int:
        return self.late.end_ns

    @property
    def min_ns(self) -> float:
        return HALF * self.late.excess_ns

    @cached_property
    def running_ns(self) -> int:
        """Time that the thread which writes the response spent on the CPU."""
        row = self.late.request
        tid = row["writer_tid"] or row["tid"]
        off = self.off[(self.off["pid"] == row["pid"]) & (self.off["tid"] == tid)]
        return max(self.end_ns - self.begin_ns - self.longest_ns(off), 0)

    @cached_property
    def is_holder_known(self) -> bool:
        """Whether the thread that writes the response was off the CPU at times in the late interval, or was sampled.

        A thread without rows may still wait: a wait has its row when the thread is woken.
        """
        row = self.late.request
        tid = row["writer_tid"] or row["tid"]
        off, sampled = self.off, self.threads.sampled(self.begin_ns, self.end_ns)
        is_off = (off["pid"] == row["pid"]) & (off["tid"] == tid)
        is_sampled = (sampled["owner_pid"] == row["pid"]) & (sampled["tid"] == tid)
        busy_ns = int(sampled["ns"][is_sampled & np.isin(sampled["category"], BUSY)].sum())
        is_sampled_at_work = 4 * busy_ns >= self.min_ns
        # A thread of a pool is often followed only since it has read the request: nothing is known of it before.
        return bool(is_sampled_at_work or (self.late.part != "pickup" and is_off.any()))

    @cached_property
    def path(self) -> list[Segment]:
        """The threads that held the request in the late interval, one after the other."""
        row = self.late.request
        tid = row["tid"] if self.late.part == "pickup" else row["writer_tid"] or row["tid"]
        thread = int(row["pid"]), int(tid)
        segments = path(self.threads.waits, self.threads.pids, thread, self.begin_ns, self.end_ns)
        if self.late.part != "pickup" or self.is_holder_known:
            return segments
        return [
            replace(each, category=Category.NONE) if each.category == Category.ON_CPU else each
            for each in segments
        ]

    @property
    def is_path_known(self) -> bool:
        """Whether the threads that held the request for most of the delay are known: the ledger follows a few."""
        unknown_ns = sum(each.ns for each in self.path if each.category == Category.NONE)
        return unknown_ns < self.min_ns

    @cached_property
    def has_others_in_time(self) -> bool:
        """Whether another request of the process was open for most of the delay, and not late itself."""
        rows, own = self.requests, self.late.request
        rows = rows[
            (rows["pid"] == own["pid"]) & (rows["ts_ns"] != own["ts_ns"]) & (rows["first_ns"] != UNKNOWN)
        ]
        shared_ns = np.minimum(rows["end_ns"], self.end_ns) - np.maximum(rows["read_ns"], self.begin_ns)
        longest_ns = np.maximum(rows["gap_ns"], rows["first_ns"] - rows["ts_ns"])
        return bool(((shared_ns >= self.min_ns) & (longest_ns < self.min_ns)).any())

    @property
    def leaves_front_end(self) -> bool:
        """Whether the process with the connection hands the request over to another process."""
        return any(each.pid != self.late.request["pid"] for each in self.path)

    @property
    def holder_pid(self) -> int:
        """The process that held the request for most of the late interval."""
        times = Counter({int(self.late.request["pid"]): 0})
        for each in self.path:
            times[each.pid] += each.ns
        return times.most_common(1)[0][0]

    def parts(self, *, has_front_end: bool) -> list[Part]:
        """The parts of the late interval, and the states of the threads that held the request in each."""
        front_pid = int(self.late.request["pid"]) if has_front_end else 0
        served_ns = self._served_ns if self.late.part == "first" else None
        return parts(self.path, front_pid, part=self.late.part, served_ns=served_ns, sends=SENDS)

    @property
    def _served_ns(self) -> int:
        """The engine began to work on the request: at once, or after the earlier requests had their first token."""
        rows, row = self.requests, self.late.request
        waiting = rows[(rows["ts_ns"] < row["ts_ns"]) & (rows["first_ns"] > self.begin_ns)]
        if not len(waiting):
            return self.begin_ns
        first_ns = waiting["first_ns"][waiting["first_ns"] < self.end_ns].max(initial=self.begin_ns)
        return max(int(first_ns), self.end_ns - self.late.typical_ns)

    @property
    def is_late_by_work(self) -> bool:
        """Whether the request would be late on an idle machine: its thread has that much work to do."""
        return self.is_holder_known and self.running_ns - self.late.typical_ns >= self.late.min_late_ns

    @property
    def holder_tids(self) -> tuple[int, int]:
        """The threads that read the request and write the response."""
        row = self.late.request
        return int(row["tid"]), int(row["writer_tid"])

    def of_holder(self, *categories: Category) -> Array:
        """Intervals off the CPU of the threads that read the request or write the response."""
        is_holder = (self.off["pid"] == self.late.request["pid"]) & np.isin(self.off["tid"], self.holder_tids)
        return self.off[is_holder & np.isin(self.off["category"], categories)]

    @cached_property
    def is_handed_over(self) -> bool:
        """Whether the threads of the request wait for another thread or process: for a message, or for a lock."""
        waits = self.of_holder(Category.NET, Category.LOCK)
        return self.longest_ns(waits[~np.isin(waits["syscall_nr"], SENDS)]) >= self.min_ns

    def of_others(self, *categories: Category) -> Array:
        """Intervals of the other threads that begin and end within the late interval; none if the holder works.

        An idle thread waits from before the late interval until after it, or waits as often at other times.
        """
        if not self.is_handed_over:
            return self.off[:0]
        rows = self.off[np.isin(self.off["category"], categories)]
        slack_ns = int((1 - HALF) * (self.end_ns - self.begin_ns) / 2)
        is_inside = (rows["ts_ns"] >= self.begin_ns - slack_ns) & (
            rows["ts_ns"] + rows["duration_ns"] <= self.end_ns + slack_ns
        )
        return self.without_habits(rows[is_inside])

    def without_habits(self, rows: Array) -> Array:
        """The intervals of threads that are off the CPU for half of the delay, and less often at other times."""
        is_cause = np.zeros(len(rows), bool)
        for tid in np.unique(rows["tid"]):
            own = rows["tid"] == tid
            longest = rows[own][rows[own]["duration_ns"].argmax()]
            if self.longest_ns(rows[own]) >= self.min_ns:
                is_cause |= own & (not self.threads.is_habit(longest, self.late_spans))
        return rows[is_cause]

    def of_engine(self, *categories: Category) -> Array:
        return self.off[np.isin(self.off["category"], categories)]

    @cached_property
    def foreign(self) -> Array:
        """Intervals in which another program had the CPU of a thread of the engine."""
        rows = self.of_engine(Category.PREEMPTED)
        return rows[~np.isin(rows["by_pid"], self.threads.pids)]

    @cached_property
    def waits_for_cpu_ns(self) -> Counter[int]:
        """Time in which the holder of the request waited for a CPU that no thread of the engine used, by process.

        The kernel names the thread that got the CPU first, which other programs may have interrupted at once. Empty if
        the ledger follows only one thread of the engine: then another thread may have used the CPU.
        """
        waits_ns = Counter[int]()
        for each in self.path:
            waits_ns[each.pid] += each.ns * (each.category == Category.PREEMPTED)
        waits = self.threads.waits
        ran_ns = [
            waits.running_ns(tid, self.begin_ns, self.end_ns)
            for _, tid, (since_ns, until_ns) in waits.threads()
            if since_ns < self.end_ns and until_ns > self.begin_ns
        ]
        if len(ran_ns) < 2:
            return Counter()
        return Counter({pid: max(ns - sum(ran_ns), 0) for pid, ns in waits_ns.items()})

    @cached_property
    def own_running_thread(self) -> RunningThread | None:
        """The thread of the engine that had a CPU for most of the delay: the holder may have waited for this CPU.

        By the ledger, from the first until the last wait of the thread, and by samples.
        """
        waits, span = self.threads.waits, (self.begin_ns, self.end_ns)
        sampled = self.threads.sampled(*span)
        busy = sampled[np.isin(sampled["category"], BUSY)]
        ran = [
            (waits.running_ns(tid, *span), pid, tid, followed)
            for pid, tid, followed in waits.threads()
            if tid in busy["tid"]
        ]
        for ns, pid, tid, followed in sorted(ran, key=lambda each: -each[0]):
            if ns < self.min_ns:
                break
            if self._share_outside(tid, *followed) < HALF * ns / (span[1] - span[0]):
                return RunningThread(pid, self.threads.line_of(busy[busy["tid"] == tid], "n"))
        return None

    @cached_property
    def full_pipes(self) -> list[bytes]:
        """The full pipes of the samples in the late interval, each with its reader."""
        rows = self.threads.sampled(self.begin_ns, self.end_ns)
        return [text for text in rows["object"].tolist() if text.startswith(FULL_PIPE)]

    def thread_that_ran(
        self, pids: Collection[int], *, without: Collection[int], is_sampled: bool = False
    ) -> RunningThread | None:
        """The thread that ran most in the delay, for most of it, and runs less at other times.

        is_sampled: it was also sampled on a CPU in the delay. The ledger may have stopped following a thread that seems
        to run.
        """
        waits, span = self.threads.waits, (self.begin_ns, self.end_ns)
        ran = [
            (waits.running_ns(tid, *span), pid, tid, followed)
            for pid, tid, followed in waits.threads()
            if pid in pids and tid not in without and followed[0] < span[0] and followed[1] > span[1]
        ]
        for ns, pid, tid, followed in sorted(ran, key=lambda each: -each[0]):
            if ns < self.min_ns:
                break
            line = self.threads.frequent_line(
                *span, pid=pid, tids=[tid], category=Category.ON_CPU, is_sampled=is_sampled
            )
            share = ns / (span[1] - span[0])
            if not line or waits_for_events(line):
                continue
            if self._share_outside(tid, *followed) < HALF * share:
                return RunningThread(pid, line)
        return None

    def _share_outside(self, tid: int, since_ns: int, until_ns: int) -> float:
        """The share of the time outside the late intervals in which a thread runs, while it was followed."""
        waits = self.threads.waits
        late = np.clip(self.late_spans, since_ns, until_ns)
        inside_ns = sum(waits.running_ns(tid, begin, end) for begin, end in late.tolist() if end > begin)
        outside_ns = waits.running_ns(tid, since_ns, until_ns) - inside_ns
        return outside_ns / max(until_ns - since_ns - int((late[:, 1] - late[:, 0]).sum()), 1)

    def longest_ns(self, rows: Array) -> int:
        return most_of_a_thread(rows, self.begin_ns, self.end_ns)

    def line(self, rows: Array) -> str | None:
        """The line of code of these intervals: by their stacks, otherwise by samples of their threads."""
        if line := self.threads.line_of(rows, "duration_ns"):
            return line
        samples = self.threads.sampled_in_states(self.begin_ns, self.end_ns, rows)
        return self.threads.line_of(samples, "n") or None

    def object_of(self, rows: Array) -> str:
        """The most frequent object of the waits of these threads in these states, by samples; empty if unknown."""
        samples = self.threads.sampled_in_states(self.begin_ns, self.end_ns, rows)
        names = Counter[str]()
        for row in samples[samples["object"] != b""]:
            names[row["object"].decode("utf-8", "replace")] += int(row["n"])
        return names.most_common(1)[0][0] if names else ""

    def pid_of(self, rows: Array) -> int:
        """The process with most of the time of these rows."""
        times = Counter[int]()
        for pid, ns in zip(
            rows["pid"].tolist(), overlap_ns(rows, self.begin_ns, self.end_ns).tolist(), strict=True
        ):
            times[pid] += ns
        return times.most_common(1)[0][0]


def merged(spans: list[tuple[int, int]]) -> Array:
    """The union of intervals: disjoint intervals in order, int64 (n, 2)."""
    out: list[list[int]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return np.array(out, np.int64).reshape(-1, 2)
