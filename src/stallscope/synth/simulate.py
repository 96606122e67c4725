"""Simulates a job with faults: the trace and the truth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stallscope.events import layout
from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category
from stallscope.events.trace import Trace
from stallscope.synth import simulated_program
from stallscope.synth.fault_models import Fault
from stallscope.synth.groups import Groups, communicators, groups
from stallscope.synth.hosts import NEVER, Hosts
from stallscope.synth.observed import Agents, Capture
from stallscope.synth.simulated_clocks import ClockSpread, NodeClocks, gpu_clocks, node_clocks
from stallscope.synth.simulated_job import Family, Job, Timing
from stallscope.synth.simulated_machine import Arrivals, Machine
from stallscope.synth.step_plan import plan, speeds
from stallscope.synth.truth import Truth

_ROWS_AT_ONCE = 1 << 16
_START_SPREAD_NS = 50_000_000
_CLOCK_READING_NS = 10_000_000_000


@dataclass
class _Run:
    """One run of a job: its state, the effects of the faults, and its capture."""

    job: Job
    timing: Timing
    faults: Sequence[Fault]
    hosts: Hosts
    machine: Machine
    agents: Agents
    groups: dict[Family, Groups]
    clocks: NodeClocks
    noise: np.random.Generator
    chance: np.random.Generator
    n_incidents: list[int] = field(default_factory=list)


def simulate(
    job: Job,
    faults: Sequence[Fault] = (),
    *,
    seed: int = 0,
    timing: Timing = Timing(),
    clocks: ClockSpread = ClockSpread(),
    capture: Capture = Capture(),
    has_twin: bool = True,
) -> tuple[Trace, Truth]:
    """Run a job and observe it. The same arguments give the same trace.

    collectives are sorted by node and time. has_twin: run the job again without faults, to measure the cost.
    """
    run = _run(job, faults, seed, timing, clocks, capture)
    parts: list[Array] = []
    snapshots: list[Array] = []
    for arrivals in _grouped(_steps(run, snapshots)):
        parts.append(run.agents.rows(arrivals))
    rows = np.concatenate(parts)
    rows = rows[np.lexsort((rows["ts_ns"], rows["node"]))]
    end_ns = _watch(run, snapshots)
    twin = _finished(_run(job, (), seed, timing, clocks, capture)) if has_twin and faults else None
    return _trace(run, rows, snapshots, end_ns), _truth(run, twin, end_ns)


def batches(
    job: Job,
    faults: Sequence[Fault] = (),
    *,
    seed: int = 0,
    timing: Timing = Timing(),
    clocks: ClockSpread = ClockSpread(),
    capture: Capture = Capture(),
    n_rounds: int | None = None,
) -> Iterator[Array]:
    """The `collectives` rows of a job, some steps at a time, so that a large job needs little memory.

    Rows of one rank are in order. n_rounds: stop after the step in which every rank has entered n_rounds collectives.
    """
    run = _run(job, faults, seed, timing, clocks, capture)
    for arrivals in _grouped(_steps(run, [])):
        yield run.agents.rows(arrivals)
        if n_rounds is not None and run.hosts.n_enqueued.min() >= n_rounds:
            return


def _run(
    job: Job, faults: Sequence[Fault], seed: int, timing: Timing, spread: ClockSpread, capture: Capture
) -> _Run:
    streams = [np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(5)]
    naming, noise, chance, clock, losing = streams
    job_groups = groups(job, naming)
    start_ns = noise.integers(0, _START_SPREAD_NS, job.nranks)
    may_hang = any(fault.answer().kind == "hang" for fault in faults)
    hosts = Hosts(job, timing, start_ns, may_hang=may_hang, times_launches=capture.times_launches)
    clocks = node_clocks(job.n_nodes, spread, clock)
    gpus = gpu_clocks(job.nranks, spread, clock)
    agents = Agents(job, capture, job_groups, clocks, gpus, start_ns, losing)
    machine = Machine(job, job_groups, hosts)
    return _Run(
        job, timing, faults, hosts, machine, agents, job_groups, clocks, noise, chance, [0] * len(faults)
    )


def _steps(run: _Run, snapshots: list[Array]) -> Iterator[list[Arrivals]]:
    """The arrivals of the start and of each step, until the job is over or all ranks hang."""
    job, timing = run.job, run.timing
    write = simulated_program.Writer(
        job, timing, frozenset(family for family, part in run.groups.items() if part.spans_nodes)
    )
    variants = {
        (a, b): simulated_program.step(write, is_synchronised=a, has_checkpoint=b)
        for a in (True, False)
        for b in (True, False)
    }
    used: set[Family] = set()
    speed = speeds(job, timing, run.noise)
    noted_ns = 0
    for step in range(-1, job.steps):
        is_synchronised = (step + 1) % job.sync_every == 0
        has_checkpoint = bool(job.checkpoint_every) and (step + 1) % job.checkpoint_every == 0
        instructions = (
            variants[is_synchronised, has_checkpoint] if step >= 0 else simulated_program.start(write)
        )
        made = plan(step, instructions, timing=timing, speed=speed, used=used, rng=run.noise)
        for i, fault in enumerate(run.faults if step >= 0 else ()):
            run.n_incidents[i] += fault.apply(made, run.chance)
        arrivals: list[Arrivals] = []
        run.machine.run(made, arrivals.append)
        yield arrivals
        goes_on = np.flatnonzero(run.hosts.now < NEVER)
        if not len(goes_on):
            return
        if run.hosts.now[goes_on[0]] >= noted_ns + run.agents.capture.snapshot_ns:
            noted_ns = int(run.hosts.now[goes_on[0]])
            snapshots.append(run.agents.snapshots(run.hosts, run.hosts.now[goes_on], goes_on))


def _grouped(steps: Iterator[list[Arrivals]]) -> Iterator[list[Arrivals]]:
    """Some steps at a time: rows of small jobs are cheaper to make together."""
    held: list[Arrivals] = []
    n = 0
    for arrivals in steps:
        held.extend(arrivals)
        n += sum(len(part.ranks) for part in arrivals)
        if n >= _ROWS_AT_ONCE:
            yield held
            held, n = [], 0
    if held:
        yield held


def _watch(run: _Run, snapshots: list[Array]) -> int:
    """The end of the capture, true time; adds the last snapshots, and the snapshots of a hung job."""
    hosts, everyone = run.hosts, np.arange(run.job.nranks)
    is_stuck = hosts.now >= NEVER
    last = np.where(is_stuck, hosts.blocked_since, hosts.now)
    if not is_stuck.any():
        snapshots.append(run.agents.snapshots(hosts, last, everyone))
        return int(last.max())
    capture = run.agents.capture
    end_ns = int(last.max()) + capture.watched_ns
    alive = np.flatnonzero(is_stuck & ~hosts.is_dead)
    for at in range(int(last.max()) + capture.snapshot_ns, end_ns + 1, capture.snapshot_ns):
        snapshots.append(run.agents.snapshots(hosts, np.full(len(alive), at), alive))
    dead = np.flatnonzero(hosts.is_dead)
    rows = run.agents.snapshots(hosts, hosts.blocked_since[dead], dead)
    rows["alive"], rows["category"], rows["in_call"] = 0, Category.NONE, 0
    snapshots.append(rows)
    done = np.flatnonzero(~is_stuck)
    snapshots.append(run.agents.snapshots(hosts, hosts.now[done], done))
    return end_ns


def _finished(run: _Run) -> _Run:
    """Run a job to its end, unobserved."""
    for _ in _steps(run, []):
        pass
    return run


def _trace(run: _Run, rows: Array, snapshots: list[Array], end_ns: int) -> Trace:
    job, agents = run.job, run.agents
    readings = np.append(np.arange(0, end_ns, _CLOCK_READING_NS), end_ns)
    nodes = np.arange(job.n_nodes)
    return Trace(
        collectives=rows,
        snapshots=np.concatenate(snapshots),
        communicators=_communicators(run),
        processes=_processes(run),
        nodes=tuple(f"node{number:04d}" for number in nodes),
        clocks=tuple(row for node in nodes for row in run.clocks.rows(int(node), readings)),
        lost={"collectives": agents.n_lost} if agents.n_lost else {},
        ends_ns=tuple(int(when) for when in run.clocks.reading(nodes, np.full(len(nodes), end_ns))),
        source=f"simulated job: dp {job.dp} x tp {job.tp} x pp {job.pp}, {counted(job.n_nodes, 'node')}",
    )


def _processes(run: _Run) -> Array:
    job, agents, hosts = run.job, run.agents, run.hosts
    rank = np.arange(job.nranks)
    rows = layout.empty(layout.PROCESSES, job.nranks)
    rows["node"], rows["pid"], rows["rank"] = agents.node, agents.pid, rank
    rows["local_rank"], rows["nranks"], rows["device"] = agents.local, job.nranks, agents.local
    rows["comm"] = b"python3"
    rows["ts_ns"] = run.clocks.reading(agents.node, agents.first_seen_ns())
    ended = np.where(hosts.is_dead, hosts.blocked_since, np.where(hosts.now < NEVER, hosts.now, NEVER))
    rows["ended_ns"] = np.where(ended < NEVER, run.clocks.reading(agents.node, ended), UNKNOWN)
    return rows


def _communicators(run: _Run) -> Array:
    rows = communicators(run.groups, run.agents.node, run.agents.pid)
    first_ns = run.clocks.reading(run.agents.node, run.agents.first_seen_ns())
    rows["ts_ns"] = np.tile(first_ns, len(run.groups))
    return rows


def _truth(run: _Run, twin: _Run | None, end_ns: int) -> Truth:
    answers = tuple(fault.answer() for fault in run.faults)
    culprits = sorted({rank for answer in answers for rank in answer.ranks})
    victims = np.setdiff1d(np.arange(run.job.nranks), culprits)
    lost, slowdown = -1.0 if answers else 0.0, UNKNOWN if answers else 0
    if twin is not None:
        lost = float(_waited_ns(run, end_ns)[victims].sum() - _waited_ns(twin, end_ns)[victims].sum()) / 1e9
        if not run.hosts.may_hang:
            slowdown = int(run.hosts.now.max() - twin.hosts.now.max())
    return Truth(
        answers,
        tuple(run.n_incidents),
        lost,
        slowdown,
        run.clocks.offset_ns,
        run.clocks.drift,
        run.agents.capture.has_gpu_times,
        run.agents.capture.times_launches,
    )


def _waited_ns(run: _Run, end_ns: int) -> Array:
    """The time that each rank waited for others: in synchronise calls, on a full queue, and forever."""
    hosts = run.hosts
    is_blocked = (hosts.blocked_since < NEVER) & (hosts.blocked_call > 0)
    stood = np.where(is_blocked, end_ns - hosts.blocked_since, 0)
    waited: Array = hosts.ledger[Category.WAIT_GPU - 1] + hosts.queued_ns + stood
    return waited
