"""The steps in which a fault occurs."""

from dataclasses import dataclass

import numpy as np

from stallscope.synth.simulated_program import Kind, Phase
from stallscope.synth.step_plan import Plan


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every `every` steps from step `first` on, before step `until`; each time with `probability`.

    where: the phase in which it occurs; None: anywhere in the step.
    """

    first: int = 10
    every: int = 1
    until: int | None = None
    probability: float = 1.0
    where: Phase | None = Phase.BEGIN

    def is_active(self, number: int, rng: np.random.Generator) -> bool:
        """Whether the fault occurs in step `number`."""
        if number < self.first or (self.until is not None and number >= self.until):
            return False
        if (number - self.first) % self.every:
            return False
        return self.probability >= 1.0 or bool(rng.random() < self.probability)

    @property
    def period_steps(self) -> int | None:
        """The period, if above a single step."""
        return self.every if self.every > 1 and self.probability >= 1.0 else None

    def position(self, plan: Plan, rank: int, rng: np.random.Generator) -> int:
        """The instruction before which it occurs: the phase's first, or any instruction with host work."""
        if self.where is Phase.BEGIN:
            return plan.positions(rank, (Kind.WORK,), Phase.BEGIN)[0]
        kinds = (Kind.COMPUTE, Kind.COLLECTIVE)
        slots = plan.positions(rank, kinds, self.where) or plan.positions(rank, kinds)
        return int(slots[rng.integers(len(slots))])
