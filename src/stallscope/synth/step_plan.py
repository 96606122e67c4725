"""The costs of one step, rank by rank: base durations, scatter, warm-up; and the costs added by faults.

A plan uses one random stream that faults do not touch, so that a run and its twin without the
fault have the same scatter. Faults then change the plan, with random numbers of a separate stream.
"""

from dataclasses import dataclass, field

import numpy as np

from stallscope.events.layout import Array
from stallscope.events.names import DATATYPE_BYTES, Category, Datatype, Op
from stallscope.synth.simulated_job import Family, Job, Timing
from stallscope.synth.simulated_program import Instruction, Kind, Phase


@dataclass(frozen=True)
class Stall:
    """Host time that some ranks spend before an instruction.

    ns: (ranks,); shares: of ns by category, together 1. n_syncs, n_allocs, n_copies: calls made during it.
    drains: the host first waits for its own device, like a blocking copy.
    """

    ranks: Array
    ns: Array
    shares: dict[Category, float]
    n_syncs: int = 0
    n_allocs: int = 0
    n_copies: int = 0
    drains: bool = False


@dataclass(frozen=True)
class Vanish:
    """Ranks stop before an instruction and never continue; a dead process has ended."""

    ranks: Array
    category: Category
    is_dead: bool


@dataclass(frozen=True)
class Mismatch:
    """Ranks enter a collective with other arguments; None: the same as their peers. The collective never ends."""

    ranks: Array
    op: Op | None = None
    count: int | None = None
    datatype: Datatype | None = None

    def fill(self, rows: Array, culprit_rows: Array) -> None:
        """Write the different values into the culprits' rows."""
        if self.op is not None:
            rows["op"][culprit_rows] = self.op
        if self.datatype is not None:
            rows["datatype"][culprit_rows] = self.datatype
        if self.count is not None:
            rows["count"][culprit_rows] = self.count
        size = np.array(DATATYPE_BYTES)[rows["datatype"]]
        rows["count_bytes"] = rows["count"] * size


@dataclass(frozen=True)
class Crossing:
    """Ranks enter the collective `partner` (a later instruction) before this collective. Neither ends."""

    ranks: Array
    partner: int


@dataclass
class Plan:
    """Costs of one step, ns: host and device are (instructions, ranks); the rest by instruction number."""

    step: int
    program: tuple[Instruction, ...]
    host: Array
    device: Array
    stalls: dict[int, list[Stall]] = field(default_factory=dict)
    vanishing: dict[int, Vanish] = field(default_factory=dict)
    mismatches: dict[int, Mismatch] = field(default_factory=dict)
    crossings: dict[int, Crossing] = field(default_factory=dict)
    more_launches: dict[int, int] = field(default_factory=dict)

    def add_stall(self, at: int, stall: Stall) -> None:
        """Let ranks stall before instruction `at`."""
        self.stalls.setdefault(at, []).append(stall)

    def launches_by_rank(self, ranks: slice) -> Array:
        """The factor on the launch count of each rank; more_launches: of the ranks that launch more."""
        times = np.ones(ranks.stop - ranks.start, np.int64)
        for rank, factor in self.more_launches.items():
            if ranks.start <= rank < ranks.stop:
                times[rank - ranks.start] = factor
        return times

    def early(self, at: int) -> Array | None:
        """Ranks that have entered instruction `at` before its time."""
        crossed = [c.ranks for c in self.crossings.values() if c.partner == at]
        return crossed[0] if crossed else None

    def positions(self, rank: int, kinds: tuple[Kind, ...], phase: Phase | None = None) -> list[int]:
        """Instructions of a rank of certain kinds, in order."""
        return [
            i
            for i, made in enumerate(self.program)
            if made.ranks.start <= rank < made.ranks.stop
            and made.kind in kinds
            and (phase is None or made.phase is phase)
        ]


@dataclass
class Speeds:
    """Factors on a rank's host and device costs: constant for the job, and the wander of its host (a log)."""

    host: Array
    device: Array
    wander: Array

    def host_now(self, timing: Timing, rng: np.random.Generator) -> Array:
        """The host factors of the next step."""
        memory = timing.host_wander_memory
        fresh = timing.host_wander_sigma * rng.standard_normal(len(self.wander))
        self.wander = memory * self.wander + np.sqrt(1 - memory**2) * fresh
        now: Array = (self.host * np.exp(self.wander)).astype(np.float32)
        return now


def speeds(job: Job, timing: Timing, rng: np.random.Generator) -> Speeds:
    """Draw each rank's own speed."""
    host = np.exp(timing.host_speed_sigma * rng.standard_normal(job.nranks))
    device = np.exp(timing.device_speed_sigma * rng.standard_normal(job.nranks))
    wander = timing.host_wander_sigma * rng.standard_normal(job.nranks)
    return Speeds(host, device.astype(np.float32), wander)


_SPIKES = (
    ({Category.ON_CPU: 1.0}, 0.70),
    ({Category.DRIVER: 1.0}, 0.12),
    ({Category.PREEMPTED: 1.0}, 0.08),
    ({Category.LOCK: 1.0}, 0.06),
    ({Category.OTHER_OFF: 1.0}, 0.04),
)
"""The ledger category of an ordinary host spike, with its frequency."""


def plan(
    step: int,
    program: tuple[Instruction, ...],
    *,
    timing: Timing,
    speed: Speeds,
    used: set[Family],
    rng: np.random.Generator,
) -> Plan:
    """The healthy costs of a step; families that the step uses are added to `used`."""
    shape = (len(program), len(speed.host))
    host_base = np.array([made.host_ns for made in program], np.float32)[:, None]
    device_base = np.array([made.device_ns for made in program], np.float32)[:, None]
    warm = timing.warmup_factors[step] if 0 <= step < len(timing.warmup_factors) else 1.0
    host = _scatter(shape, timing.host_jitter_sigma, rng) * (host_base * warm) * speed.host_now(timing, rng)
    device = _scatter(shape, timing.device_jitter_sigma, rng) * device_base * speed.device
    made = Plan(step, program, host.astype(np.int64), device.astype(np.int64))
    _add_spikes(made, timing, rng)
    for at, instruction in enumerate(program):
        if instruction.family is not None and instruction.family not in used:
            used.add(instruction.family)
            first = timing.first_use_ns * np.exp(0.1 * rng.standard_normal(shape[1]))
            made.host[at] += first.astype(np.int64)
    return made


def _scatter(shape: tuple[int, int], sigma: float, rng: np.random.Generator) -> Array:
    noise = rng.standard_normal(shape, np.float32)
    noise *= np.float32(sigma)
    return np.exp(noise, out=noise)


def _add_spikes(made: Plan, timing: Timing, rng: np.random.Generator) -> None:
    """A few ranks lose a fraction of a millisecond at some instruction, for an ordinary reason."""
    n_instructions, n_ranks = made.host.shape
    n = rng.poisson(timing.spike_probability * n_instructions * n_ranks)
    at, rank = rng.integers(0, n_instructions, n), rng.integers(0, n_ranks, n)
    ns = (timing.spike_ns * np.exp(timing.spike_sigma * rng.standard_normal(n))).astype(np.int64)
    kind = rng.choice(len(_SPIKES), n, p=[share for _, share in _SPIKES])
    order = np.lexsort((kind, at))
    edges = np.flatnonzero(np.diff(at[order] * len(_SPIKES) + kind[order])) + 1
    for part in np.split(order, edges) if n else ():
        ranks, first = np.unique(rank[part], return_index=True)
        made.add_stall(int(at[part[0]]), Stall(ranks, ns[part][first], _SPIKES[int(kind[part[0]])][0]))
