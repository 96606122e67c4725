"""Faults to inject: each changes the plan of a step and knows the right answer.

A fault is any class with `apply`: faults share a protocol, not a parent. `HostStall` covers
every cause that delays one rank's host; its ledger categories are in HOST_CAUSES.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from stallscope.errors import BadInput
from stallscope.events.names import Category
from stallscope.synth.schedule import Schedule
from stallscope.synth.simulated_program import Kind
from stallscope.synth.step_plan import Plan, Stall


@dataclass(frozen=True)
class Answer:
    """The right diagnosis of one fault; delay_ns is the mean injected delay of one incident.

    is_on_device: the hosts cannot show which rank it is. is_in_launches: without launch timing it appears as time
    on the CPU. is_from_start: the trace has no earlier time for comparison.
    """

    kind: str
    ranks: tuple[int, ...]
    cause: str
    period_steps: int | None = None
    delay_ns: int = 0
    first_step: int = 0
    is_on_device: bool = False
    is_in_launches: bool = False

    @property
    def is_from_start(self) -> bool:
        return self.first_step == 0


class Fault(Protocol):
    """A fault to inject."""

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Change the plan of a step; returns the number of added incidents."""

    def answer(self) -> Answer:
        """The right diagnosis."""


@dataclass(frozen=True)
class Signature:
    """The ledger signature of a cause: shares of the delay, and the calls made during it."""

    shares: dict[Category, float]
    n_syncs: int = 0
    n_allocs: int = 0
    n_copies: int = 0
    chunks: int = 1
    drains: bool = False


HOST_CAUSES = {
    "host_sleep": Signature({Category.SLEEP: 0.995, Category.ON_CPU: 0.005}),
    "host_compute": Signature({Category.ON_CPU: 0.98, Category.PREEMPTED: 0.02}),
    "cpu_preemption": Signature({Category.PREEMPTED: 0.97, Category.ON_CPU: 0.03}, chunks=8),
    "process_stopped": Signature({Category.STOPPED: 1.0}),
    "block_io": Signature({Category.IO: 0.93, Category.ON_CPU: 0.05, Category.PREEMPTED: 0.02}),
    "lock_contention": Signature({Category.LOCK: 0.99, Category.ON_CPU: 0.01}),
    "network_wait": Signature({Category.NET: 0.99, Category.ON_CPU: 0.01}),
    "input_starvation": Signature({Category.CHILD: 0.98, Category.ON_CPU: 0.02}),
    "page_fault": Signature({Category.FAULT: 0.9, Category.ON_CPU: 0.1}),
    "driver": Signature({Category.DRIVER: 0.96, Category.ON_CPU: 0.04}),
    "cuda_alloc": Signature({Category.ALLOC: 0.92, Category.ON_CPU: 0.06, Category.LOCK: 0.02}, n_allocs=32),
    "host_device_copy": Signature({Category.COPY: 0.97, Category.ON_CPU: 0.03}, n_copies=1, drains=True),
    "excessive_sync": Signature(
        {Category.DEVICE: 0.6, Category.ON_CPU: 0.4}, n_syncs=400, n_copies=400, drains=True
    ),
}
"""Causes that delay one rank's host, by name; the shares follow the recordings of such faults."""


@dataclass(frozen=True, kw_only=True)
class HostStall:
    """Ranks' hosts are delayed by delay_ns, scattered by lognormal(spread)."""

    cause: str
    ranks: tuple[int, ...]
    delay_ns: int
    spread: float = 0.1
    kind: str = "straggler"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Raises BadInput for a cause without a ledger signature."""
        if self.cause not in HOST_CAUSES:
            raise BadInput(f"simulated cause {self.cause!r}: choose one of {', '.join(HOST_CAUSES)}")

    def apply(self, plan: Plan, rng: np.random.Generator) -> int:
        """Stall each rank at its own instruction of the step."""
        if not self.schedule.is_active(plan.step, rng):
            return 0
        signature = HOST_CAUSES[self.cause]
        for rank in self.ranks:
            ns = int(self.delay_ns * np.exp(self.spread * rng.standard_normal()))
            for at in self._instructions(plan, rank, signature, rng):
                plan.add_stall(at, _stall(signature, rank, ns // signature.chunks))
        return 1

    def _instructions(
        self, plan: Plan, rank: int, signature: Signature, rng: np.random.Generator
    ) -> list[int]:
        if signature.chunks == 1:
            return [self.schedule.position(plan, rank, rng)]
        slots = plan.positions(rank, (Kind.WORK, Kind.COMPUTE, Kind.COLLECTIVE))
        return [int(index) for index in rng.choice(slots, signature.chunks)]

    def answer(self) -> Answer:
        """The stalled ranks, for this cause; no ranks if all are stalled equally."""
        ranks = () if self.kind == "all_slow" else self.ranks
        return Answer(
            self.kind, ranks, self.cause, self.schedule.period_steps, self.delay_ns, self.schedule.first
        )


def _stall(signature: Signature, rank: int, ns: int) -> Stall:
    return Stall(
        np.array([rank]),
        np.array([ns], np.int64),
        signature.shares,
        n_syncs=signature.n_syncs,
        n_allocs=signature.n_allocs,
        n_copies=signature.n_copies,
        drains=signature.drains,
    )
