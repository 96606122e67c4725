"""A catalogue: shapes of jobs, faults in them, and healthy jobs of every kind.

A scenario is a shape's name, a fault's name and a seed; the seed determines the culprit and the time.
"""

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import numpy as np

from stallscope.errors import NotFound
from stallscope.events.names import Category
from stallscope.events.trace import Trace
from stallscope.synth.fault_models import HOST_CAUSES, Fault, HostStall
from stallscope.synth.hangs import CrossedOrder, MismatchedCall, MissingRank
from stallscope.synth.observed import Capture
from stallscope.synth.schedule import Schedule
from stallscope.synth.simulate import simulate
from stallscope.synth.simulated_clocks import ClockSpread
from stallscope.synth.simulated_job import Job, Timing
from stallscope.synth.simulated_program import Phase
from stallscope.synth.slow import MovingImbalance, SharedDevice, SlowDevice, SlowLaunches
from stallscope.synth.truth import Truth

SHAPES = {
    "dp8": Job(dp=8, steps=80),
    "dp8-saves": Job(dp=8, steps=100, buckets=2, checkpoint_every=12),
    "fsdp8": Job(dp=8, steps=60, sharded=True),
    "dp16-run-ahead": Job(dp=16, steps=120, sync_every=10),
    "dp8-tp2": Job(dp=8, tp=2, steps=60, layers=3, grad_norm=True),
    "dp4-tp4-pp2": Job(dp=4, tp=4, pp=2, steps=40, layers=1, buckets=2, grad_norm=True),
    "dp4-pp4": Job(dp=4, pp=4, steps=40, layers=1, buckets=1),
    "dp16-ep8": Job(dp=16, ep=8, steps=50, layers=2, buckets=2),
    "dp64": Job(dp=64, steps=60),
    "dp32-tp8": Job(dp=32, tp=8, steps=40, layers=2, buckets=2, grad_norm=True),
    "fsdp256": Job(dp=256, steps=40, layers=3, sharded=True),
    "dp32-tp8-pp4": Job(dp=32, tp=8, pp=4, steps=30, layers=1, buckets=1, microbatches=4, grad_norm=True),
}
"""Jobs of 8 to 1,024 ranks, by name."""

_DELAY_NS = 150_000_000


class Scenario(NamedTuple):
    """One case: a job and its faults."""

    job: Job
    faults: tuple[Fault, ...]


Maker = Callable[[Job, np.random.Generator], tuple[Fault, ...]]


def _rank(job: Job, rng: np.random.Generator) -> int:
    return int(rng.integers(job.nranks))


def _now_and_then(rng: np.random.Generator) -> Schedule:
    phases = (Phase.BEGIN, Phase.FORWARD, Phase.BACKWARD, None)
    return Schedule(
        first=int(rng.integers(6, 12)), every=int(rng.integers(3, 8)), where=phases[rng.integers(4)]
    )


def _stall(cause: str) -> Maker:
    def make(job: Job, rng: np.random.Generator) -> tuple[Fault, ...]:
        ranks = (_rank(job, rng),)
        return (HostStall(cause=cause, ranks=ranks, delay_ns=_DELAY_NS, schedule=_now_and_then(rng)),)

    return make


def _two_culprits(job: Job, rng: np.random.Generator) -> tuple[Fault, ...]:
    ranks = rng.choice(job.nranks, 2, replace=False)
    causes = rng.choice(["host_sleep", "block_io", "lock_contention", "network_wait"], 2, replace=False)
    return tuple(
        HostStall(
            cause=str(cause),
            ranks=(int(rank),),
            delay_ns=_DELAY_NS,
            schedule=Schedule(first=8 + i, every=5 + 2 * i),
        )
        for i, (rank, cause) in enumerate(zip(ranks, causes, strict=True))
    )


def _slow_node(job: Job, rng: np.random.Generator) -> tuple[Fault, ...]:
    ranks = job.ranks_of_node(int(rng.integers(job.n_nodes)))
    schedule = Schedule(first=8, every=3)
    return (
        HostStall(cause="block_io", ranks=ranks, delay_ns=_DELAY_NS, kind="slow_node", schedule=schedule),
    )


def _slow_stage(job: Job, rng: np.random.Generator) -> tuple[Fault, ...]:
    ranks = job.ranks_of_stage(int(rng.integers(job.pp)))
    schedule = Schedule(first=0)
    return (SlowDevice(ranks=ranks, factor=3.0, kind="slow_stage", cause="imbalance", schedule=schedule),)


def _all_slow(job: Job, rng: np.random.Generator) -> tuple[Fault, ...]:
    schedule = Schedule(first=20)
    return (
        HostStall(
            cause="block_io",
            ranks=tuple(range(job.nranks)),
            delay_ns=30_000_000,
            spread=0.02,
            kind="all_slow",
            schedule=schedule,
        ),
    )


def _missing(doing: Category, *, is_dead: bool = False) -> Maker:
    def make(job: Job, rng: np.random.Generator) -> tuple[Fault, ...]:
        where = (Phase.BEGIN, Phase.FORWARD, Phase.BACKWARD)[rng.integers(3)]
        step = int(rng.integers(12, job.steps - 2))
        return (MissingRank(ranks=(_rank(job, rng),), step=step, doing=doing, is_dead=is_dead, where=where),)

    return make


def _mismatch(differs: str) -> Maker:
    def make(job: Job, rng: np.random.Generator) -> tuple[Fault, ...]:
        return (
            MismatchedCall(
                ranks=(_rank(job, rng),), step=int(rng.integers(12, job.steps - 2)), differs=differs
            ),
        )

    return make


FAULTS: dict[str, Maker] = {
    **{cause: _stall(cause) for cause in HOST_CAUSES},
    "launch_bound": lambda job, rng: (SlowLaunches(ranks=(_rank(job, rng),), factor=20.0),),
    "gpu_slow": lambda job, rng: (SlowDevice(ranks=(_rank(job, rng),), factor=3.0),),
    "gpu_shared": lambda job, rng: (SharedDevice(ranks=(_rank(job, rng),)),),
    "slow_stage": _slow_stage,
    "slow_node": _slow_node,
    "two_culprits": _two_culprits,
    "moving_imbalance": lambda job, rng: (MovingImbalance(delay_ns=40_000_000),),
    "moving_imbalance_on_device": lambda job, rng: (MovingImbalance(delay_ns=20_000_000, on_host=False),),
    "all_slow": _all_slow,
    "all_launch_bound": lambda job, rng: (SlowLaunches(factor=5.0, schedule=Schedule(first=0)),),
    "missing_asleep": _missing(Category.SLEEP),
    "missing_on_cpu": _missing(Category.ON_CPU),
    "missing_in_lock": _missing(Category.LOCK),
    "dead_process": _missing(Category.NONE, is_dead=True),
    "mismatch_op": _mismatch("op"),
    "mismatch_count": _mismatch("count"),
    "mismatch_datatype": _mismatch("datatype"),
    "crossed_order": lambda job, rng: (
        CrossedOrder(ranks=(_rank(job, rng),), step=int(rng.integers(12, job.steps - 2))),
    ),
}
"""The faults of the catalogue, by name."""


def fits(shape: str, fault: str) -> bool:
    """Whether a fault can happen in a shape, and has a cost there."""
    job = SHAPES[shape]
    if fault == "slow_stage":
        return job.pp > 1
    if fault == "slow_node":
        return job.n_nodes > 2
    if fault in ("gpu_slow", "gpu_shared"):
        return not job.sharded  # bound by their hosts: no rank waits for a device
    if fault == "crossed_order":
        return job.ep > 1 or job.grad_norm
    return True


def names() -> list[tuple[str, str]]:
    """Every possible (shape, fault)."""
    return [(shape, fault) for shape in SHAPES for fault in FAULTS if fits(shape, fault)]


def scenario(shape: str, fault: str, seed: int) -> Scenario:
    """The job and its faults. Raises NotFound for names that are not in the catalogue."""
    if shape not in SHAPES or fault not in FAULTS:
        raise NotFound(f"simulated scenario {shape!r} with {fault!r}: see SHAPES and FAULTS for names")
    job = SHAPES[shape]
    return Scenario(
        job, FAULTS[fault](job, np.random.default_rng([seed, crc32(f"{shape} {fault}".encode())]))
    )


ON_DEVICE = ("gpu_slow", "gpu_shared", "slow_stage", "moving_imbalance_on_device")
"""Faults that only the GPUs' own times can attribute to a rank."""


IN_LAUNCHES = ("launch_bound",)
"""Faults whose cause only launch timing can show."""


def scene(
    shape: str, fault: str, seed: int, *, capture: Capture = Capture(), has_twin: bool = True
) -> tuple[Trace, Truth]:
    """Simulate one scenario of the catalogue."""
    made = scenario(shape, fault, seed)
    return simulate(made.job, made.faults, seed=seed, capture=capture, has_twin=has_twin)


def healthy(seed: int) -> tuple[Trace, Truth]:
    """A healthy job of 4 to 64 ranks, drawn at random: its shape, scatter, clocks and capture.

    Some checkpoint, some run ahead, some are bound by their launches, some lose records or are attached late.
    """
    rng = np.random.default_rng([seed, 2])
    dp, tp, pp = (int(rng.choice(sizes)) for sizes in ((4, 8, 16), (1, 1, 2), (1, 1, 1, 2)))
    ep = int(rng.choice((1, 1, 2))) if pp == 1 else 1
    job = Job(
        dp=dp,
        tp=tp,
        pp=pp,
        ep=ep,
        ranks_per_node=int(rng.choice((4, 8))),
        steps=int(rng.integers(40, 80)),
        layers=int(rng.integers(1, 5)),
        buckets=int(rng.integers(1, 4)),
        sharded=bool(rng.random() < 0.2) and pp == 1,
        sync_every=int(rng.choice((1, 1, 1, 10, 50))),
        grad_norm=bool(rng.random() < 0.4),
        checkpoint_every=int(rng.choice((0, 0, 10, 20))),
    )
    capture = Capture(
        lost=float(rng.choice((0.0, 0.0, 0.002))),
        late_nodes=(job.n_nodes - 1,) if rng.random() < 0.1 else (),
        late_ns=2_000_000_000,
    )
    faults = (SlowLaunches(factor=4.0, schedule=Schedule(first=0)),) if rng.random() < 0.15 else ()
    timing = Timing().scaled(float(rng.uniform(0.5, 1.5)))
    clocks = ClockSpread(drift_ppm=float(rng.uniform(0.0, 20.0)))
    trace, truth = simulate(
        job, faults, seed=seed, timing=timing, clocks=clocks, capture=capture, has_twin=False
    )
    return trace, truth
