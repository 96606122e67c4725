"""GPUs that work during collectives: their work before a collective begins at the start of the previous collective."""

from typing import Any

import numpy as np
import pytest

from stallscope.events.trace import Trace

from .builders import MS, Call, Job, trace_of
from .reports import only, report_of

RANKS, N_CALLS, WORK_NS = (tuple(range(8)),), 6, 8 * MS


def backward_pass(*, factor: float, is_overlapped: bool = True, n_steps: int = 30, **more: Any) -> Trace:
    """Work on the GPU, then a reduction, six times a step; the host waits at the end."""
    program = tuple(
        Call(
            RANKS,
            count=1000 + i,
            work_ns=MS // 10,
            gpu_ns=WORK_NS,
            overlaps=is_overlapped and i > 0,
            waits=i == N_CALLS - 1,
        )
        for i in range(N_CALLS)
    )
    how = {"gpu_factor": {3: factor}, "gpu_jitter": 0.01, "has_gpu_times": True, "jitter_ns": 2000}
    return trace_of(Job(program, 8, n_steps, **how, **more))


@pytest.mark.parametrize("is_overlapped", [True, False])
@pytest.mark.parametrize("factor", [1.25, 1.6])
def test_a_slow_gpu_is_late_by_its_own_longer_work(is_overlapped, factor):
    """With overlap the peers work while they wait: their work is not part of the slow GPU's lateness."""
    verdict = only(report_of(backward_pass(is_overlapped=is_overlapped, factor=factor)))
    assert (verdict.kind, verdict.ranks) == ("device", [3])
    late_ms = N_CALLS * (factor - 1) * WORK_NS / MS
    assert verdict.late_ms["median"] == pytest.approx(late_ms, rel=0.15)


def test_the_cost_of_a_gpu_that_is_slow_from_the_start_ends_near_the_truth():
    factor = 1.25
    report = report_of(backward_pass(is_overlapped=True, factor=factor, n_steps=30))
    cost, n_examined = only(report).cost, report.examined["n_steps"]
    true_s = 7 * n_examined * N_CALLS * (factor - 1) * WORK_NS / 1e9
    assert cost.gpu_seconds * 0.9 <= true_s <= 1.1 * cost.may_be_gpu_seconds
    assert cost.may_be_gpu_seconds <= 1.5 * true_s


def test_gpus_of_equal_speed_are_healthy():
    assert report_of(backward_pass(is_overlapped=True, factor=1.0)).healthy


@pytest.mark.parametrize("share", [0.01, 0.02])
def test_gpus_that_differ_by_few_per_cent_in_each_step_are_healthy(share):
    """A GPU that is a little behind shows its delay again before each later collective of the step."""
    rng = np.random.default_rng(1)
    late = np.abs(rng.normal(0, share * N_CALLS * WORK_NS, (8, 80))).astype(int)
    gpu_late_ns = {(rank, step): int(late[rank, step]) for rank, step in np.ndindex(late.shape)}
    assert report_of(backward_pass(factor=1.0, n_steps=80, gpu_late_ns=gpu_late_ns)).healthy
