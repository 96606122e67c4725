"""A shape, a fault and a seed as a trace with its truth."""

import zlib
from dataclasses import dataclass, replace

import numpy as np

from generator.builder import Builder
from generator.faults import Fault, fits, inject
from generator.machine import Machine
from generator.records import View, trace
from generator.shapes import SHAPES
from stallscope.events.trace import Trace

_START_SPREAD_NS = 60_000_000
_RESTART_NS = 8_000_000_000
_WATCHED_NS = 60_000_000_000
_GPU_TIMES, _GPU_TIMES_OF_GPU_FAULTS = 0.4, 0.75
"""Share of the jobs in which a profiler records when kernels run."""
_FOREVER_NS = 1 << 60


@dataclass(frozen=True)
class Truth:
    """The right answer. fault: None in a healthy job.

    cost_gpu_s: how much longer the job lasts than the same job without the fault, times the ranks that are not
    culprits. recorded_gpu_s: the part of it while all agents watch. cost_share: of all ranks' time from the fault's
    first step on. uneven: the ranks have uneven work, which may be reported. may_name: ranks with more work of their
    own. has_gpu_times: the trace holds when kernels began.
    """

    fault: Fault | None
    cost_gpu_s: float
    recorded_gpu_s: float
    cost_share: float
    uneven: str
    may_name: frozenset[int]
    has_gpu_times: bool
    n_ranks: int


def build(shape: str, seed: int) -> Builder:
    """The programs of a job; each shape draws its own sizes from the same seed."""
    return SHAPES[shape](zlib.crc32(f"{shape} {seed}".encode()))


def exists(shape: str, fault: str, seed: int) -> bool:
    """Whether the shape can have the fault with this seed."""
    return not fault or fits(build(shape, seed), fault)


def job(shape: str, fault: str, seed: int) -> tuple[Trace, Truth]:
    """One job. fault: "" for none. The same arguments give the same trace."""
    b = build(shape, seed)
    rng = np.random.default_rng([seed, 41, zlib.crc32(shape.encode())])
    start_ns = rng.integers(0, _START_SPREAD_NS, len(b.programs)).tolist()
    done: Fault | None = None
    twin, twin_ns = _execute(b, start_ns) if fault else (None, 0)
    if twin:
        done = inject(b, fault, step_ns=_step_ns(b, twin), seed=seed)
    machine, last_ns = _execute(b, start_ns)
    is_hung = not all(host.done for host in machine.hosts)
    end_ns = last_ns + (_WATCHED_NS if is_hung else 50_000_000)
    machine.watch(range(len(machine.hosts)), end_ns)
    has_gpu_times = bool(rng.random() < (_GPU_TIMES_OF_GPU_FAULTS if done and done.slow_gpus else _GPU_TIMES))
    view = _view(b, machine, rng, last_ns, has_gpu_times=has_gpu_times)
    made = trace(b, machine, done, view, rng, end_ns=end_ns)
    truth = Truth(done, 0.0, 0.0, 0.0, b.uneven, b.may_name, has_gpu_times, len(b.generations[-1]))
    if done and twin:
        ended_ns = end_ns if is_hung else last_ns
        truth = _with_cost(truth, b, machine, twin, view, twin_ns=twin_ns, ended_ns=ended_ns)
    return made, truth


def _execute(b: Builder, start_ns: list[int]) -> tuple[Machine, int]:
    """Run all generations of processes, one after the other."""
    machine = Machine(b.groups, b.programs, start_ns)
    last_ns = 0
    for number, members in enumerate(b.generations):
        if number:
            for i in members:
                machine.hosts[i].move(last_ns + _RESTART_NS + start_ns[i])
        last_ns = machine.run(members)
        if not all(machine.hosts[i].done for i in members):
            break
    return machine, last_ns


def _step_ns(b: Builder, machine: Machine) -> float:
    """The usual step of the last generation's first process."""
    begins = machine.hosts[b.generations[-1][0]].step_begins_ns
    return float(np.median(np.diff(begins[4:])))


def _view(
    b: Builder, machine: Machine, rng: np.random.Generator, last_ns: int, *, has_gpu_times: bool
) -> View:
    n_nodes = max(b.node_of) + 1
    begins, ends = np.zeros(n_nodes, np.int64), np.full(n_nodes, _FOREVER_NS)
    steps = machine.hosts[0].step_begins_ns
    at_ns = steps[int(len(steps) * rng.uniform(0.1, 0.25))]
    if b.capture.startswith("late"):
        late = rng.integers(n_nodes) if b.capture == "late_on_one_node" else slice(None)
        begins[late] = at_ns
    elif b.capture == "died":
        ends[rng.integers(n_nodes)] = last_ns * float(rng.uniform(0.5, 0.8))
    return View(begins, ends, has_gpu_times)


def _with_cost(
    truth: Truth, b: Builder, machine: Machine, twin: Machine, view: View, *, twin_ns: int, ended_ns: int
) -> Truth:
    """The cost of the fault. twin_ns: when the twin ended; ended_ns: when the job ended, or its watch."""
    fault = truth.fault
    assert fault
    host, other = (made.hosts[b.generations[-1][0]].step_begins_ns for made in (machine, twin))
    lost_ns = ended_ns - (machine.stopped_ns() or twin_ns)
    n_victims = len(b.generations[-1]) - len(fault.ranks)
    seen_ns = np.array([a - z for a, z in zip(host, other, strict=False)])
    recorded_ns = lost_ns
    if b.capture and not machine.stopped_ns():
        watched = (np.array(host) >= view.begins_ns.max()) & (np.array(host) <= view.ends_ns.min())
        of_watched = seen_ns[watched[: len(seen_ns)]]
        recorded_ns = int(np.ptp(of_watched)) if len(of_watched) else 0
    return replace(
        truth,
        cost_gpu_s=lost_ns * n_victims / 1e9,
        recorded_gpu_s=recorded_ns * n_victims / 1e9,
        cost_share=lost_ns / max(ended_ns - host[fault.first_step], 1),
    )
