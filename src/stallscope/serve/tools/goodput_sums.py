"""Sums of GPU time by job or owner, and by day: productive, and lost to stragglers, hangs, restarts, input, idleness.

A job holds one GPU for each of its ranks, from its first to its last collective. Losses are the GPU seconds of
verdicts, in proportion to the part of their time in the window. A restart is a pause between two jobs of one owner
and name.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from stallscope.events.owner import column

STRAGGLERS, HANGS, RESTARTS, INPUT, IDLE = LOSSES = ("stragglers", "hangs", "restarts", "input", "idle")
INPUT_CAUSES = frozenset({"input_starvation", "block_io"})
_HANGS = frozenset({"hang", "mismatch", "failure"})
_DAY_NS = 86_400 * 10**9
_MAX_PAUSE_NS = 2 * 3_600 * 10**9
"""A longer pause between two jobs is not a restart: the scheduler has given the GPUs to other jobs."""

Row = Mapping[str, Any]
Cell = tuple[str | None, str | None]
"""Group and day; the day is None without days."""


@dataclass
class GpuTime:
    """GPU seconds. held: of running jobs, of their restarts, and of idle GPUs."""

    held: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    jobs: set[str] = field(default_factory=set)

    @property
    def productive(self) -> float:
        """The time without a known loss: an upper bound of the productive time."""
        return max(self.held - sum(self.lost.values()), 0.0)


@dataclass(frozen=True)
class Window:
    """begin_ns, end_ns: since 1970. has_days: one cell for each UTC day."""

    begin_ns: int
    end_ns: int
    has_days: bool = False

    def parts(self, begin_ns: int, end_ns: int) -> Iterator[tuple[str | None, float]]:
        """The day and the seconds of each part of an interval within the window."""
        at_ns, last_ns = max(begin_ns, self.begin_ns), min(end_ns, self.end_ns)
        while at_ns < last_ns:
            until_ns = min(last_ns, (at_ns // _DAY_NS + 1) * _DAY_NS) if self.has_days else last_ns
            yield (_day(at_ns) if self.has_days else None), (until_ns - at_ns) / 1e9
            at_ns = until_ns


def gpu_times(
    jobs: Sequence[Row], verdicts: Sequence[Row], *, by: str, window: Window
) -> dict[Cell, GpuTime]:
    """The GPU time of each group. by: job, or a label of the owner."""
    cells: dict[Cell, GpuTime] = defaultdict(GpuTime)
    known = {job["job"]: job for job in jobs}
    for job in jobs:
        for day, seconds in window.parts(*_times(job)):
            cell = cells[_group(job, by), day]
            cell.held += seconds * job["n_ranks"]
            cell.jobs.add(job["job"])
    for earlier, later in _restarts(jobs):
        for day, seconds in window.parts(_times(earlier)[1], _times(later)[0]):
            cell = cells[_group(later, by), day]
            cell.held += seconds * later["n_ranks"]
            cell.lost[RESTARTS] += seconds * later["n_ranks"]
    for verdict in verdicts:
        _add_loss(cells, verdict, known.get(verdict["job"]), by, window)
    return dict(cells)


def _add_loss(cells: dict[Cell, GpuTime], verdict: Row, job: Row | None, by: str, window: Window) -> None:
    begin_ns, end_ns = verdict["since_ns"], verdict["until_ns"]
    if verdict["kind"] == "inconclusive" or None in (begin_ns, end_ns, verdict["gpu_seconds"]):
        return
    kind = _loss(verdict)
    length_s = max(end_ns - begin_ns, 1) / 1e9
    for day, seconds in window.parts(begin_ns, max(end_ns, begin_ns + 1)):
        lost = verdict["gpu_seconds"] * seconds / length_s
        cell = cells[_group(job or verdict, by), day]
        cell.lost[kind] += lost
        cell.held += lost if kind == IDLE else 0.0


def _loss(verdict: Row) -> str:
    if verdict["kind"] == "idle":
        return IDLE
    if verdict["cause"] in INPUT_CAUSES:
        return INPUT
    return HANGS if verdict["kind"] in _HANGS else STRAGGLERS


def _times(job: Row) -> tuple[int, int]:
    """Begin and end; an empty interval where the begin is not known."""
    begin_ns = job["begin_ns"] or 0
    return begin_ns, max((job["ended_ns"] or job["last_ns"] or 0) if begin_ns else 0, begin_ns)


def _restarts(jobs: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Consecutive jobs of one owner and name, with a short pause between them."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for job in jobs:
        if (key := _name(job)) and job["begin_ns"]:
            groups[key].append(job)
    for group in groups.values():
        ordered = sorted(group, key=_times)
        for earlier, later in pairwise(ordered):
            if 0 < _times(later)[0] - _times(earlier)[1] <= _MAX_PAUSE_NS:
                yield earlier, later


def _name(job: Row) -> tuple[Any, ...] | None:
    """The identity of a job over its restarts: scheduler's number, workload, or user and name; None if unknown."""
    number, workload, name = (job[column(label)] for label in ("job", "workload", "job_name"))
    if number:
        return job["cluster_id"], "job", number
    if workload:
        return job["cluster_id"], job[column("namespace")], workload
    return (job["cluster_id"], job[column("user")], name) if name else None


def _group(row: Row, by: str) -> str | None:
    if by != "job":
        return row[column(by)] or None
    number, name = row[column("job")], row[column("job_name")] or row[column("workload")]
    words = " ".join(filter(None, (number, f"({name})" if number and name else name)))
    return words or row["job"] or None


def _day(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d")
