"""Faults that make the work itself slower: slow launches, slow or shared devices, uneven work."""

from dataclasses import dataclass, field

import numpy as np

from stallscope.events.names import Category
from stallscope.synth.fault_models import Answer
from stallscope.synth.schedule import Schedule
from stallscope.synth.simulated_program import Kind
from stallscope.synth.step_plan import Plan, Stall


@dataclass(frozen=True, kw_only=True)
class SlowLaunches:
    """Ranks launch `factor` times as many tiny kernels, and take `factor` times as long to enqueue them.

    No ranks: all are equally slow, which is a slow job without a culprit.
    """

    ranks: tuple[int, ...] = ()
    factor: float = 3.0
    schedule: Schedule = field(default_factory=Schedule)

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Stretch the host's part of every computation."""
        if not self.schedule.is_active(plan.step, rng):
            return 0
        rows = [i for i, made in enumerate(plan.program) if made.kind is Kind.COMPUTE]
        columns = list(self.ranks) or list(range(plan.host.shape[1]))
        part = np.ix_(rows, columns)
        plan.host[part] = (plan.host[part] * self.factor).astype(np.int64)
        plan.more_launches.update(dict.fromkeys(columns, round(self.factor)))
        return 1

    def answer(self) -> Answer:
        """The slow ranks; no ranks if all are slow."""
        kind = "straggler" if self.ranks else "all_slow"
        return Answer(kind, self.ranks, "launch_bound", first_step=self.schedule.first, is_in_launches=True)


@dataclass(frozen=True, kw_only=True)
class SlowDevice:
    """The kernels of some ranks take `factor` times as long: a throttled GPU, or a stage with more layers."""

    ranks: tuple[int, ...]
    factor: float = 1.5
    kind: str = "device"
    cause: str = "gpu_slow"
    schedule: Schedule = field(default_factory=Schedule)

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Stretch the device's part of every computation."""
        if not self.schedule.is_active(plan.step, rng):
            return 0
        rows = [i for i, made in enumerate(plan.program) if made.kind is Kind.COMPUTE]
        part = np.ix_(rows, list(self.ranks))
        plan.device[part] = (plan.device[part] * self.factor).astype(np.int64)
        return 1

    def answer(self) -> Answer:
        """The ranks with the slow devices."""
        return Answer(
            self.kind,
            self.ranks,
            self.cause,
            self.schedule.period_steps,
            first_step=self.schedule.first,
            is_on_device=True,
        )


@dataclass(frozen=True, kw_only=True)
class SharedDevice:
    """Another process uses the GPU of some ranks: irregular delays of kernels, about delay_ns each.

    probability: that a kernel group meets one.
    """

    ranks: tuple[int, ...]
    delay_ns: int = 3_000_000
    probability: float = 0.3
    schedule: Schedule = field(default_factory=Schedule)

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Delay some kernel groups by exponentially distributed times."""
        if not self.schedule.is_active(plan.step, rng):
            return 0
        rows = np.array([i for i, made in enumerate(plan.program) if made.kind is Kind.COMPUTE])
        for rank in self.ranks:
            met = rows[rng.random(len(rows)) < self.probability]
            plan.device[met, rank] += rng.exponential(self.delay_ns, len(met)).astype(np.int64)
        return 1

    def answer(self) -> Answer:
        """The ranks that share their GPU."""
        return Answer(
            "device",
            self.ranks,
            "gpu_shared",
            delay_ns=self.delay_ns,
            first_step=self.schedule.first,
            is_on_device=True,
        )


@dataclass(frozen=True, kw_only=True)
class MovingImbalance:
    """In each step another rank, at random, has delay_ns more work: long sequences, uneven experts.

    on_host: the work is the host's; otherwise the device's.
    """

    delay_ns: int
    spread: float = 0.3
    on_host: bool = True
    schedule: Schedule = field(default_factory=Schedule)

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Give one rank more work at one instruction."""
        if not self.schedule.is_active(plan.step, rng):
            return 0
        rank = int(rng.integers(plan.host.shape[1]))
        ns = int(self.delay_ns * np.exp(self.spread * rng.standard_normal()))
        at = self.schedule.position(plan, rank, rng)
        if self.on_host:
            plan.add_stall(at, Stall(np.array([rank]), np.array([ns]), {Category.ON_CPU: 1.0}))
        else:
            plan.device[plan.positions(rank, (Kind.COMPUTE,))[0], rank] += ns
        return 1

    def answer(self) -> Answer:
        """No ranks: the culprit changes from step to step."""
        return Answer(
            "imbalance",
            (),
            "imbalance",
            delay_ns=self.delay_ns,
            first_step=self.schedule.first,
            is_on_device=not self.on_host,
        )
