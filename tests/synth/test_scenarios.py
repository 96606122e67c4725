"""The catalogue: every scenario runs and states its right answer; healthy jobs accuse no rank."""

import numpy as np
import pytest

from stallscope.errors import BadInput, NotFound
from stallscope.synth import Job, fault_scenarios

WHOLE = ("dp8", "dp16-ep8")
IN_PART = {"dp4-pp4": ("host_sleep", "gpu_slow", "slow_stage", "missing_asleep", "mismatch_count")}
CASES = [
    (shape, fault)
    for shape, fault in fault_scenarios.names()
    if shape in WHOLE or fault in IN_PART.get(shape, ())
]
KINDS = {"straggler", "slow_node", "slow_stage", "imbalance", "all_slow", "device", "hang"}


@pytest.mark.parametrize(("shape", "fault"), CASES)
def test_a_scenario_has_records_and_an_answer(shape: str, fault: str) -> None:
    job = fault_scenarios.SHAPES[shape]
    trace, truth = fault_scenarios.scene(shape, fault, seed=1)
    assert len(np.unique(trace.collectives[["node", "pid"]])) == job.nranks
    assert truth.kind in KINDS
    assert all(0 <= rank < job.nranks for rank in truth.culprits)
    assert sum(truth.n_incidents) >= 1
    accuses = truth.kind not in ("imbalance", "all_slow")
    assert bool(truth.culprits) == accuses
    if truth.kind in ("straggler", "hang"):
        assert truth.lost_gpu_seconds > 0.05


def test_the_seed_moves_the_culprit() -> None:
    ranks = {
        fault_scenarios.scenario("dp64", "block_io", seed).faults[0].answer().ranks for seed in range(20)
    }
    assert len(ranks) > 10


def test_shapes_reach_from_8_to_1024_ranks() -> None:
    sizes = [job.nranks for job in fault_scenarios.SHAPES.values()]
    assert (min(sizes), max(sizes)) == (8, 1024)


def test_a_name_that_is_not_in_the_catalogue_is_refused() -> None:
    with pytest.raises(NotFound, match="FAULTS"):
        fault_scenarios.scenario("dp8", "gremlins", 0)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(BadInput, match="divide"):
        Job(dp=6, ep=4)
    with pytest.raises(BadInput, match="at least 1"):
        Job(dp=0)


def test_healthy_jobs_have_no_culprit_and_differ_in_size() -> None:
    made = [fault_scenarios.healthy(seed) for seed in range(12)]
    assert all(truth.culprits == () for _, truth in made)
    assert all(truth.kind in ("healthy", "all_slow") for _, truth in made)
    assert len({len(trace.processes) for trace, _ in made}) > 2
