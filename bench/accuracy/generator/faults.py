"""The faults: each changes the programs of a job and states the right answer.

Sizes are relative to the job's own step. Faults draw from a random stream of their own, so the job without the fault
scatters equally; its total time gives the true cost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from generator.builder import MS, Builder
from generator.program import Collective, Host, Instruction, Kernel, Step, Stop, Sync
from stallscope.events.names import Category


@dataclass(frozen=True)
class Fault:
    """The fault of a job. ranks: the culprits, none where the job slows down as a whole.

    causes: names that are right. period: in steps, None where it does not recur regularly. gpu: the processes whose
    GPU is slow, by first and last step, for the GPU's own records.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()
    period: int | None = None
    first_step: int = 0
    slow_gpus: tuple[int, ...] = ()
    slow_factor: float = 1.0
    slow_steps: tuple[int, ...] = ()


@dataclass
class Injection:
    """A job whose programs a fault may change. step_ns: its usual step; processes: those that can be culprits."""

    b: Builder
    step_ns: float
    rng: np.random.Generator
    processes: list[int]

    @property
    def n_steps(self) -> int:
        return len(self.b.programs[self.processes[0]])

    def culprit(self) -> int:
        return int(self.rng.choice(self.processes))

    def delay_ns(self, low: float = 0.4, high: float = 2.0) -> float:
        return max(float(self.rng.uniform(low, high)) * self.step_ns, 10 * MS)

    def change(self, i: int, k: int, made: Step) -> None:
        """Put another step k into the program of process i; the program of the twin keeps its own."""
        self.b.programs[i][k] = made

    def hold(self, i: int, k: int, holds: list[Host]) -> None:
        """Insert host delays into a step: one at a random place before the last synchronise call, several all over."""
        step = self.b.programs[i][k]
        last = max((n for n, made in enumerate(step) if isinstance(made, Sync)), default=len(step))
        indexes = sorted(self.rng.integers(0, last + 1, len(holds)).tolist(), reverse=True)
        made = list(step)
        for at, hold in zip(indexes, holds, strict=True):
            made.insert(at, hold)
        self.change(i, k, made)


Injector = Callable[[Injection], Fault]

HOLDS = {
    "host_sleep": (Category.SLEEP, 1, ("host_sleep", "blocked")),
    "disk_io": (Category.IO, 2, ("block_io",)),
    "cpu_preemption": (Category.PREEMPTED, 12, ("cpu_preemption",)),
    "lock": (Category.LOCK, 4, ("lock_contention",)),
    "input": (Category.CHILD, 1, ("input_starvation",)),
    "host_compute": (Category.ON_CPU, 1, ("host_compute",)),
}
"""Host delays by name: ledger category, into how many pieces the delay is cut, causes that are right."""


def _pieces(category: int, ns: float, n: int, rng: np.random.Generator) -> list[Host]:
    shares = rng.dirichlet(np.full(n, 4.0))
    return [Host(category, int(ns * share)) for share in shares]


def _host(name: str) -> Injector:
    def inject(job: Injection) -> Fault:
        category, n, causes = HOLDS[name]
        i, every = job.culprit(), int(job.rng.integers(1, 7))
        first = int(job.rng.integers(8, 16))
        delay_ns = job.delay_ns() if every > 1 else job.delay_ns(0.25, 0.8)
        for k in range(first, job.n_steps, every):
            ns = delay_ns * float(np.exp(0.1 * job.rng.standard_normal()))
            job.hold(i, k, _pieces(category, ns, n, job.rng))
        return Fault(name, (i,), causes, every, first)

    return inject


def allocator_churn(job: Injection) -> Fault:
    """The allocator frees and allocates in every step; a free waits for the GPU first."""
    i, first, drains = job.culprit(), int(job.rng.integers(5, 12)), bool(job.rng.random() < 0.5)
    ns = job.delay_ns(0.3, 0.9)
    for k in range(first, job.n_steps):
        share = float(np.exp(0.15 * job.rng.standard_normal()))
        holds = [Host(Category.ALLOC, int(ns * share / 3), (0, 12, 0), drains and n == 0) for n in range(3)]
        job.hold(i, k, holds)
    return Fault("allocator_churn", (i,), ("cuda_alloc",), 1, first)


def _slower(step: Step, factor: float) -> Step:
    return [
        made._replace(gpu_ns=int(made.gpu_ns * factor)) if isinstance(made, Kernel) else made for made in step
    ]


def slow_gpu(job: Injection) -> Fault:
    """One GPU is 20 to 80 % slower from some step on."""
    i, factor = job.culprit(), float(job.rng.uniform(1.2, 1.8))
    first = int(job.n_steps * job.rng.uniform(0.2, 0.45))
    steps = tuple(range(first, job.n_steps))
    for k in steps:
        job.change(i, k, _slower(job.b.programs[i][k], factor))
    return Fault("slow_gpu", (i,), ("gpu_slow", "gpu_shared"), None, first, (i,), factor, steps)


def slow_gpu_at_times(job: Injection) -> Fault:
    """One GPU is 1.4 to 2.2 times as slow for 3 to 6 steps, again and again."""
    i, factor = job.culprit(), float(job.rng.uniform(1.4, 2.2))
    k, steps = int(job.rng.integers(8, 14)), []
    first = k
    while k < job.n_steps:
        steps += range(k, min(k + int(job.rng.integers(3, 7)), job.n_steps))
        k = steps[-1] + int(job.rng.integers(6, 13))
    for at in steps:
        job.change(i, at, _slower(job.b.programs[i][at], factor))
    return Fault(
        "slow_gpu_at_times", (i,), ("gpu_slow", "gpu_shared"), None, first, (i,), factor, tuple(steps)
    )


def growing_delay(job: Injection) -> Fault:
    """A host delay that grows from nothing to one or two steps."""
    i, first, max_ns = job.culprit(), int(job.rng.integers(6, 12)), job.delay_ns(0.8, 2.0)
    category, cause = (
        (Category.ON_CPU, "host_compute") if job.rng.random() < 0.5 else (Category.LOCK, "lock_contention")
    )
    for k in range(first, job.n_steps):
        job.hold(i, k, [Host(category, int(max_ns * (k - first + 1) / (job.n_steps - first)))])
    return Fault("growing_delay", (i,), (cause,), None, first)


def periodic_delay(job: Injection) -> Fault:
    """A long delay every 7 to 15 steps."""
    i, every, first = job.culprit(), int(job.rng.integers(7, 16)), int(job.rng.integers(6, 12))
    name = str(job.rng.choice(["host_sleep", "disk_io", "input"]))
    category, n, causes = HOLDS[name]
    delay_ns = job.delay_ns(1.5, 4.0)
    for k in range(first, job.n_steps, every):
        job.hold(
            i, k, _pieces(category, delay_ns * float(np.exp(0.1 * job.rng.standard_normal())), n, job.rng)
        )
    return Fault("periodic_delay", (i,), causes, every, first)


def _late_nodes(job: Injection, nodes: list[int], kind: str) -> Fault:
    b = job.b
    ranks = tuple(i for i in job.processes if b.node_of[i] in nodes)
    every, first = int(job.rng.integers(2, 8)), int(job.rng.integers(6, 12))
    delay_ns = job.delay_ns(0.8, 2.5)
    for k in range(first, job.n_steps, every):
        of_all = float(np.exp(0.1 * job.rng.standard_normal()))
        for i in ranks:
            own = float(np.exp(0.05 * job.rng.standard_normal()))
            step = list(b.programs[i][k])
            step.insert(0, Host(Category.IO, int(delay_ns * of_all * own)))
            job.change(i, k, step)
    return Fault(kind, ranks, ("block_io",), every, first)


def late_node(job: Injection) -> Fault:
    """All ranks of one node wait for its disk together."""
    nodes = sorted({job.b.node_of[i] for i in job.processes})
    return _late_nodes(job, [int(job.rng.choice(nodes))], "late_node")


def late_nodes(job: Injection) -> Fault:
    """All ranks of two nodes of four or more wait for a disk that the nodes share."""
    nodes = sorted({job.b.node_of[i] for i in job.processes})
    return _late_nodes(job, job.rng.choice(nodes, len(nodes) // 2, replace=False).tolist(), "late_nodes")


def slower_job(job: Injection) -> Fault:
    """All ranks are slower by 15 to 40 % from some step on: input, CPU, GPUs or fabric."""
    first = int(job.n_steps * job.rng.uniform(0.35, 0.6))
    share, how = float(job.rng.uniform(0.15, 0.4)), str(job.rng.choice(["io", "cpu", "gpus", "fabric"]))
    for k in range(first, job.n_steps):
        for i in job.processes:
            step = job.b.programs[i][k]
            if how == "gpus":
                step = _slower(step, 1 + share)
            elif how == "fabric":
                n = sum(isinstance(made, Collective) for made in step)
                more = int(share * job.step_ns / max(n, 1))
                step = [
                    made._replace(gpu_ns=made.gpu_ns + more) if isinstance(made, Collective) else made
                    for made in step
                ]
            else:
                ns = int(share * job.step_ns * float(np.exp(0.02 * job.rng.standard_normal())))
                step = [Host(Category.IO if how == "io" else Category.ON_CPU, ns), *step]
            job.change(i, k, step)
    return Fault("slower_job", (), (how,), None, first)


def slow_link(job: Injection) -> Fault:
    """The link between two ranks becomes slow: the collectives of one group of two take longer from some step on."""
    first, pairs = int(job.n_steps * job.rng.uniform(0.2, 0.5)), _pairs(job.b)
    number = pairs[int(job.rng.integers(len(pairs)))]
    members = job.b.groups[number].members
    n = sum(
        isinstance(made, Collective) and made.group == number for made in job.b.programs[members[0]][first]
    )
    more_ns = int(job.delay_ns(0.2, 0.6) / n)
    for i in members:
        for k in range(first, job.n_steps):
            step = job.b.programs[i][k]
            is_slow = [isinstance(made, Collective) and made.group == number for made in step]
            job.change(
                i,
                k,
                [_longer(made, more_ns) if slow else made for made, slow in zip(step, is_slow, strict=True)],
            )
    return Fault("slow_link", members, (), None, first)


def _pairs(b: Builder) -> list[int]:
    """The groups of two that make collectives, by number."""
    made = {
        made.group
        for program in b.programs
        for made in program[0]
        if type(made) is Collective and made.peer < 0
    }
    return sorted(number for number in made if len(b.groups[number].members) == 2)


def _longer(made: Instruction, ns: int) -> Instruction:
    assert isinstance(made, Collective)
    return made._replace(gpu_ns=made.gpu_ns + ns)


def hang(job: Injection) -> Fault:
    """One rank never enters a round: asleep, in a lock, on the CPU, or its process has ended."""
    i, k = job.culprit(), int(job.rng.integers(job.n_steps // 3, job.n_steps - 3))
    category = int(job.rng.choice([Category.SLEEP, Category.LOCK, Category.ON_CPU, Category.NET]))
    is_dead = bool(job.rng.random() < 0.25)
    step = job.b.programs[i][k]
    indexes = [n for n, made in enumerate(step) if isinstance(made, Collective)]
    at = int(job.rng.choice(indexes)) if indexes else 0
    job.change(i, k, [*step[:at], Stop(Category.NONE if is_dead else category, is_dead)])
    return Fault("hang", (i,), (), None, k)


def one_stop(job: Injection) -> Fault:
    """One stop of 0.5 to 2 s: the process was stopped, or waited for a disk."""
    i, k = job.culprit(), int(job.rng.integers(8, job.n_steps - 3))
    category, cause = (
        (Category.STOPPED, "process_stopped") if job.rng.random() < 0.5 else (Category.IO, "block_io")
    )
    job.hold(i, k, [Host(category, int(max(job.rng.uniform(0.5, 2.0) * 1e9, 3 * job.step_ns)))])
    return Fault("one_stop", (i,), (cause,), None, k)


FAULTS: dict[str, Injector] = {
    **{name: _host(name) for name in HOLDS},
    **{
        made.__name__: made
        for made in (
            *(allocator_churn, slow_gpu, slow_gpu_at_times, growing_delay, periodic_delay, late_node),
            *(late_nodes, slower_job, hang, one_stop, slow_link),
        )
    },
}


def fits(b: Builder, name: str) -> bool:
    """Whether a job can have a fault: late nodes need several nodes, a slow link needs groups of two."""
    n_nodes = len(set(b.node_of))
    if name == "late_node":
        return n_nodes > 1 and b.ranks_per_node > 1
    if name == "slow_link":
        return bool(_pairs(b))
    return name != "late_nodes" or n_nodes >= 4


def inject(b: Builder, name: str, *, step_ns: float, seed: int) -> Fault:
    """Change the programs of a job; the culprits are among its last generation of processes."""
    rng = np.random.default_rng([seed, 23, sorted(FAULTS).index(name)])
    fault = FAULTS[name](Injection(b, step_ns, rng, b.generations[-1]))
    return replace(fault, ranks=tuple(sorted(b.rank_of[i] for i in fault.ranks)))
