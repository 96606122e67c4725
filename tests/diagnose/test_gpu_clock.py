"""The GPUs' own times: clocks that drift, hosts that run far ahead, work that moves from GPU to GPU, slow stages."""

import numpy as np
import pytest

from stallscope.diagnose.gpu.gpu_clock import gpu_time
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.names import Op
from stallscope.synth import (
    Capture,
    ClockSpread,
    Job,
    MovingImbalance,
    Schedule,
    SlowDevice,
    Timing,
    simulate,
)
from stallscope.synth.slow import SharedDevice

from .builders import ENQUEUE_NS, MS, Call, data_parallel, dp_trace, trace_of
from .builders import Job as MadeJob
from .reports import only, report_of

ON_GPU = Capture(has_gpu_times=True)
RUNS_AHEAD = Job(dp=8, steps=120, sync_every=10)


def test_there_is_no_gpu_time_without_recorded_gpu_times():
    assert gpu_time(timeline_of(dp_trace())) is None


def test_work_and_waiting_fill_the_time_between_two_ends():
    timeline = timeline_of(
        trace_of(MadeJob(data_parallel(gpu_ns=3 * MS, work_ns=500_000), has_gpu_times=True))
    )
    times = gpu_time(timeline)
    rows, known = timeline.rows, np.flatnonzero(times.known)
    assert len(known) > 0.9 * len(rows)
    ends = rows["gpu_end_ns"][known] - rows["gpu_end_ns"][known - 1]
    idle = ends - times.own_ns[known] - times.held_ns[known]
    assert idle.min() >= 0
    behind = known[rows["ts_ns"][known] + ENQUEUE_NS < rows["gpu_end_ns"][known - 1]]
    assert np.median(times.own_ns[behind]) == pytest.approx(3 * MS, rel=0.02)


@pytest.mark.parametrize("drift_ppm", [0.0, 10.0, 100.0])
def test_a_drifting_gpu_clock_does_not_change_the_gpu_time(drift_ppm):
    clocks = ClockSpread(drift_ppm=drift_ppm)
    still, _ = simulate(RUNS_AHEAD, seed=3, capture=ON_GPU, clocks=ClockSpread(drift_ppm=0.0))
    drifting, _ = simulate(RUNS_AHEAD, seed=3, capture=ON_GPU, clocks=clocks)
    entry, other = (gpu_time(timeline_of(trace)) for trace in (still, drifting))
    assert np.abs(entry.own_ns - other.own_ns).max() < 100_000


def test_a_slow_gpu_is_named_although_hosts_run_far_ahead():
    trace, _ = simulate(RUNS_AHEAD, [SlowDevice(ranks=(5,), factor=3.0)], seed=1, capture=ON_GPU)
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks, verdict.causes[0].cause.name) == ("device", [5], "gpu_slow")


def test_work_that_moves_from_gpu_to_gpu_accuses_none():
    fault = MovingImbalance(delay_ns=20 * MS, on_host=False, schedule=Schedule(first=10))
    for job in (RUNS_AHEAD, Job(dp=8, steps=80)):
        verdict = only(report_of(simulate(job, [fault], seed=2, capture=ON_GPU)[0]))
        assert (verdict.kind, verdict.ranks, verdict.evidence.on) == ("imbalance", [], "the GPUs")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_with_more_work_for_its_gpus_is_imbalance(stage):
    job = Job(dp=2, pp=3, steps=40, layers=1, buckets=1)
    slow = SlowDevice(
        ranks=job.ranks_of_stage(stage), factor=3.0, kind="slow_stage", schedule=Schedule(first=0)
    )
    verdict = only(report_of(simulate(job, [slow], seed=1, capture=ON_GPU)[0]))
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert verdict.evidence.slow_stage == list(job.ranks_of_stage(stage))


def test_a_host_bound_job_is_not_a_slow_gpu():
    """Its GPUs start late because their host enqueues late."""
    for seed in range(4):
        trace, _ = simulate(Job(dp=8, steps=60, sharded=True), seed=seed, capture=ON_GPU)
        assert report_of(trace).healthy


def test_a_shared_gpu_works_by_turns():
    trace, _ = simulate(Job(dp=8, steps=80), [SharedDevice(ranks=(2,))], seed=4, capture=ON_GPU)
    verdict = only(report_of(trace))
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([2], "gpu_shared")


def test_a_send_behind_another_send_waits_for_the_other_gpu():
    """The first send of a step ends late, since its receiver is late; an all-reduce on another stream ends before."""
    pair, both = ((0, 1),), ((0, 1),)
    program = (
        Call(pair, Op.SEND, gpu_ns=MS),
        Call(both, gpu_ns=MS),
        Call(pair, Op.SEND, gpu_ns=MS, count=7, waits=True),
    )
    trace = trace_of(MadeJob(program, n_ranks=2, n_steps=20, has_gpu_times=True))
    rows = trace.collectives
    first, second = (
        np.flatnonzero((rows["op"] == Op.SEND) & (rows["seq"] % 2 == number)) for number in (0, 1)
    )
    rows["gpu_end_ns"][first] = rows["gpu_start_ns"][second]
    timeline = timeline_of(trace)
    times = gpu_time(timeline)
    is_second = (timeline.rows["op"] == Op.SEND) & (timeline.rows["count"] == 7) & times.known
    assert is_second.any()
    assert times.own_ns[is_second].max() == 0


def test_a_slow_gpu_is_named_where_the_hosts_wait_in_every_other_step():
    job = Job(dp=4, steps=80, sync_every=2)
    timing = Timing(forward_ns=2_000_000, backward_ns=4_000_000)
    slow = SlowDevice(ranks=(1,), factor=1.4)
    trace, _ = simulate(job, [slow], timing=timing, capture=ON_GPU, has_twin=False)
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks, verdict.causes[0].cause.name) == ("device", [1], "gpu_slow")
