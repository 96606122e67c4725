"""Cost of tracing for a step: probes are detached and attached in alternating windows of one running job.

comparing.py compares the windows. The agent keeps running (switching.py), so the windows are short.

A job that is bound by the CPU measures the CPU's speed between two steps, by operations without a probe. Such jobs are
independent, one per GPU or, if they leave the GPU nearly idle, several. A comparison is the mean over all of them. The
steps and speeds are kept in steps<R>.npz, so that the comparison can be repeated.
"""

import io
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import judging
import numpy as np
from comparing import SETTLE_S, Steps, Window, at_one_speed, found_in, interval, mean_step_ns, slowdown
from job import STEPS_BETWEEN_READS
from numpy.typing import NDArray
from running import Failed, Job, end, tracing
from switching import COUNTED, Agent, Governed, switched

from stallscope.events.kernel import HookGroup
from stallscope.store import node

WANTED_WIDTH_PERCENT = 0.3
MIN_RUNS = 6
MAX_RUNS = 500
GOVERNED_S, MAX_GOVERNED_S, GOVERNED_POLL_S = 6.0, 15.0, 0.2
"""After its start the agent learns what hot hooks cost; then they keep to their budget. A job with few launches never
exceeds it, so the wait is limited.
"""
COUNT_S = 3.0
RESTARTED_GOVERNED_S = 8.0
"""All waits of a new process are recorded for five seconds."""
RESTARTED_ON_S, RESTARTED_OFF_S = 7.0, 4.0
"""Length of a window in which the agent runs, or does not, where it is started and stopped. The probes on waits are on
for two of some seven seconds.
"""
RESTART_S = 25.0
"""Of a start of the agent, its window, its end and the window after it."""

LOOK_S = 30.0
"""Between two calculations of the interval while windows are added."""
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
UPROBES = 2  # BPF_PROG_TYPE_KPROBE (linux/bpf.h), which uprobes are of


class Use(NamedTuple):
    """The resources that the agent's process uses."""

    cpu_s: float
    rss_mb: float


@dataclass(frozen=True)
class Runs:
    """How often the BPF programs ran in a window, by their type of attachment, and for how long.

    programs: runs and ns of each program.
    """

    n_uprobe: int
    n_other: int
    run_ns: int
    programs: dict[str, tuple[int, int]]

    def since(self, before: "Runs") -> "Runs":
        """The counts since the last call."""
        programs = {}
        for name, (n_runs, run_ns) in self.programs.items():
            n_before, before_ns = before.programs.get(name, (0, 0))
            programs[name] = n_runs - n_before, run_ns - before_ns
        return Runs(
            self.n_uprobe - before.n_uprobe,
            self.n_other - before.n_other,
            self.run_ns - before.run_ns,
            programs,
        )


class Counts(NamedTuple):
    """The counts of a window."""

    window: Window
    runs: Runs
    n_collectives: int
    agent: Use


@dataclass(frozen=True)
class Workload:
    """A job to measure. description: for readers. words: arguments of job.py. seconds: the time limit.
    window_s: length of each window. jobs_a_gpu: number of jobs that share a GPU (running.sharing_gpus).
    """

    name: str
    description: str
    words: tuple[str, ...]
    seconds: float
    window_s: float = 1.0
    jobs_a_gpu: int = 1

    @property
    def every(self) -> int:
        """Number of steps between two waits for the GPU."""
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
    Workload(
        "slowdown sync",
        "a step of a DDP job that waits for the GPU",
        ("--kind", "ddp", "--sync"),
        100,
    ),
    Workload(
        "slowdown launch",
        "a step of a DDP job of tiny layers, bound by launches",
        ("--kind", "launch", *_BY_CPU),
        95,
        window_s=0.3,
        jobs_a_gpu=7,
    ),
    Workload(
        "slowdown no-sync",
        "a step of a DDP job that runs ahead of the GPU",
        ("--kind", "ddp", "--no-sync"),
        85,
        window_s=3.0,
    ),
    Workload("slowdown fsdp", "a step of an FSDP job", ("--kind", "fsdp", "--sync"), 120),
    Workload(
        "slowdown tp",
        "a step of a tensor-parallel job",
        ("--kind", "tp", "--sync"),
        120,
    ),
    Workload(
        "slowdown graph",
        "a step that is one CUDA graph, 1.6 ms",
        ("--kind", "graph", *_BY_CPU),
        50,
        window_s=0.6,
    ),
    Workload(
        "slowdown inference",
        "a token of a transformer of 24 layers, inferred eagerly",
        ("--kind", "inference", *_BY_CPU),
        70,
        window_s=0.3,
        jobs_a_gpu=7,
    ),
    Workload(
        "slowdown requests",
        "a request of a model so small that it takes a millisecond",
        ("--kind", "requests", *_BY_CPU),
        70,
        window_s=0.5,
        jobs_a_gpu=7,
    ),
    Workload(
        "slowdown decode",
        "a token of a CUDA graph of 100 us",
        ("--kind", "decode", *_BY_CPU),
        45,
        window_s=0.3,
        jobs_a_gpu=4,
    ),
)
"""Those that the CPU bounds are pinned: a rank that wanders between the CPUs of a virtual machine is slower or faster
by 10 % for seconds. Their windows are short, since the CPU's speed still wanders. Seven on a GPU leave the agent CPUs
of its own where there are 16.
"""


def measured(
    workload: Workload,
    job: Job,
    *,
    disk: Path,
    seconds: float,
    agent_words: tuple[str, ...] = (),
    n_restarts: int = 0,
) -> dict[str, Any]:
    """Switches tracing of a job on and off until the interval is narrow or the time is over.

    disk: a folder for the trace. seconds: for the whole. n_restarts: starts and ends of the agent, as a second method.
    Raises Failed. The job is ended.
    """
    end_s = time.monotonic() + seconds - n_restarts * RESTART_S
    db = disk / "slowdown.db"
    try:
        job.await_loaded()
        job.go()
        job.await_ready()
        with switched(db, words=agent_words) as agent:
            await_governed(agent)
            runs, use, counting = counted(agent)
            before = agent.governed()
            windows = alternating(workload, job, agent, end_s=end_s)
            after = agent.governed()
        steps = compared_steps(workload, job, windows)
        ts_ns = node.read(db).collectives["ts_ns"]
        db.unlink()
        check_switched(ts_ns, windows)
        (job.folder / "windows.json").write_text(json.dumps({"windows": windows, "turns": after.turns}))
        keep_steps(workload, job)
        started = restarted(workload, job, db, n=n_restarts, agent_words=agent_words)
        counts = Counts(counting, runs, n_collectives(ts_ns, counting), use)
        return {
            "workload": workload.name,
            "description": workload.description,
            **slowdown(windows, steps, after.turns),
            **started,
            "governor_percent": lost_percent(before, after, n_ranks=job.n_ranks),
            **hits(counts, steps, n_ranks=job.n_ranks),
            "gpus": 1 if workload.is_alone else job.n_ranks,
            "jobs_at_once": job.n_ranks if workload.is_alone else 1,
            "jobs_a_gpu": workload.jobs_a_gpu,
            "window_s": workload.window_s,
            "is_pinned": "--pin" in workload.words,
        }
    finally:
        job.stop()
        with suppress(Failed):
            job.await_end(15)
        end(job.launcher)


def await_governed(agent: Agent) -> None:
    """Until the governor has turned the hot probes off, or is known to have no reason to. Raises Failed."""
    begin_s = time.monotonic()
    time.sleep(GOVERNED_S)
    while time.monotonic() < begin_s + MAX_GOVERNED_S:
        hot = [turn.is_on for turn in agent.governed().turns if turn.group == HookGroup.HOT]
        if hot and not hot[-1]:
            return
        time.sleep(GOVERNED_POLL_S)


def alternating(workload: Workload, job: Job, agent: Agent, *, end_s: float) -> list[Window]:
    """Windows off, on, off, on, ..., off."""
    window_s = workload.window_s
    agent.switch(is_on=False)
    windows = [window(window_s, is_on=False)]
    cycle_s, next_look_s = 0.0, time.monotonic() + LOOK_S
    while time.monotonic() + cycle_s < end_s and len(windows) < 2 * MAX_RUNS:
        begin_s = time.monotonic()
        for is_on in (True, False):
            agent.switch(is_on=is_on)
            windows.append(window(window_s, is_on=is_on))
        cycle_s = time.monotonic() - begin_s
        if time.monotonic() > next_look_s:
            next_look_s = time.monotonic() + LOOK_S
            steps, turns = compared_steps(workload, job, windows), agent.governed().turns
            known = found_in(windows, steps, turns)
            if len(known.percent) >= MIN_RUNS and 2 * interval(known).half <= WANTED_WIDTH_PERCENT:
                break
        if job.launcher.process.poll() is not None:
            raise Failed(f"the job ended: {job.launcher.last_words()}")
    return windows


def restarted(
    workload: Workload, job: Job, db: Path, *, n: int, agent_words: tuple[str, ...]
) -> dict[str, Any]:
    """The slowdown by a second method: the agent is started and stopped n times, as a user does."""
    if not n:
        return {}
    windows = [window(RESTARTED_OFF_S, is_on=False)]
    for _ in range(n):
        with tracing(db, words=agent_words):
            time.sleep(RESTARTED_GOVERNED_S)
            windows.append(window(RESTARTED_ON_S, is_on=True))
        db.unlink()
        windows.append(window(RESTARTED_OFF_S, is_on=False))
    steps = compared_steps(workload, job, windows)
    (job.folder / "restarts.json").write_text(json.dumps({"windows": windows}))
    keep_steps(workload, job)
    result = slowdown(windows, steps, [])
    names = ("slowdown_percent", "spread_percent", "runs")
    return {"n_restarts": n, **{f"restarted_{name}": result[name] for name in names}}


def window(seconds: float, *, is_on: bool) -> Window:
    """Waits until the job has settled, then for the given time."""
    time.sleep(SETTLE_S)
    begin_ns = time.monotonic_ns()
    time.sleep(seconds)
    return Window(begin_ns, time.monotonic_ns(), is_on)


def compared_steps(workload: Workload, job: Job, windows: list[Window]) -> list[Steps]:
    """Steps of each independent rank, at one CPU speed; otherwise of rank 0, for which all ranks wait."""
    if not workload.has_speeds:
        return [read_steps(workload, job.folder, 0)]
    return [
        at_one_speed(read_steps(workload, job.folder, rank), read_speeds(job.folder, rank), windows)
        for rank in range(job.n_ranks if workload.is_alone else 1)
    ]


def keep_steps(workload: Workload, job: Job) -> None:
    """Writes the steps and speeds of each rank (ns) in a few bytes per step, for another comparison."""
    for rank in range(job.n_ranks if workload.has_speeds else 0):
        steps, turn_ns = read_steps(workload, job.folder, rank), read_speeds(job.folder, rank)
        np.savez_compressed(
            job.folder / f"steps{rank}.npz",
            first=steps.end_ns[:1],
            end_to_end=np.diff(steps.end_ns).astype(np.int32),
            length=steps.length_ns.astype(np.int32),
            turn=turn_ns.astype(np.int32),
        )


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


def counted(agent: Agent) -> tuple[Runs, Use, Window]:
    """A window in which the kernel counts runs of BPF programs.

    Counting makes a run dearer, so no slowdown is taken from it.
    """
    before = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        time.sleep(SETTLE_S)
        pid = agent.program.process.pid
        first, cpu_s, begin_ns = program_runs(agent), agent_use(pid).cpu_s, time.monotonic_ns()
        time.sleep(COUNT_S)
        runs, use, end_ns = program_runs(agent).since(first), agent_use(pid), time.monotonic_ns()
    finally:
        STATISTICS.write_text(before)
    return runs, use._replace(cpu_s=use.cpu_s - cpu_s), Window(begin_ns, end_ns, is_on=True)


def agent_use(pid: int) -> Use:
    """CPU time and peak of memory so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return Use((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), peak_kb / 1024)


def program_runs(agent: Agent) -> Runs:
    """Runs of the BPF programs that the agent holds. Raises Failed."""
    uprobe = other = run_ns = 0
    for path in Path(f"/proc/{agent.program.process.pid}/fdinfo").iterdir():
        facts = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
        if "run_cnt" not in facts:
            continue
        run_ns += int(facts["run_time_ns"])
        if int(facts["prog_type"]) == UPROBES:
            uprobe += int(facts["run_cnt"])
        else:
            other += int(facts["run_cnt"])
    return Runs(uprobe, other, run_ns, agent.governed().programs)


def n_collectives(ts_ns: NDArray[np.int64], window: Window) -> int:
    """How many came within a window, over all ranks."""
    return int(((ts_ns >= window.begin_ns) & (ts_ns <= window.end_ns)).sum())


def check_switched(ts_ns: NDArray[np.int64], windows: list[Window]) -> None:
    """Raises Failed where a job's collectives came in windows without hooks, or did not in those with."""
    for entry in windows if len(ts_ns) else ():
        if bool(n_collectives(ts_ns, entry)) != entry.is_on:
            raise Failed(f"hooks were {'off' if entry.is_on else 'on'} in a window where they should not be")


def lost_percent(before: Governed, after: Governed, *, n_ranks: int) -> dict[str, float]:
    """The governor's estimate of the cost of each group of probes for a rank, in per cent of the time with probes."""
    on_ns = (after.on_ns - before.on_ns) * n_ranks
    lost_ns = zip(COUNTED, before.lost_ns, after.lost_ns, strict=True)
    return {group.name.lower(): round(100 * (then - once) / on_ns, 3) for group, once, then in lost_ns}


def hits(counts: Counts, ranks: list[Steps], *, n_ranks: int) -> dict[str, Any]:
    """Runs of the programs per step and rank: a call with its return is two, or three where it is seen twice.

    The scheduler's programs run for the whole machine; their number and time are divided among the ranks.
    """
    one_ns, seconds = mean_step_ns(counts.window, ranks), counts.window.seconds
    share = 1e9 * seconds / one_ns * n_ranks
    runs = counts.runs
    return {
        "hits_per_step": round(runs.n_uprobe / share, 2),
        "collectives_per_step": round(counts.n_collectives / share, 2),
        "scheduler_runs_per_step": round(runs.n_other / share, 2),
        "programs_us_per_step": round(runs.run_ns / share / 1e3, 2),
        "runs_and_us_per_step": {
            name: [round(n_runs / share, 2), round(run_ns / share / 1e3, 2)]
            for name, (n_runs, run_ns) in sorted(runs.programs.items(), key=lambda item: -item[1][1])
            if run_ns
        },
        "agent_cpu_percent": round(100 * counts.agent.cpu_s / seconds, 2),
        "programs_cpu_percent": round(runs.run_ns / seconds / 1e7, 2),
        "agent_rss_mb": round(counts.agent.rss_mb, 1),
    }
