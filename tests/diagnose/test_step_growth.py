"""The cost of a delay is how much longer the job lasts: the truth is the same job without the fault."""

import pytest

from stallscope.diagnose.report.verdict import VerdictCost
from stallscope.synth import HostStall, Job, Schedule, SlowDevice, Timing, simulate
from stallscope.synth.fault_models import Fault
from stallscope.synth.observed import Capture
from stallscope.synth.simulated_program import Phase

from .reports import only, report_of

MS = 1_000_000
LONG_KERNELS = Timing(forward_ns=1_500_000, backward_ns=3_000_000)
SHORT_KERNELS = Timing(forward_ns=600_000, backward_ns=1_200_000)


def stall(cause: str, delay_ms: int, *, rank: int = 3, **when) -> HostStall:
    return HostStall(cause=cause, ranks=(rank,), delay_ns=delay_ms * MS, schedule=Schedule(**when))


def ends(cost: VerdictCost) -> tuple[float, float]:
    """The reported range; one number is both of its ends."""
    most = cost.at_most_gpu_seconds
    if most is None:
        assert not cost.is_lower_bound, "a range without an upper end"
        most = cost.gpu_seconds
    return cost.gpu_seconds, most


JOBS = {
    "absorbed in part": (
        Job(dp=8, steps=60),
        stall("host_sleep", 15, where=Phase.BACKWARD),
        {"timing": LONG_KERNELS},
    ),
    "run ahead": (
        Job(dp=8, steps=200, sync_every=25),
        stall("host_sleep", 150, every=9),
        {"timing": SHORT_KERNELS},
    ),
    "excessive synchronisation": (
        Job(dp=8, steps=60),
        stall("excessive_sync", 20, where=None),
        {"timing": LONG_KERNELS},
    ),
    "pipeline": (
        Job(dp=2, pp=4, steps=50, layers=2, buckets=1, microbatches=4),
        stall("host_sleep", 60, rank=5, every=3),
        {"timing": LONG_KERNELS},
    ),
    "with saves": (
        Job(dp=8, steps=80, checkpoint_every=10),
        stall("block_io", 20, every=3),
        {"timing": SHORT_KERNELS},
    ),
    "slow GPU": (
        Job(dp=8, steps=60),
        SlowDevice(ranks=(3,), factor=1.25),
        {"timing": LONG_KERNELS, "capture": Capture(has_gpu_times=True)},
    ),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [1, 2])
def test_cost_holds_the_difference_to_the_job_without_the_fault(name: str, seed: int):
    job, fault, how = JOBS[name]
    trace, truth = simulate(job, [fault], seed=seed, **how)
    true = truth.slowdown_ns / 1e9 * (job.nranks - 1)
    cost = only(report_of(trace)).cost
    assert cost is not None
    least, most = ends(cost)
    assert 0.9 * least <= true <= 1.1 * most
    assert most <= 3 * true


def culprits(job: Job, fault: Fault, **how) -> set[int]:
    trace, _ = simulate(job, [fault], seed=1, has_twin=False, **how)
    return {rank for verdict in report_of(trace).verdicts for rank in verdict.ranks}


@pytest.mark.parametrize("every", [1, 3])
def test_a_delay_that_slack_absorbs_is_a_remark(every: int):
    job = Job(dp=2, pp=4, steps=60, layers=2, buckets=1, microbatches=4)
    fault = stall("host_sleep", 15, rank=5, every=every)
    trace, truth = simulate(job, [fault], seed=1, timing=LONG_KERNELS)
    assert truth.slowdown_ns < 0.01 * 15 * MS * (60 // every)
    report = report_of(trace)
    assert not report.verdicts
    if every == 1:
        assert [remark["rank"] for remark in report.benign] == [5]


def test_a_delay_that_no_slack_absorbs_names_its_rank():
    job = Job(dp=2, pp=4, steps=60, layers=2, buckets=1, microbatches=4)
    assert culprits(job, stall("host_sleep", 60, rank=5), timing=LONG_KERNELS) == {5}
