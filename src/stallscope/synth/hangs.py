"""Faults after which a job never continues: missing ranks, mismatched calls, crossed order."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stallscope.errors import BadInput
from stallscope.events.names import Category, Datatype, Op
from stallscope.synth.fault_models import Answer
from stallscope.synth.schedule import Schedule
from stallscope.synth.simulated_job import Family
from stallscope.synth.simulated_program import Kind, Phase
from stallscope.synth.step_plan import Crossing, Mismatch, Plan, Vanish


@dataclass(frozen=True, kw_only=True)
class MissingRank:
    """Ranks stop in a step: they stay in `doing` forever, or their process ends."""

    ranks: tuple[int, ...]
    step: int
    doing: Category = Category.SLEEP
    is_dead: bool = False
    where: Phase = Phase.BEGIN

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Take the ranks away, all at the same instruction of the step."""
        if plan.step != self.step:
            return 0
        at = Schedule(where=self.where).position(plan, self.ranks[0], rng)
        plan.vanishing[at] = Vanish(np.array(self.ranks), self.doing, self.is_dead)
        return 1

    def answer(self) -> Answer:
        """The missing ranks."""
        cause = "dead_process" if self.is_dead else "missing_rank"
        return Answer("hang", self.ranks, cause, first_step=self.step)


@dataclass(frozen=True, kw_only=True)
class MismatchedCall:
    """Ranks enter a round with an op, count or datatype other than their peers': `differs` names the field."""

    ranks: tuple[int, ...]
    step: int
    differs: str = "count"
    where: Phase = Phase.BACKWARD

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Change one collective of the step."""
        if plan.step != self.step:
            return 0
        slots = plan.positions(self.ranks[0], (Kind.COLLECTIVE,))
        slots = [i for i in slots if plan.program[i].phase is self.where] or slots
        at = int(slots[rng.integers(len(slots))])
        made, ranks = plan.program[at], np.array(self.ranks)
        if self.differs == "count":
            plan.mismatches[at] = Mismatch(ranks, count=made.count + 4096)
        elif self.differs == "datatype":
            plan.mismatches[at] = Mismatch(ranks, datatype=Datatype.FLOAT32)
        elif self.differs == "op":
            other = Op.ALL_GATHER if made.op is Op.ALL_REDUCE else Op.ALL_REDUCE
            plan.mismatches[at] = Mismatch(ranks, op=other)
        else:
            raise BadInput(f"mismatch in {self.differs!r}: choose op, count or datatype")
        return 1

    def answer(self) -> Answer:
        """The ranks that differ."""
        return Answer("hang", self.ranks, f"mismatch_{self.differs}", first_step=self.step)


@dataclass(frozen=True, kw_only=True)
class CrossedOrder:
    """Ranks enter two collectives on two communicators in the reverse order of their peers.

    The job hangs for certain only if the second group contains the first: peers that wait in the first
    never reach the second. Needs a job with experts or with grad_norm.
    """

    ranks: tuple[int, ...]
    step: int

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Swap the last such pair of the step."""
        if plan.step != self.step:
            return 0
        first, second = self._pair(plan)
        plan.crossings[first] = Crossing(np.array(self.ranks), second)
        return 1

    def _pair(self, plan: Plan) -> tuple[int, int]:
        slots = plan.positions(self.ranks[0], (Kind.COLLECTIVE,))
        for first, second in reversed(list(pairwise(slots))):
            inner, outer = plan.program[first].family, plan.program[second].family
            if inner is not outer and (
                outer is Family.WORLD or (inner, outer) == (Family.EXPERT, Family.DATA)
            ):
                return first, second
        raise BadInput("crossed order: this job has no two nested groups; use ep above 1 or grad_norm")

    def answer(self) -> Answer:
        """The ranks out of order."""
        return Answer("hang", self.ranks, "crossed_order", first_step=self.step)
