"""Jobs of the second generator, one for each kind of wrong answer that was corrected."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "accuracy"
sys.path.insert(0, str(FOLDER))

from shape_runs import Case, ran  # noqa: E402


@pytest.mark.parametrize(
    ("shape", "fault", "seed"),
    [
        ("subgroups", "late_node", 302),  # the node is one pipeline stage
        ("attached_late", "late_node", 307),  # the agent of one node attached late
        ("rollouts", "lock", 7),  # rollouts vary by more than the delay
        ("gan", "slow_gpu", 405),  # the steps of two models alternate
        ("accumulation", "slower_job", 409),  # the fabric, not a link between some ranks
        ("absorbed", "slow_gpu", 300_017),  # a slow GPU makes the steps of an absorbed delay longer
        ("experts", "slower_job", 300_014),  # hot experts on one GPU for some steps
        ("subgroups", "slower_job", 300_004),  # the ranks of one node are compared with their own steps
        ("bucketed", "slower_job", 300_004),  # steps vary by more than the change of the hosts' time
        ("lengths", "slower_job", 410_000),  # random lengths vary by as much as the change of the GPUs
        ("absorbed", "slower_job", 410_002),  # by 6 %
        ("gan", "slower_job", 300_011),  # the steps of two models grow by different times
        (
            "gan",
            "slow_gpu_at_times",
            300_006,
        ),  # late by 40 ms in the steps of one model, by 2 ms in the others
        ("evaluation", "disk_io", 420_001),  # the queue absorbs three quarters of each delay
        ("gan", "host_sleep", 300_002),  # the late steps are steps of one model only
        ("absorbed", "slower_job", 500_011),  # quiet steps lie before the change of all ranks
        ("subgroups", "slow_gpu", 500_014),  # a GPU waits for the slow GPU over two others
        ("absorbed", "host_compute", 500_023),  # long delays among absorbed delays of the same rank
        (
            "accumulation",
            "slow_gpu_at_times",
            500_008,
        ),  # the steps grow by twice the delay that the host shows
        ("run_ahead", "allocator_churn", 500_019),  # full queues change the self time of all ranks by 24 ms
        ("host_end", "allocator_churn", 500_001),  # late in each step by a tenth to a whole step
        ("bucketed", "slow_gpu", 500_002),  # the clock of the slow GPU is known within 18 ms only
        ("elastic", "slow_gpu", 500_004),  # one step shows little of the GPU's work
        ("bucketed", "slower_job", 500_008),  # the lengths of the steps, each 1.3 times as long
        (
            "bucketed",
            "slower_job",
            500_020,
        ),  # the hosts' time grows by 16 %, the means of the steps are unclear
        ("experts", "slower_job", 500_018),  # steps resemble the step before
        ("agent_died", "late_nodes", 500_023),  # one node is seen in three of the eight late steps
        (
            "gan",
            "slower_job",
            600_007,
        ),  # the steps of one model grow by 12 %, the steps of the other model by 2 %
        ("gan", "host_compute", 600_007),  # a GPU that is late by 2 % of the steps of the longer model
        ("accumulation", "lock", 710_007),  # a GPU that is a little behind in each of many overlapping calls
        ("gan", "slower_job", 710_003),  # 16 rounds of five steps each, of which the trace cuts the last
        ("experts", "slower_job", 710_006),  # the transfers, in steps of uneven work
        ("accumulation", "allocator_churn", 712_002),  # next to a host that is slower by its variation
        ("rollouts", "allocator_churn", 710_013),  # allocations of a fifth of the scatter of rollouts
        (
            "host_end",
            "growing_delay",
            720_010,
        ),  # a host calls after the end of the collectives for many steps
        ("bucketed", "slow_gpu_at_times", 720_001),  # 14 of 79 steps, in runs
        ("rollouts", "host_compute", 740_008),  # on the CPU beyond its launches, which vary by as much
        (
            "rollouts",
            "host_sleep",
            500_023,
        ),  # four delays of a step, while rollouts differ by a fifth of that
        ("rollouts", "input", 725_003),  # four delays of a length that no other host is blocked
        ("host_end", "growing_delay", 725_004),  # just above the threshold in nearly all later steps
        ("evaluation", "slower_job", 725_009),  # by 7 %, next to a rank that is late in every 20th step
        ("experts", "slower_job", 725_006),  # in a job whose uneven work makes a rank late in every step
        ("gpus_differ", "slower_job", 740_002),  # steps of 6 ms, by 9 %
        ("rollouts", "slow_gpu", 725_006),  # even work after rollouts of random length
        ("rollouts", "slow_gpu", 710_004),  # rollouts differ by more than the GPU is slower
        ("rollouts", "slow_gpu", 721_002),  # among the slowest also by its order in each step
        ("gan", "late_node", 746_001),  # half of all ranks, late in nearly all steps
        ("host_end", "late_node", 740_022),  # one of eight ranks is late in three steps only
        ("bucketed", "slower_job", 740_004),  # many lengths, each 1.3 times as long, equal other lengths
        ("lengths", "slower_job", 749_005),  # random lengths that make a rank late in every step
        ("lengths", "growing_delay", 725_011),  # the queue absorbs the first half of the delays
    ],
)
def test_the_fault_is_named(shape: str, fault: str, seed: int) -> None:
    result = ran(Case(shape, fault, seed))
    assert result is not None
    assert (result.answer.mark, result.answer.cause in ("", "right")) == ("right", True), result.answer.report


@pytest.mark.parametrize(
    ("shape", "fault", "seed"),
    [
        ("rollouts", "periodic_delay", 500_013),  # two delays of 150 ms and more in 28 steps
        ("elastic", "periodic_delay", 500_019),
        ("lengths", "slow_gpu_at_times", 720_001),  # the slowest GPU in 26 of 75 steps
        ("host_end", "host_compute", 745_001),  # every fifth step, just below the threshold
        ("rollouts", "slow_gpu_at_times", 721_004),  # even work, eight slow steps
        ("lengths", "slower_job", 740_003),  # by 17 %, while the steps vary by 20 %
        ("rollouts", "slow_gpu_at_times", 720_012),  # two runs of steps, five steps in all
    ],
)
def test_a_costly_fault_that_is_not_proved_is_inconclusive(shape: str, fault: str, seed: int) -> None:
    result = ran(Case(shape, fault, seed))
    assert result is not None
    assert result.answer.mark == "inconclusive", result.answer.report


@pytest.mark.parametrize(
    ("shape", "fault", "seed"),
    [
        ("accumulation", "slow_gpu", 7),  # the host shows half of the delay of its GPU
        ("run_ahead", "one_stop", 304),  # the full queue hides the waits
        ("gan", "allocator_churn", 1),  # a free waits for the GPU first
        ("absorbed", "one_stop", 7),  # one stop among absorbed delays
        ("run_ahead", "input", 500_021),  # a queue hides all but the delays after a release
        ("run_ahead", "late_node", 500_000),
        ("saves", "slow_gpu", 500_015),  # saves are rare, and ten times as long as a step
        (
            "one_a_node",
            "slow_gpu_at_times",
            500_004,
        ),  # the work after the last call of a step shows in no call
        ("subgroups", "late_node", 302),
        (
            "gan",
            "allocator_churn",
            710_058,
        ),  # a warm-up step of the shorter model bounds no step of the longer one
        ("lengths", "growing_delay", 300_008),  # other ranks' longer work hides the short delays
    ],
)
def test_the_cost_is_right(shape: str, fault: str, seed: int) -> None:
    result = ran(Case(shape, fault, seed))
    assert result is not None
    assert (result.answer.mark, result.answer.cost) == ("right", "right"), result.answer


@pytest.mark.parametrize(
    ("shape", "seed"),
    [
        ("subgroups", 302),
        ("absorbed", 620),
        ("gan", 405),
        ("gpus_differ", 939),
        ("experts", 430_000),  # a hot expert stays on one GPU for 27 steps
        ("host_end", 500_009),  # host work at the end of a step hides behind the GPU in most steps
        ("bucketed", 500_009),  # GPUs that differ by 1.5 % in each step
        (
            "node_kernels",
            712_026,
        ),  # a host that is slower by its variation, just above the threshold in ten steps
    ],
)
def test_the_same_job_without_the_fault_accuses_no_rank(shape: str, seed: int) -> None:
    result = ran(Case(shape, "", seed))
    assert result is not None
    assert result.answer.mark in ("right", "inconclusive"), result.answer.report
