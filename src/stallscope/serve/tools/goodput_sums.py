"""Sums of GPU time by job or owner, and by day: productive, and lost to stragglers, hangs, restarts, input, idleness.

A job holds one GPU for each of its ranks, from its start to its end, or to the end of its last verdict. Losses are the
GPU seconds of verdicts, in proportion to the part of their time in the window; together they are at most the time of
the job. A restart is a pause between two jobs of one owner and name. Productive and lost time add up to the held time.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from stallscope.events.goodput_parts import HANGS, IDLE, INPUT, RESTARTS, STRAGGLERS
from stallscope.events.owner import column

INPUT_CAUSES = frozenset({"input_starvation", "block_io"})
_HANGS = frozenset({"hang", "mismatch", "failure"})
_DAY_NS = 86_400 * 10**9
_MAX_PAUSE_NS = 2 * 3_600 * 10**9
"""A longer pause between two jobs is not a restart: the scheduler has given the GPUs to other jobs."""

Row = Mapping[str, Any]
Holders = dict[tuple[Any, ...], list[tuple[Row, int]]]
Cell = tuple[str | None, str | None]
"""Group and day; the day is None without days."""


@dataclass
class GpuTime:
    """GPU seconds. held: of running jobs, of their restarts, and of idle GPUs.

    n_unknown_costs: verdicts whose loss is not known, and not in `lost`.
    """

    held: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    jobs: set[str] = field(default_factory=set)
    n_unknown_costs: int = 0

    @property
    def productive(self) -> float:
        """The time without a known loss: an upper bound of the productive time."""
        return self.held - sum(self.lost.values())

    def limit(self) -> None:
        """Reduce the losses in proportion to the held time: two verdicts may count one moment twice."""
        if (lost := sum(self.lost.values())) > self.held:
            for kind in self.lost:
                self.lost[kind] *= self.held / lost

    def add(self, other: "GpuTime") -> None:
        """Add the time of another job."""
        self.held, self.jobs = self.held + other.held, self.jobs | other.jobs
        for kind, loss in other.lost.items():
            self.lost[kind] += loss


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
    losses = [verdict for verdict in verdicts if _is_loss(verdict)]
    jobs = _with_ends(jobs, losses)
    cells: dict[Cell, GpuTime] = defaultdict(GpuTime)
    for job, day, time in _of_jobs(jobs, losses, window):
        cells[_group(job, by), day].add(time)
    pauses = list(_restarts(jobs))
    for pause in pauses:
        for day, seconds in window.parts(*_times(pause)):
            cell = cells[_group(pause, by), day]
            cell.held += seconds * pause["n_ranks"]
            cell.lost[RESTARTS] += seconds * pause["n_ranks"]
    held_by, paused_by = _holders(jobs), _holders(pauses)
    for verdict in losses:
        if verdict["kind"] == "idle":
            _add_idle(cells, verdict, held_by, paused_by, by=by, window=window)
    for cell in cells.values():
        cell.limit()
    _count_unknown_costs(cells, jobs, verdicts, by=by, window=window)
    return dict(cells)


def _count_unknown_costs(
    cells: dict[Cell, GpuTime], jobs: Sequence[Row], verdicts: Sequence[Row], *, by: str, window: Window
) -> None:
    """Count verdicts without a known loss, each on the first day that it shares with the window."""
    known = {(job["cluster_id"], job["job"]): job for job in jobs}
    for verdict in verdicts:
        if verdict["kind"] == "inconclusive" or _is_loss(verdict):
            continue
        begin_ns, end_ns = verdict["since_ns"], verdict["until_ns"]
        begin_ns = window.begin_ns if begin_ns is None else begin_ns
        days = window.parts(begin_ns, window.end_ns if end_ns is None else max(end_ns, begin_ns + 1))
        if first := next(days, None):
            job = known.get((verdict["cluster_id"], verdict["job"]), verdict)
            cells[_group(job, by), first[0]].n_unknown_costs += 1


def _is_loss(verdict: Row) -> bool:
    known = (verdict["since_ns"], verdict["until_ns"], verdict["gpu_seconds"])
    return verdict["kind"] != "inconclusive" and None not in known


def _with_ends(jobs: Sequence[Row], losses: Sequence[Row]) -> list[Row]:
    """The jobs. A job that hangs has no late collective: it lasts as long as its verdicts."""
    last: dict[tuple[Any, ...], int] = defaultdict(int)
    for verdict in losses:
        key = verdict["cluster_id"], verdict["job"]
        last[key] = max(last[key], verdict["until_ns"])
    return [{**job, "last_ns": max(job["last_ns"] or 0, last[job["cluster_id"], job["job"]])} for job in jobs]


def _of_jobs(
    jobs: Sequence[Row], losses: Sequence[Row], window: Window
) -> Iterator[tuple[Row, str | None, GpuTime]]:
    """The time of each job on each day, without restarts and idle GPUs; of each loss whose job is not known."""
    times: dict[tuple[Any, ...], GpuTime] = defaultdict(GpuTime)
    known = {(job["cluster_id"], job["job"]): job for job in jobs}
    for key, job in known.items():
        for day, seconds in window.parts(*_times(job)):
            times[*key, day].held += seconds * job["n_ranks"]
            times[*key, day].jobs.add(job["job"])
    for verdict in losses:
        key = verdict["cluster_id"], verdict["job"]
        for day, lost in _parts(verdict, window) if verdict["kind"] != "idle" else ():
            if key in known:
                times[*key, day].lost[_loss(verdict)] += lost
            else:
                yield verdict, day, GpuTime(lost, {_loss(verdict): lost})
    for (*key_of_job, day), time in times.items():
        time.limit()
        yield known[key_of_job[0], key_of_job[1]], day, time


def _parts(verdict: Row, window: Window) -> Iterator[tuple[str | None, float]]:
    """The day and the lost GPU seconds of each part of a verdict within the window."""
    begin_ns, end_ns = verdict["since_ns"], max(verdict["until_ns"], verdict["since_ns"] + 1)
    for day, seconds in window.parts(begin_ns, end_ns):
        yield day, verdict["gpu_seconds"] * seconds / ((end_ns - begin_ns) / 1e9)


def _add_idle(
    cells: dict[Cell, GpuTime], verdict: Row, held_by: Holders, paused_by: Holders, *, by: str, window: Window
) -> None:
    """Idle GPUs are held in addition to the ranks of jobs. A pause before a restart counts as a restart only."""
    has_process = verdict["pids"] not in (None, "", "[]")
    jobs = _of_holder(held_by, verdict) if has_process else []
    in_jobs, in_pauses = (_overlap(rows, verdict, window) for rows in (jobs, _of_holder(paused_by, verdict)))
    group = _group(jobs[0][0] if jobs else verdict, by)
    for day, lost in _parts(verdict, window):
        lost = max(lost - in_pauses[day], 0.0)
        cells[group, day].held += max(lost - in_jobs[day], 0.0)
        cells[group, day].lost[IDLE] += lost


def _overlap(jobs: Sequence[tuple[Row, int]], verdict: Row, window: Window) -> dict[str | None, float]:
    """GPU seconds of jobs during a verdict, by day."""
    out: dict[str | None, float] = defaultdict(float)
    for job, n_ranks in jobs:
        begin_ns, end_ns = _times(job)
        for day, seconds in window.parts(
            max(begin_ns, verdict["since_ns"]), min(end_ns, verdict["until_ns"])
        ):
            out[day] += seconds * n_ranks
    return out


def _holders(jobs: Sequence[Row]) -> Holders:
    """The jobs and the number of their ranks by machine and process, scheduler's job, or pod."""
    holders: Holders = defaultdict(list)
    for job in jobs:
        members = json.loads(job["members"])
        for node, n_ranks in Counter(node for node, _, _ in members).items():
            for key in ("job", "pod"):
                if label := job[column(key)]:
                    holders[job["cluster_id"], node, key, label].append((job, n_ranks))
            for of_node, pid, _ in members:
                if of_node == node:
                    holders[job["cluster_id"], node, "pid", pid].append((job, n_ranks))
    return holders


def _of_holder(holders: Holders, verdict: Row) -> list[tuple[Row, int]]:
    """The jobs of the holder of idle GPUs."""
    keys = [("pid", pid) for pid in json.loads(verdict["pids"] or "[]")]
    keys += [(key, label) for key in ("job", "pod") if (label := verdict[column(key)])]
    rows = [row for key in keys for row in holders.get((verdict["cluster_id"], verdict["node_id"], *key), ())]
    return list({job["job"]: (job, n_ranks) for job, n_ranks in rows}.values())


def _loss(verdict: Row) -> str:
    if verdict["kind"] == "idle":
        return IDLE
    if verdict["cause"] in INPUT_CAUSES:
        return INPUT
    return HANGS if verdict["kind"] in _HANGS else STRAGGLERS


def _times(job: Row) -> tuple[int, int]:
    """Begin and end; an empty interval if the start is not known."""
    begin_ns = job["begin_ns"] or 0
    return begin_ns, max((job["ended_ns"] or job["last_ns"] or 0) if begin_ns else 0, begin_ns)


def _restarts(jobs: Sequence[Row]) -> Iterator[Row]:
    """The short pauses between consecutive jobs of one owner and name: the later job with the times of the pause."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for job in jobs:
        if (key := _name(job)) and job["begin_ns"]:
            groups[key].append(job)
    for group in groups.values():
        ordered = sorted(group, key=_times)
        for earlier, later in pairwise(ordered):
            begin_ns, end_ns = _times(earlier)[1], _times(later)[0]
            if 0 < end_ns - begin_ns <= _MAX_PAUSE_NS:
                yield {**later, "begin_ns": begin_ns, "ended_ns": end_ns}


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
