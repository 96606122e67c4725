"""A small part of `make accuracy`, and that its judge is neither blind nor lenient."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "accuracy"
sys.path.insert(0, str(FOLDER))

import simulated  # noqa: E402
from marking import judged  # noqa: E402

from stallscope.diagnose.engine import diagnose  # noqa: E402
from stallscope.synth import Capture, fault_scenarios  # noqa: E402

FAULTS = (
    "host_sleep",
    "block_io",
    "cuda_alloc",
    "two_culprits",
    "gpu_slow",
    "moving_imbalance",
    "missing_asleep",
)


@pytest.mark.parametrize("shape", ["dp8", "dp8-tp2", "dp16-ep8"])
def test_simulated_faults_are_found(shape: str) -> None:
    cases = [case for case in simulated.cases([shape], n_seeds=1) if case.fault in FAULTS]
    assert len(cases) == len(FAULTS) + 1
    for case in cases:
        _, entry, _ = simulated.tried(case)
        assert (entry.culprit, entry.n_accused, entry.cause in ("", "right")) == ("right", 0, True), (
            case,
            entry.said,
        )


def test_a_slow_gpu_of_a_job_that_runs_ahead_is_found_in_every_stretch_between_two_waits() -> None:
    """No stretch is without the delay, and the length of the stretches does not follow its error."""
    _, entry, _ = simulated.tried(simulated.Case("dp16-run-ahead", "gpu_slow", True, 4, has_twin=False))
    assert (entry.culprit, entry.cause) == ("right", "right")


def test_another_program_on_a_gpu_of_a_pipeline_is_not_a_hot_expert() -> None:
    """It delays some calls only, as a hot expert does, but no other GPU."""
    _, entry, _ = simulated.tried(simulated.Case("dp4-pp4", "gpu_shared", True, 15, has_twin=False))
    assert (entry.culprit, entry.cause) == ("right", "right")


def test_gpus_with_more_work_by_turns_are_uneven_work_although_their_groups_wait_within_the_step() -> None:
    """The waits of a step make all ranks equally late at its end."""
    case = simulated.Case("dp8-tp2", "moving_imbalance_on_device", True, 8, has_twin=False)
    _, entry, _ = simulated.tried(case)
    assert (entry.culprit, entry.said) == ("right", "imbalance")


# 415: a rank whose host is slow to launch in runs of steps; 1,119 and 3,699: delays that cost little or nothing.
@pytest.mark.parametrize("number", [*range(1, 9), 415, 1_119, 3_699])
def test_no_rank_of_a_healthy_job_is_accused(number: int) -> None:
    _, _, entry = simulated.healthy_job(number)
    assert entry.n_accused == 0


def test_hosts_that_wait_once_in_fifty_steps_are_fast_until_their_launch_queues_are_full() -> None:
    _, _, entry = simulated.healthy_job(4_111)
    assert entry.said == "healthy"


def test_the_judge_distinguishes_right_wrong_and_abstained() -> None:
    trace, truth = fault_scenarios.scene("dp8", "block_io", 0, has_twin=False)
    report, (answer,) = diagnose(trace), truth.answers
    right = judged(report, truth.knowable)
    assert (right.culprit, right.cause, right.n_accused) == ("right", "right", 0)
    other = replace(answer, ranks=((answer.ranks[0] + 1) % 8,))
    assert (judged(report, [other]).culprit, judged(report, [other]).n_accused) == ("wrong", 1)
    assert judged(report, [replace(answer, cause="driver")]).cause == "wrong"
    assert judged(report, []).culprit == "wrong"
    assert judged(report, [answer, other]).culprit == "abstained"
    assert judged(replace(report, verdicts=[]), [answer]).culprit == "abstained"


def test_the_knowable_answers_depend_on_the_captured_gpu_times() -> None:
    _, without = fault_scenarios.scene("dp8", "gpu_slow", 0, has_twin=False)
    _, known = fault_scenarios.scene(
        "dp8", "gpu_slow", 0, has_twin=False, capture=Capture(has_gpu_times=True)
    )
    assert [answer.kind for answer in without.knowable] == ["unknown_device"]
    assert known.knowable == known.answers
