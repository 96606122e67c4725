"""Jobs without progress in any state, and one long stop in a short job."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.names import Category
from stallscope.events.trace import Trace

from .builders import MS, Call, Delay, Job, data_parallel, dp_trace, trace_of
from .reports import only, report_of

PATIENCE_NS = Thresholds().hang_after_ns
BLOCKED = (Category.LOCK, Category.NET, Category.SLEEP, Category.DRIVER, Category.STOPPED, Category.OTHER_OFF)


def still(category: Category, quiet_ns: int, *, n_open: int = 1, every_ns: int = 5_000 * MS, **rest) -> Trace:
    """A job whose ranks stop after a step, with some collectives that they have not seen complete."""
    trace = dp_trace(quiet_ns=quiet_ns, **rest)
    begin_ns = int(trace.collectives["ts_ns"].max())
    at_ns = np.append(np.arange(begin_ns + MS, begin_ns + quiet_ns, every_ns), begin_ns + quiet_ns)
    rows = np.concatenate([trace.snapshots] * len(at_ns))
    rows["ts_ns"] = np.repeat(at_ns, len(trace.snapshots))
    rows["category"], rows["in_call"] = category, 0
    rows["n_collectives"] = len(trace.collectives) // len(trace.processes)
    rows["n_completed"] = rows["n_collectives"] - n_open
    return replace(trace, snapshots=rows)


@pytest.mark.parametrize("category", BLOCKED)
@pytest.mark.parametrize("n_ranks", [2, 8])
def test_a_job_hangs_when_no_rank_makes_progress_in_an_open_collective(category, n_ranks):
    verdict = only(report_of(still(category, 4 * PATIENCE_NS, n_ranks=n_ranks)))
    assert (verdict.kind, verdict.ranks) == ("hang", [])
    assert verdict.victims == list(range(n_ranks))
    assert verdict.evidence.waited_s == pytest.approx(4 * PATIENCE_NS / 1e9, abs=0.5)
    assert "no rank makes progress" in verdict.summary


def test_ranks_in_different_states_without_progress_hang():
    trace = still(Category.WAIT_GPU, 3 * PATIENCE_NS)
    trace.snapshots["category"][trace.snapshots["pid"] == 1001] = Category.NET
    assert only(report_of(trace)).kind == "hang"


@pytest.mark.parametrize("category", [Category.ON_CPU, Category.IO])
def test_ranks_that_may_be_at_work_need_more_time(category):
    assert report_of(still(category, 4 * PATIENCE_NS)).verdicts == []
    assert only(report_of(still(category, 8 * PATIENCE_NS))).kind == "hang"


def test_ranks_without_an_open_collective_do_not_hang():
    assert report_of(still(Category.LOCK, 4 * PATIENCE_NS, n_open=0)).verdicts == []


def test_ranks_with_increasing_counters_do_not_hang():
    trace = still(Category.LOCK, 4 * PATIENCE_NS)
    newest = trace.snapshots["ts_ns"] == trace.snapshots["ts_ns"].max()
    trace.snapshots["n_collectives"][newest] += 7
    assert report_of(trace).verdicts == []


def test_ranks_last_known_when_the_job_stopped_do_not_hang():
    """The time afterwards is unknown: the processes may have ended."""
    trace = still(Category.LOCK, 4 * PATIENCE_NS)
    first = trace.snapshots["ts_ns"] == trace.snapshots["ts_ns"].min()
    assert report_of(replace(trace, snapshots=trace.snapshots[first])).verdicts == []


@pytest.mark.parametrize(
    ("ms", "category", "cause", "n_ranks"),
    [
        (500, Category.STOPPED, "process_stopped", 4),
        (860, Category.STOPPED, "process_stopped", 8),
        (700, Category.IO, "block_io", 2),
        (900, Category.SLEEP, "host_sleep", 16),
    ],
)
def test_one_stop_in_a_job_of_seconds_is_an_incident_with_its_cost(ms, category, cause, n_ranks):
    job = Job(
        data_parallel(n_ranks, work_ns=15 * MS),
        n_ranks=n_ranks,
        n_steps=60,
        delays=(Delay(1, 30, ms * MS, category),),
    )
    verdict = only(report_of(trace_of(job)))
    assert (verdict.kind, verdict.ranks, verdict.causes[0].cause.name) == ("straggler", [1], cause)
    assert verdict.evidence.is_one_off
    assert verdict.cost.gpu_seconds == pytest.approx((n_ranks - 1) * ms / 1e3, rel=0.1)


def test_one_stop_in_a_long_job_is_a_remark_with_its_cost():
    job = Job(data_parallel(work_ns=100 * MS), n_steps=60, delays=(Delay(1, 30, 600 * MS),))
    report = report_of(trace_of(job))
    assert report.verdicts == []
    (remark,) = report.benign
    assert remark["rank"] == 1
    assert remark["gpu_seconds"] == pytest.approx(3 * 0.6, rel=0.1)


def test_long_delays_of_alternating_ranks_name_no_rank():
    delays = [Delay(rank, 10 + 12 * rank, 500 * MS) for rank in range(4)]
    job = Job(data_parallel(work_ns=15 * MS), n_steps=60, delays=tuple(delays))
    assert all(not verdict.ranks for verdict in report_of(trace_of(job)).verdicts)


def test_a_stop_early_in_a_job_of_two_models_is_an_incident():
    """Four short steps of one model and a step of the other repeat: the third repetition is not part of the warm-up."""
    everyone = ((0, 1, 2, 3),)
    first = tuple(Call(everyone, count=1000, work_ns=4 * MS, waits=True) for _ in range(4))
    program = (*first, Call(everyone, count=9000, work_ns=20 * MS, waits=True))
    job = Job(program, n_steps=30, delays=(Delay(1, 2, 700 * MS, Category.IO, call=1),))
    verdict = only(report_of(trace_of(job)))
    assert (verdict.kind, verdict.ranks, verdict.causes[0].cause.name) == ("straggler", [1], "block_io")
