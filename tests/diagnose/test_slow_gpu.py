"""The GPU's own clock: slowness that the host does not see."""

import numpy as np
import pytest

from stallscope.events.names import Op
from stallscope.synth import Capture
from stallscope.synth.fault_scenarios import scene

from .builders import MS, Call, Job, data_parallel, every, trace_of
from .reports import only, report_of

RUNS_AHEAD = data_parallel(work_ns=500_000, gpu_ns=3 * MS)
"""The host enqueues faster than the GPU works: who is slow shows on the GPU only."""


def slow_gpu(ns, rank=1, first=10, until=60, **rest):
    late = {(rank, step): int(ns(step)) for step in range(first, until)}
    return trace_of(Job(RUNS_AHEAD, n_steps=60, gpu_late_ns=late, has_gpu_times=True, **rest))


def test_a_slow_gpu_with_a_punctual_host_is_named():
    verdict = only(report_of(slow_gpu(lambda step: 4 * MS)))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("device", [1], [0, 2, 3])
    assert verdict.causes[0].cause.name == "gpu_slow"
    assert abs(verdict.late_ms["median"] - 4) < 0.2


def test_a_gpu_that_works_by_turns_is_shared():
    rng = np.random.default_rng(0)
    verdict = only(report_of(slow_gpu(lambda step: rng.exponential(5 * MS) + 1.2 * MS)))
    assert (verdict.kind, verdict.ranks) == ("device", [1])
    assert verdict.causes[0].cause.name == "gpu_shared"


def test_a_gpu_that_is_slow_again_and_again_costs_all_its_slow_steps():
    """Four slow steps of every twelve: all of them count, though no single stretch of slow steps is long."""
    verdict = only(report_of(slow_gpu(lambda step: 30 * MS if step % 12 < 4 else 0)))
    assert (verdict.kind, verdict.ranks) == ("device", [1])
    n_slow = sum(step % 12 < 4 for step in range(10, 60))
    assert verdict.evidence.n_late_steps == n_slow
    assert verdict.cost.gpu_seconds == pytest.approx(0.030 * n_slow * 3, rel=0.1)


def test_kernels_that_differ_by_node_name_no_gpu():
    late = {(rank, step): 8 * MS for rank in range(4, 8) for step in range(10, 60)}
    program, node = data_parallel(8, work_ns=500_000, gpu_ns=3 * MS), (0, 0, 0, 0, 1, 1, 1, 1)
    job = Job(
        program, 8, 60, node=node, offset_ns=(0, 0), gpu_late_ns=late, has_gpu_times=True, jitter_ns=200_000
    )
    assert not [verdict for verdict in report_of(trace_of(job)).verdicts if verdict.ranks]


def test_without_gpu_times_no_rank_is_named():
    late = {(1, step): 4 * MS for step in range(10, 60)}
    report = report_of(trace_of(Job(RUNS_AHEAD, n_steps=60, gpu_late_ns=late)))
    assert not [verdict for verdict in report.verdicts if verdict.ranks]


def test_gpus_that_are_all_slow_are_healthy():
    late = {(rank, step): 4 * MS for rank in range(4) for step in range(60)}
    assert report_of(trace_of(Job(RUNS_AHEAD, n_steps=60, gpu_late_ns=late, has_gpu_times=True))).healthy


def test_gpu_clocks_may_differ_and_drift():
    trace = slow_gpu(lambda step: 4 * MS)
    rows = trace.collectives
    for rank, (offset, drift) in enumerate([(0, 0), (10**12, 40e-6), (-(10**9), -40e-6), (5, 10e-6)]):
        own_rows = rows["pid"] == 1000 + rank
        for column in ("gpu_start_ns", "gpu_end_ns"):
            rows[column][own_rows] += offset + (drift * rows[column][own_rows]).astype(np.int64)
    assert only(report_of(trace)).ranks == [1]


def test_a_late_host_is_not_taken_for_a_slow_gpu():
    program = data_parallel(gpu_ns=500_000)
    trace = trace_of(Job(program, delays=tuple(every(2, 4, 50 * MS)), has_gpu_times=True))
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks) == ("straggler", [2])


def test_a_slow_gpu_and_a_late_host_are_two_verdicts():
    late = {(1, step): 4 * MS for step in range(10, 60)}
    job = Job(
        RUNS_AHEAD,
        n_steps=60,
        gpu_late_ns=late,
        has_gpu_times=True,
        delays=tuple(every(3, 6, 80 * MS, until=60)),
    )
    report = report_of(trace_of(job))
    assert {(verdict.kind, *verdict.ranks) for verdict in report.verdicts} == {
        ("device", 1),
        ("straggler", 3),
    }


def test_a_few_slow_steps_of_a_gpu_are_not_enough():
    assert report_of(slow_gpu(lambda step: 4 * MS, first=20, until=23)).healthy


def test_gpu_times_of_some_ranks_only_do_no_harm():
    trace = slow_gpu(lambda step: 4 * MS)
    own_rows = trace.collectives["pid"] == 1001
    trace.collectives["gpu_start_ns"][own_rows] = trace.collectives["gpu_end_ns"][own_rows] = -1
    assert not [verdict for verdict in report_of(trace).verdicts if verdict.ranks]


def test_sends_do_not_confuse_it():
    program = (*RUNS_AHEAD, Call(((0, 1), (2, 3)), op=Op.SEND, count=5, work_ns=100_000, waits=True))
    late = {(2, step): 6 * MS for step in range(10, 60)}
    report = report_of(trace_of(Job(program, n_steps=60, gpu_late_ns=late, has_gpu_times=True)))
    assert {tuple(verdict.ranks) for verdict in report.verdicts} <= {(2,), ()}


@pytest.mark.parametrize("is_slow", [lambda step: True, lambda step: step % 3 > 0])
def test_a_gpu_that_is_slower_by_few_per_cent_of_a_step_is_a_remark(is_slow):
    """GPUs of a model differ; a drift around the threshold of a late step makes some steps late."""
    program = data_parallel(work_ns=500_000, gpu_ns=12 * MS)
    late = {(1, step): int(1.5 * MS) for step in range(60) if is_slow(step)}
    report = report_of(
        trace_of(Job(program, n_steps=60, gpu_late_ns=late, has_gpu_times=True, gpu_jitter=0.005))
    )
    assert report.healthy
    (remark,) = [each for each in report.benign if "slower than its peers" in str(each["what"])]
    assert remark["rank"] == 1
    assert remark["late_ms"] == pytest.approx(1.5, abs=0.3)


@pytest.mark.parametrize(("shape", "seed"), [("dp8-saves", 1), ("dp16-ep8", 4)])
def test_a_slow_clock_is_not_shared_time(shape, seed):
    """Pauses of all ranks, and steps just below the threshold, make single steps of the GPU vary."""
    trace, _ = scene(shape, "gpu_slow", seed, capture=Capture(has_gpu_times=True), has_twin=False)
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.causes[0].cause.name) == ("device", "gpu_slow")
