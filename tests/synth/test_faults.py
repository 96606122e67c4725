"""Each injected fault has its effect: on the right ranks, in the right category, for the right time."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from stallscope.errors import BadInput
from stallscope.events.names import Category
from stallscope.events.trace import Trace
from stallscope.synth import (
    HOST_CAUSES,
    Fault,
    HostStall,
    Job,
    MovingImbalance,
    Schedule,
    SharedDevice,
    SlowDevice,
    SlowLaunches,
    Timing,
    simulate,
)

SHOWN_AS = {
    "host_sleep": Category.SLEEP,
    "host_compute": Category.ON_CPU,
    "cpu_preemption": Category.PREEMPTED,
    "process_stopped": Category.STOPPED,
    "block_io": Category.IO,
    "lock_contention": Category.LOCK,
    "network_wait": Category.NET,
    "input_starvation": Category.CHILD,
    "page_fault": Category.FAULT,
    "driver": Category.DRIVER,
    "cuda_alloc": Category.ALLOC,
    "host_device_copy": Category.COPY,
    "excessive_sync": Category.DEVICE,
}
CALM = replace(Timing().scaled(0.1), first_use_ns=0, warmup_factors=())
JOB = Job(dp=8, steps=30)


def of_rank(trace: Trace, rank: int) -> NDArray[np.void]:
    """A rank's records, by time."""
    collectives = trace.collectives[trace.collectives["comm_rank"] == rank]
    return collectives[np.argsort(collectives["ts_ns"])]


def last_of(trace: Trace, rank: int) -> np.void:
    """A rank's last record."""
    return of_rank(trace, rank)[-1]


def in_category(trace: Trace, rank: int, category: Category) -> int:
    """ns from the first collective of the first step to the last one."""
    spent = of_rank(trace, rank)["ledger_ns"][:, category - 1]
    return int(spent[-1] - spent[1])


def test_every_cause_has_its_category() -> None:
    assert set(SHOWN_AS) == set(HOST_CAUSES)
    assert all(sum(look.shares.values()) == pytest.approx(1.0) for look in HOST_CAUSES.values())


@pytest.mark.parametrize("cause", HOST_CAUSES)
def test_the_delay_lies_in_the_category_of_its_cause(cause: str) -> None:
    stall = HostStall(
        cause=cause, ranks=(5,), delay_ns=20_000_000, spread=0.0, schedule=Schedule(first=10, every=5)
    )
    trace, truth = simulate(JOB, [stall], seed=1, timing=CALM)
    category = SHOWN_AS[cause]
    peers = np.median([in_category(trace, rank, category) for rank in range(8) if rank != 5])
    excess = in_category(trace, 5, category) - peers
    assert truth.n_incidents == (4,)
    assert excess == pytest.approx(4 * 20e6 * HOST_CAUSES[cause].shares[category], rel=0.12)
    waits = [in_category(trace, rank, Category.WAIT_GPU) for rank in range(8)]
    assert np.argmin(waits) == 5


def test_an_unknown_cause_is_refused_with_a_list_of_known_causes() -> None:
    with pytest.raises(BadInput, match="host_sleep"):
        HostStall(cause="gremlins", ranks=(0,), delay_ns=1)


def test_many_syncs_and_allocations_are_counted() -> None:
    faults = [
        HostStall(cause="excessive_sync", ranks=(1,), delay_ns=20_000_000, schedule=Schedule(until=11)),
        HostStall(cause="cuda_alloc", ranks=(2,), delay_ns=20_000_000, schedule=Schedule(until=11)),
    ]
    trace, truth = simulate(JOB, faults, seed=1)
    assert last_of(trace, 1)["n_syncs"] - last_of(trace, 0)["n_syncs"] == 401
    assert last_of(trace, 2)["n_allocs"] - last_of(trace, 0)["n_allocs"] == 32
    assert truth.culprits == (1, 2)


def test_a_schedule_is_active_at_its_steps() -> None:
    chance = np.random.default_rng(0)
    every = Schedule(first=3, every=4, until=12)
    assert [step for step in range(20) if every.is_active(step, chance)] == [3, 7, 11]
    assert every.period_steps == 4
    rare = Schedule(first=0, probability=0.25)
    assert 150 < sum(rare.is_active(step, chance) for step in range(800)) < 250
    assert rare.period_steps is None


def test_slow_launches_of_one_rank_cost_its_cpu_and_the_others_wait() -> None:
    fault = SlowLaunches(ranks=(3,), factor=20.0)
    trace, truth = simulate(JOB, [fault], seed=1, timing=CALM)
    excess = in_category(trace, 3, Category.ON_CPU) - in_category(trace, 2, Category.ON_CPU)
    layers = 2 * JOB.layers + 1
    assert excess == pytest.approx(20 * layers * 19 * 6 * 25_000, rel=0.15)
    assert truth.lost_gpu_seconds > 0.5


def test_slow_launches_of_all_ranks_have_no_culprit() -> None:
    trace, truth = simulate(JOB, [SlowLaunches(factor=5.0, schedule=Schedule(first=0))], seed=1, timing=CALM)
    assert truth.kind == "all_slow"
    assert truth.culprits == ()
    busy = [in_category(trace, rank, Category.ON_CPU) for rank in range(8)]
    assert max(busy) < 1.15 * min(busy)


@pytest.mark.parametrize(
    "fault", [SlowDevice(ranks=(4,), factor=2.0), SharedDevice(ranks=(4,), delay_ns=5_000_000)]
)
def test_a_slow_device_makes_all_hosts_wait_equally_long(fault: Fault) -> None:
    """Hosts do not show whose device is slow, which makes this case hard."""
    trace, truth = simulate(JOB, [fault], seed=2, timing=CALM)
    waits = np.array([in_category(trace, rank, Category.WAIT_GPU) for rank in range(8)])
    assert truth.kind == "device"
    assert truth.lost_gpu_seconds > 0.2
    assert waits.max() - waits.min() < 0.25 * waits.mean()


def test_a_slow_stage_is_waited_for_by_the_other_stages() -> None:
    job = Job(dp=2, pp=2, layers=2, steps=20)
    slow = SlowDevice(ranks=job.ranks_of_stage(1), kind="slow_stage", cause="imbalance", factor=2.0)
    _, truth = simulate(job, [slow], seed=2, timing=CALM)
    assert truth.culprits == (2, 3)
    assert truth.lost_gpu_seconds > 0.0


def test_an_imbalance_moves_from_rank_to_rank() -> None:
    fault = MovingImbalance(delay_ns=30_000_000, schedule=Schedule(first=0))
    trace, truth = simulate(Job(dp=8, steps=80), [fault], seed=3, timing=CALM)
    busy = np.array([in_category(trace, rank, Category.ON_CPU) for rank in range(8)])
    assert truth.culprits == ()
    assert (busy - busy.min() > 25_000_000).sum() >= 6


def test_two_faults_are_two_answers() -> None:
    faults = [
        HostStall(cause="host_sleep", ranks=(0,), delay_ns=30_000_000, schedule=Schedule(every=3)),
        HostStall(cause="block_io", ranks=(6,), delay_ns=30_000_000, schedule=Schedule(every=4)),
    ]
    trace, truth = simulate(JOB, faults, seed=1)
    assert [answer.cause for answer in truth.answers] == ["host_sleep", "block_io"]
    assert [answer.period_steps for answer in truth.answers] == [3, 4]
    assert in_category(trace, 0, Category.SLEEP) > 100_000_000
    assert in_category(trace, 6, Category.IO) > 80_000_000


def test_the_scatter_is_the_same_with_and_without_the_fault() -> None:
    healthy, _ = simulate(JOB, seed=7)
    stall = HostStall(cause="host_sleep", ranks=(1,), delay_ns=9_000_000, schedule=Schedule(first=25))
    faulty, _ = simulate(JOB, [stall], seed=7)
    before = faulty.collectives["ts_ns"] < faulty.collectives["ts_ns"].min() + 1_500_000_000
    assert before.sum() > 100
    for rank in range(8):
        entry, other = (
            t.collectives[t.collectives["comm_rank"] == rank]["ts_ns"][:80] for t in (healthy, faulty)
        )
        assert (entry == other).all()
