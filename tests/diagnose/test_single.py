"""Processes without peers: compared with their own better times; voluntary pauses are not faults."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.processes.single import outermost, steps_of
from stallscope.diagnose.report import text
from stallscope.events import layout
from stallscope.events.names import Category, Op
from stallscope.events.trace import Clock, Trace

from .builders import EPOCH_NS, MS, START_NS, Delay, Job, data_parallel, trace_of
from .reports import only, report_of

PID = 7
N_STEPS = 30
STEP_NS = 60 * MS


def lone(
    pauses_ns: dict[int, int],
    category: Category = Category.IO,
    *,
    alloc_ns: Sequence[int] = (),
    workers_on_cpu: float | None = None,
) -> Trace:
    """A loop of copy, launch, synchronise; before each step it is off the CPU for this time, in the category."""
    calls, off, now = [], [], START_NS
    for step in range(N_STEPS):
        if pause := pauses_ns.get(step, 0):
            off.append((now, pause))
            now += pause
        if step < len(alloc_ns) and alloc_ns[step]:
            calls.append((now, alloc_ns[step], Op.ALLOC))
            now += alloc_ns[step]
        for op, length in ((Op.COPY, 4 * MS), (Op.LAUNCH, MS // 10), (Op.SYNC, 50 * MS)):
            calls.append((now, length, op))
            now += length + MS
    rows = layout.empty(layout.CALLS, len(calls))
    for name, values in zip(("ts_ns", "duration_ns", "op"), zip(*calls, strict=True), strict=True):
        rows[name] = values
    rows["pid"] = rows["tid"] = PID
    offcpu = layout.empty(layout.OFFCPU, len(off))
    offcpu["pid"] = offcpu["tid"] = PID
    offcpu["category"] = category
    if off:
        offcpu["ts_ns"], offcpu["duration_ns"] = np.array(off).T
    processes = layout.empty(layout.PROCESSES, 1 if workers_on_cpu is None else 2)
    processes["pid"], processes["comm"][0] = PID, b"python3"
    snapshots = layout.empty(layout.SNAPSHOTS, 0 if workers_on_cpu is None else 2)
    if workers_on_cpu is not None:
        processes["pid"][1], processes["comm"][1] = PID + 1, b"pt_data_worker"
        snapshots["pid"], snapshots["ts_ns"] = PID + 1, (START_NS, now)
        whole = now - START_NS
        snapshots["ledger_ns"][1, Category.ON_CPU - 1] = int(whole * workers_on_cpu)
        snapshots["ledger_ns"][1, Category.OTHER_OFF - 1] = whole - int(whole * workers_on_cpu)
    return Trace(
        calls=rows,
        offcpu=offcpu,
        processes=processes,
        snapshots=snapshots,
        clocks=(Clock(0, START_NS, EPOCH_NS),),
        ends_ns=(now,),
    )


def test_a_steady_loop_is_healthy():
    report = report_of(lone({}))
    assert report.healthy
    assert report.examined["n_steps"] == N_STEPS - 1


@pytest.mark.parametrize(
    ("category", "cause"),
    [
        (Category.IO, "block_io"),
        (Category.LOCK, "lock_contention"),
        (Category.PREEMPTED, "cpu_preemption"),
        (Category.CHILD, "input_starvation"),
        (Category.STOPPED, "process_stopped"),
    ],
)
def test_the_cause_of_late_steps_is_named(category, cause):
    verdict = only(report_of(lone(dict.fromkeys(range(12, 30, 3), 400 * MS), category), usd_per_gpu_hour=3.6))
    assert (verdict.kind, verdict.causes[0].cause.name) == ("process", cause)
    assert verdict.causes[0].share > 0.95
    assert verdict.evidence.n_late_steps == 6
    assert verdict.late_ms is not None
    assert verdict.late_ms["median"] == pytest.approx(400, rel=0.02)
    assert verdict.cost is not None
    assert verdict.cost.gpu_seconds == pytest.approx(2.4, rel=0.02)
    assert verdict.cost.usd == pytest.approx(0.0024, rel=0.02)


def test_steps_with_more_work_for_the_gpu_are_no_fault():
    report = report_of(lone(dict.fromkeys(range(4, 30, 5), 400 * MS), Category.DEVICE))
    assert report.healthy
    assert "waited longer for its GPU in some steps" in str(report.benign)


def test_waits_for_the_gpu_that_do_not_return_with_a_period_are_inconclusive():
    report = report_of(lone(dict.fromkeys((4, 7, 13, 14, 22, 25), 400 * MS), Category.DEVICE))
    assert [(verdict.kind, verdict.evidence.pid) for verdict in report.verdicts] == [("inconclusive", PID)]
    assert report.verdicts[0].summary.startswith(f"Process {PID} has no known fault, but ")


def test_slow_allocations_are_named():
    verdict = only(
        report_of(lone({}, alloc_ns=[300 * MS if step % 5 == 4 else 0 for step in range(N_STEPS)]))
    )
    assert verdict.causes[0].cause.name == "cuda_alloc"


@pytest.mark.parametrize("category", [Category.SLEEP, Category.NET, Category.OTHER_OFF])
def test_a_process_that_waits_for_its_clients_is_idle_not_slow(category):
    report = report_of(lone(dict.fromkeys(range(5, 30, 4), 900 * MS), category))
    assert report.healthy
    assert any("left its GPU idle" in str(remark["what"]) for remark in report.benign)


def test_a_wait_while_the_loaders_work_is_for_the_input():
    pauses = dict.fromkeys(range(18, 30), 900 * MS)
    verdict = only(report_of(lone(pauses, Category.OTHER_OFF, workers_on_cpu=0.9)))
    assert verdict.causes[0].cause.name == "input_starvation"
    assert verdict.causes[0].evidence.n_loader_workers == 1
    assert report_of(lone(pauses, Category.OTHER_OFF, workers_on_cpu=0.1)).healthy


def test_two_late_steps_are_healthy():
    assert report_of(lone({10: 400 * MS, 20: 400 * MS})).healthy


def test_a_driver_call_inside_a_runtime_call_counts_once():
    rows = layout.empty(layout.CALLS, 5)
    rows["tid"] = 1, 1, 2, 1, 1
    rows["ts_ns"] = 0, 10, 5, 200, 150
    rows["duration_ns"] = 100, 80, 20, 5, 10
    assert outermost(rows)["ts_ns"].tolist() == [0, 150, 200, 5]


def test_a_steps_account_fills_it():
    trace = lone({3: 500 * MS, 9: 70 * MS})
    for steps in steps_of(trace, outermost(trace.calls)):
        assert np.allclose(steps.spent_ns.sum(axis=1), steps.length_ns)
        assert (steps.spent_ns >= 0).all()


def alone_with_collectives(*delays: Delay, calls: int = 1) -> Trace:
    """A data-parallel job of one rank: three collectives a step, with itself. calls: other calls in the trace."""
    trace = trace_of(Job(data_parallel(1), n_ranks=1, delays=delays))
    rows = layout.empty(layout.CALLS, calls)
    rows["pid"] = rows["tid"] = trace.processes["pid"][0]
    rows["ts_ns"], rows["duration_ns"], rows["op"] = START_NS, MS, Op.ALLOC
    return replace(trace, calls=rows)


def test_a_job_of_one_rank_has_the_steps_in_which_its_collectives_repeat():
    delays = [Delay(0, step, 90 * MS, Category.IO) for step in (6, 14, 19, 30)]
    verdict = only(report_of(alone_with_collectives(*delays)))
    assert (verdict.kind, verdict.ranks, verdict.n_late_rounds) == ("process", [0], 4)
    assert verdict.causes[0].cause.name == "block_io"
    assert verdict.late_ms["max"] == pytest.approx(90, abs=1)
    assert verdict.cost.gpu_seconds == pytest.approx(4 * 0.09, rel=0.02)


def test_a_healthy_job_with_one_rank_is_reported_as_healthy():
    report = report_of(alone_with_collectives())
    assert (report.verdicts, report.benign) == ([], [])
    assert (report.examined["n_communicators"], report.examined["n_rounds"]) == (1, 120)
    assert "Healthy: nothing keeps a GPU waiting." in text.report(report)
