"""What tracing costs a step: hooks are taken off and set again in alternating windows of one running job.

At each switch the half window before is compared with the half window after. A drift of the machine makes the one
kind of switch look dearer and the other cheaper, so that it cancels out; the agent goes on meanwhile (switching.py), so
that windows are short. Of these comparisons Huber's mean is told, which those in which the machine stumbled do not
pull. Its 95 % interval comes from Student's t, and is the wider the more alike neighbours are: they share a window.
Beside it stands what the hooks should cost: hits x the measured cost of one (see bench_hook_cost.py).

A virtual CPU is slower by half for a while, over and over. A job that it bounds measures its speed between two steps,
by operations that no hook is in: only steps at full speed are compared. How long they take at which speed is learned
from those without hooks, and each is told as what it would have taken at one speed. Such jobs run alone on a GPU, one
on each: a comparison is the mean of all of them. Their governor has hot hooks on for a part of the time; what a window
had of it is known, and the mean is that of a window that had as much as there was on the whole.
"""

import io
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import judging
import numpy as np
from job import STEPS_BETWEEN_READS
from numpy.typing import NDArray
from running import Failed, Job, end
from switching import Agent, Turn, switched

from stallscope.capture.operations import GOVERNED
from stallscope.store import node

WANTED_WIDTH_PERCENT = 0.3
LEAST_RUNS = 6
MOST_RUNS = 500
SETTLE_S = 0.1
GOVERNED_S = 6.0
"""After its start the agent learns what hot hooks cost; then they keep to their budget."""
COUNT_S = 3.0
LOOK_EVERY = 32
FULL_SPEED = 0.15
"""A CPU that takes no longer than this beyond what it took in its fastest tenth, in the logarithm."""
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
UPROBES = 2  # BPF_PROG_TYPE_KPROBE (linux/bpf.h), which uprobes are of
HOOK_NS = {"entry_only": 930.0, "collective": 1900.0}
"""Taken where this run could not measure them: beside jobs with hooks on all calls, H200's host, Intel Xeon, 6.18."""

_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12)
_T_975_MANY = 2.10
_HUBER = 1.345
"""Standard deviations from which on a comparison weighs less: 95 % as sharp as the mean where all is normal."""
_N_FITS = 30
_MOST_ALIKE, _LEAST_KNOWN = 0.5, 40
"""The correlation of neighbours that differ by whole windows only; taken where fewer comparisons do not tell it."""
_NORMAL_MAD = 1.4826


class Window(NamedTuple):
    """A time in which nothing was switched (monotonic ns), and whether the agent traced in it."""

    begin_ns: int
    end_ns: int
    is_on: bool

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.begin_ns) / 1e9


class Use(NamedTuple):
    """What the agent's process uses."""

    cpu_s: float
    rss_mb: float


class Interval(NamedTuple):
    """A mean and half the width of its 95 % interval, in per cent."""

    mean: float
    half: float


@dataclass(frozen=True)
class Runs:
    """How often the BPF programs ran in a window, by what hooks them, and for how long."""

    n_uprobe: int
    n_other: int
    run_ns: int

    def since(self, before: "Runs") -> "Runs":
        """What came since."""
        return Runs(
            self.n_uprobe - before.n_uprobe, self.n_other - before.n_other, self.run_ns - before.run_ns
        )


class Counts(NamedTuple):
    """What was counted in a window."""

    window: Window
    runs: Runs
    n_collectives: int
    agent: Use


@dataclass(frozen=True)
class Workload:
    """A job to slow down. words: of job.py. seconds: at most so long. window_s: of each window."""

    name: str
    words: tuple[str, ...]
    seconds: float
    window_s: float = 1.0

    @property
    def every(self) -> int:
        """Each so many steps it has waited for the GPU."""
        return STEPS_BETWEEN_READS if "--no-sync" in self.words else 1

    @property
    def has_speeds(self) -> bool:
        """Whether it measures the CPU's speed between two steps."""
        return "--speed" in self.words

    @property
    def is_alone(self) -> bool:
        """Whether each of its ranks is a job of its own."""
        return "--alone" in self.words


_BY_CPU = ("--sync", "--alone", "--pin", "--speed")
WORKLOADS = (
    Workload("slowdown sync", ("--kind", "ddp", "--sync"), 85),
    Workload("slowdown launch", ("--kind", "launch", *_BY_CPU), 95, window_s=0.6),
    Workload("slowdown no-sync", ("--kind", "ddp", "--no-sync"), 85, window_s=3.0),
    Workload("slowdown fsdp", ("--kind", "fsdp", "--sync"), 70),
    Workload("slowdown graph", ("--kind", "graph", *_BY_CPU), 70, window_s=0.6),
    Workload("slowdown inference", ("--kind", "inference", *_BY_CPU), 70, window_s=0.6),
)
"""GPU-bound with and without waiting for the GPU each step; bound by launches (tiny layers); sharded; one CUDA graph
a step; requests without collectives. Those that the CPU bounds are pinned: a rank that wanders between the CPUs of a
virtual machine is slower or faster by 10 % for seconds. Their windows are short, since the CPU's speed still wanders.
"""


def measured(
    workload: Workload,
    job: Job,
    *,
    disk: Path,
    seconds: float,
    hook_ns: dict[str, float],
    agent_words: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Switches tracing on and off beside a job at its gate until the interval is narrow or the time is over.

    disk: a folder for the trace. seconds: for the whole. Raises Failed. The job is ended.
    """
    end_s = time.monotonic() + seconds
    db = disk / "slowdown.db"
    try:
        job.await_loaded()
        job.go()
        job.await_ready()
        with switched(db, words=agent_words) as agent:
            time.sleep(GOVERNED_S)
            runs, use, counting = counted(agent)
            windows = alternating(workload, job, agent, end_s=end_s)
            turns = agent.turns()
        steps = compared_steps(workload, job, windows)
        ts_ns = node.read(db).collectives["ts_ns"]
        db.unlink()
        check_switched(ts_ns, windows)
        counts = Counts(counting, runs, n_collectives(ts_ns, counting), use)
        return {
            "workload": workload.name,
            **slowdown(windows, steps, turns),
            **hits(counts, steps, n_ranks=job.n_ranks, hook_ns=hook_ns),
            "gpus": 1 if workload.is_alone else job.n_ranks,
            "jobs_at_once": job.n_ranks if workload.is_alone else 1,
            "window_s": workload.window_s,
            "is_pinned": "--pin" in workload.words,
        }
    finally:
        job.stop()
        with suppress(Failed):
            job.await_end(15)
        end(job.launcher)


def alternating(workload: Workload, job: Job, agent: Agent, *, end_s: float) -> list[Window]:
    """Windows off, on, off, on, ..., off."""
    window_s = workload.window_s
    agent.switch(is_on=False)
    windows = [window(window_s, is_on=False)]
    cycle_s = 0.0
    while time.monotonic() + cycle_s < end_s and len(windows) < 2 * MOST_RUNS:
        begin_s = time.monotonic()
        for is_on in (True, False):
            agent.switch(is_on=is_on)
            windows.append(window(window_s, is_on=is_on))
        cycle_s = time.monotonic() - begin_s
        if len(windows) % (2 * LOOK_EVERY) == 1:
            known = found_in(windows, compared_steps(workload, job, windows), agent.turns())
            if len(known.percent) >= LEAST_RUNS and 2 * interval(known).half <= WANTED_WIDTH_PERCENT:
                break
        if job.launcher.process.poll() is not None:
            raise Failed(f"the job ended: {job.launcher.last_words()}")
    return windows


def window(seconds: float, *, is_on: bool) -> Window:
    """Waits until all has settled, then for so long."""
    time.sleep(SETTLE_S)
    begin_ns = time.monotonic_ns()
    time.sleep(seconds)
    return Window(begin_ns, time.monotonic_ns(), is_on)


class Steps(NamedTuple):
    """Steps of a rank, at whose ends it had waited for the GPU, and so for all: int64, int64, float64 (n,).

    length_ns: of one step, of those up to this end.
    """

    number: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    length_ns: NDArray[np.float64]


def compared_steps(workload: Workload, job: Job, windows: list[Window]) -> list[Steps]:
    """Of each rank that runs alone, at one speed of its CPU; else of rank 0, for whom all wait."""
    if not workload.has_speeds:
        return [read_steps(workload, job.folder, 0)]
    return [
        at_one_speed(read_steps(workload, job.folder, rank), read_speeds(job.folder, rank), windows)
        for rank in range(job.n_ranks if workload.is_alone else 1)
    ]


def read_steps(workload: Workload, folder: Path, rank: int) -> Steps:
    """Those at whose ends a rank had waited. One ends where the next begins, unless something was measured between."""
    rows = judging.clock(folder, rank)
    if workload.has_speeds:
        return Steps(rows[:, 0], rows[:, 4], (rows[:, 4] - rows[:, 1]).astype(np.float64))
    rows = rows[(rows[:, 0] + 1) % workload.every == 0]
    length_ns = np.diff(rows[:, 4]) / np.diff(rows[:, 0])
    return Steps(rows[1:, 0], rows[1:, 4], length_ns)


def read_speeds(folder: Path, rank: int) -> NDArray[np.float64]:
    """ns of a loop after each step of a rank, by the step's number."""
    whole = (folder / f"speed{rank}.csv").read_text().rpartition("\n")[0]
    return np.loadtxt(io.StringIO(whole), delimiter=",", usecols=1, ndmin=1)


def at_one_speed(steps: Steps, turn_ns: NDArray[np.float64], windows: list[Window]) -> Steps:
    """The steps before and after which the CPU was fast, as if it had been equally so. turn_ns: measured after each.

    The fit is a line in the logarithms, of steps without hooks.
    """
    n = min(len(turn_ns), len(steps.number))
    number, end_ns, length_ns = (one[1:n] for one in steps)
    slow = np.log(np.maximum(turn_ns[number - 1], turn_ns[number]))
    slow -= np.log(np.percentile(turn_ns, 10))
    is_fast = slow < FULL_SPEED
    number, end_ns, length_ns, slow = number[is_fast], end_ns[is_fast], length_ns[is_fast], slow[is_fast]
    is_off = np.zeros(len(number), bool)
    for one in windows:
        is_off |= (not one.is_on) & (end_ns >= one.begin_ns) & (end_ns <= one.end_ns)
    slope, _ = np.polyfit(slow[is_off], np.log(length_ns[is_off]), 1)
    return Steps(number, end_ns, length_ns / np.exp(slope * slow))


def mean_step_ns(window: Window, ranks: list[Steps]) -> float:
    """Mean ns of a step of all ranks that are compared; nan where none has a whole step."""
    each_ns = [one for steps in ranks if not math.isnan(one := step_ns(window, steps))]
    return fmean(each_ns) if each_ns else math.nan


def step_ns(window: Window, steps: Steps) -> float:
    """Mean ns of a step inside the window; nan with fewer than two ends of steps."""
    inside = steps.length_ns[(steps.end_ns >= window.begin_ns) & (steps.end_ns <= window.end_ns)]
    return float(inside[1:].mean()) if len(inside) > 1 else math.nan


def halves(windows: list[Window]) -> tuple[list[Window], list[Window]]:
    """The half windows before and after each switch."""
    middle_ns = [(one.begin_ns + one.end_ns) // 2 for one in windows]
    before = [one._replace(begin_ns=ns) for one, ns in zip(windows[:-1], middle_ns[:-1], strict=True)]
    after = [one._replace(end_ns=ns) for one, ns in zip(windows[1:], middle_ns[1:], strict=True)]
    return before, after


def estimates(windows: list[Window], ranks: list[Steps]) -> NDArray[np.float64]:
    """Per cent by which a step with hooks is longer than one without, at each switch: (windows - 1,).

    The mean of the ranks that are compared, of each that has whole steps on both sides; nan where none has.
    """
    before, after = (
        np.log(np.array([[step_ns(one, steps) for one in side] for steps in ranks]))
        for side in halves(windows)
    )
    longer = (after - before) * [1 if one.is_on else -1 for one in windows[1:]]
    is_known = ~np.isnan(longer)
    with np.errstate(invalid="ignore"):
        mean = np.where(is_known, longer, 0).sum(axis=0) / is_known.sum(axis=0)
    return np.asarray(100 * np.expm1(mean))


def on_shares(turns: list[Turn], windows: list[Window]) -> NDArray[np.float64]:
    """For which share of each window each governed group was on: (windows, groups). At first all are."""
    found = np.ones((len(windows), len(GOVERNED)))
    for at, group in enumerate(GOVERNED):
        of = [(0, True), *((one.at_ns, one.is_on) for one in turns if one.group == group), (1 << 62, True)]
        for row, one in enumerate(windows):
            off_ns = sum(
                max(0, min(until_ns, one.end_ns) - max(since_ns, one.begin_ns))
                for (since_ns, is_on), (until_ns, _) in pairwise(of)
                if not is_on
            )
            found[row, at] -= off_ns / (one.end_ns - one.begin_ns)
    return found


class Found(NamedTuple):
    """Comparisons: per cent (n,), for which share of each what was on (n, k), and on the whole (k,)."""

    percent: NDArray[np.float64]
    shares: NDArray[np.float64]
    whole: NDArray[np.float64]


def found_in(windows: list[Window], ranks: list[Steps], turns: list[Turn]) -> Found:
    """The comparisons at switches that have whole steps on both sides."""
    percent = estimates(windows, ranks)
    is_known = ~np.isnan(percent)
    before, after = halves(windows)
    traced = [b if b.is_on else a for b, a in zip(before, after, strict=True)]
    settled = [one._replace(begin_ns=one.begin_ns - int(SETTLE_S * 1e9)) for one in windows if one.is_on]
    return Found(
        percent[is_known], on_shares(turns, traced)[is_known], on_shares(turns, settled).mean(axis=0)
    )


def interval(found: Found) -> Interval:
    """Mean and 95 % interval: where a line through the comparisons (Huber's, as many columns as differ at all) has the
    shares of the whole. Huber, Robust Statistics (1981), 7.6.
    """
    n = len(found.percent)
    columns = [one for one in (found.shares - found.whole).T if np.ptp(one) > 0]
    design = np.column_stack([np.ones(n), *columns])
    free = n - design.shape[1]
    if free < 1:
        return Interval(float(found.percent.mean()) if n else math.nan, math.nan)
    weight = np.ones(n)
    for _ in range(_N_FITS):
        root = np.sqrt(weight)
        fit = np.linalg.lstsq(design * root[:, None], found.percent * root, rcond=None)[0]
        rest = found.percent - design @ fit
        scale = max(_NORMAL_MAD * float(np.median(np.abs(rest))), 1e-12)
        weight = 1 / np.maximum(np.abs(rest) / (_HUBER * scale), 1)
    is_near, pull = np.abs(rest) <= _HUBER * scale, weight * rest
    variance = (pull**2).sum() / free / is_near.mean() ** 2 * np.linalg.pinv(design.T @ design)[0, 0]
    alike = float(pull[1:] @ pull[:-1] / max((pull**2).sum(), 1e-12)) if n >= _LEAST_KNOWN else _MOST_ALIKE
    variance *= 1 + 2 * min(max(alike, 0), _MOST_ALIKE)
    t = _T_975[free - 1] if free <= len(_T_975) else _T_975_MANY
    return Interval(float(fit[0]), t * math.sqrt(variance))


def slowdown(windows: list[Window], ranks: list[Steps], turns: list[Turn]) -> dict[str, Any]:
    """The slowdown and what it was made from. Raises Failed with fewer than two comparisons."""
    known = found_in(windows, ranks, turns)
    found = [float(one) for one in known.percent]
    if len(found) < 2:
        raise Failed(f"only {len(found)} of {len(windows) - 1} switches have whole steps on both sides")
    mean, half = interval(known)
    off_ns = [mean_step_ns(one, ranks) for one in windows if not one.is_on]
    return {
        "slowdown_percent": round(mean, 3),
        "spread_percent": round(half, 3),
        "upper_bound_percent": round(mean + half, 3),
        "median_percent": round(median(found), 3),
        "runs": len(found),
        "steps_per_s": round(1e9 / float(np.nanmedian(off_ns)), 2),
        "on_share": dict(zip(("copies", "hot"), known.whole.round(4).tolist(), strict=True)),
        "each_percent": [round(one, 3) for one in found],
        "off_step_ms": [round(one / 1e6, 4) for one in off_ns],
    }


def counted(agent: Agent) -> tuple[Runs, Use, Window]:
    """A window in which the kernel counts runs of BPF programs.

    Counting makes a run dearer, so no slowdown is taken from it.
    """
    before = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        time.sleep(SETTLE_S)
        pid = agent.program.process.pid
        first, cpu_s, begin_ns = program_runs(pid), agent_use(pid).cpu_s, time.monotonic_ns()
        time.sleep(COUNT_S)
        runs, use, end_ns = program_runs(pid).since(first), agent_use(pid), time.monotonic_ns()
    finally:
        STATISTICS.write_text(before)
    return runs, use._replace(cpu_s=use.cpu_s - cpu_s), Window(begin_ns, end_ns, is_on=True)


def agent_use(pid: int) -> Use:
    """CPU time and peak of memory so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return Use((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), peak_kb / 1024)


def program_runs(pid: int) -> Runs:
    """Runs of the BPF programs that the agent holds."""
    uprobe = other = run_ns = 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        facts = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
        if "run_cnt" not in facts:
            continue
        run_ns += int(facts["run_time_ns"])
        if int(facts["prog_type"]) == UPROBES:
            uprobe += int(facts["run_cnt"])
        else:
            other += int(facts["run_cnt"])
    return Runs(uprobe, other, run_ns)


def n_collectives(ts_ns: NDArray[np.int64], window: Window) -> int:
    """How many came within a window, over all ranks."""
    return int(((ts_ns >= window.begin_ns) & (ts_ns <= window.end_ns)).sum())


def check_switched(ts_ns: NDArray[np.int64], windows: list[Window]) -> None:
    """Raises Failed where a job's collectives came in windows without hooks, or did not in those with."""
    for one in windows if len(ts_ns) else ():
        if bool(n_collectives(ts_ns, one)) != one.is_on:
            raise Failed(f"hooks were {'off' if one.is_on else 'on'} in a window where they should not be")


def hits(counts: Counts, ranks: list[Steps], *, n_ranks: int, hook_ns: dict[str, float]) -> dict[str, Any]:
    """Hits per step and rank, and what they should cost: an upper bound, as if nothing went on meanwhile.

    A hit of a collective is two runs. Any other run is taken for one at the entry, the dearer half of a call.
    The scheduler's programs run for the whole machine; their number and time are divided among the ranks.
    """
    one_ns, seconds = mean_step_ns(counts.window, ranks), counts.window.seconds
    share = 1e9 * seconds / one_ns * n_ranks
    runs = counts.runs
    others = max(0, runs.n_uprobe - 2 * counts.n_collectives)
    hook_cost_ns = (counts.n_collectives * hook_ns["collective"] + others * hook_ns["entry_only"]) / share
    return {
        "hits_per_step": round(runs.n_uprobe / share, 2),
        "collectives_per_step": round(counts.n_collectives / share, 2),
        "scheduler_runs_per_step": round(runs.n_other / share, 2),
        "programs_us_per_step": round(runs.run_ns / share / 1e3, 2),
        "hook_cost_us_per_step": round(hook_cost_ns / 1e3, 2),
        "hook_cost_percent": round(100 * hook_cost_ns / one_ns, 3),
        "hook_ns": hook_ns,
        "agent_cpu_percent": round(100 * counts.agent.cpu_s / seconds, 2),
        "programs_cpu_percent": round(runs.run_ns / seconds / 1e7, 2),
        "agent_rss_mb": round(counts.agent.rss_mb, 1),
    }
