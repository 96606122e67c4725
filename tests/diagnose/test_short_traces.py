"""Processes that are traced for a few seconds: a certain fault is named, and a short healthy trace accuses nothing."""

import numpy as np
import pytest

from stallscope.diagnose.processes.activity import activities, standard_error
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

from .process_traces import TORCH, gpu, process
from .reports import only, report_of

LENGTHS = (2, 3, 4, 6, 10)
PHASES = (0.1, 0.4, 0.8)
STEP = "/job/train.py:20 step"
SAVE = "/job/train.py:30 append"
LOOP = ((Op.SYNC, 60, 12_000.0, {}), (Op.LAUNCH, 3000, 5.0, {}))


def readings(busy: float, *, n_seconds: int, phase: float) -> list[tuple[float, int]]:
    """A GPU that is idle before and after the process, read once a second."""
    ends = phase + np.arange(n_seconds + 2)
    inside = np.minimum(ends, n_seconds) - np.maximum(ends - 1, 0)
    return [(float(end), round(100 * busy * max(part, 0))) for end, part in zip(ends, inside, strict=True)]


def loop(
    host: float, busy: float, *, n_seconds: int, phase: float, doing: Category = Category.ON_CPU
) -> Trace:
    """A process that spends a share of its time on the host in a state, and otherwise waits for its GPU."""
    samples = [gpu(Category.DEVICE, STEP, n=round(20 * (1 - host)))]
    samples.append(gpu(doing, SAVE, nr=-1 if doing is Category.ON_CPU else 74, n=max(round(20 * host), 1)))
    return process(
        {doing: host, Category.DEVICE: 1 - host},
        samples,
        LOOP,
        readings=readings(busy, n_seconds=n_seconds, phase=phase),
        n_seconds=n_seconds,
    )


@pytest.mark.parametrize("n_seconds", LENGTHS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("host", "busy"), [(0.07, 0.99), (0.12, 0.97), (0.2, 0.96), (0.4, 0.94)])
def test_host_work_that_overlaps_with_a_busy_gpu_is_no_fault(n_seconds, phase, host, busy):
    for state in (Category.ON_CPU, Category.IO):
        report = report_of(loop(host, busy, n_seconds=n_seconds, phase=phase, doing=state))
        assert not [verdict for verdict in report.verdicts if verdict.kind == "process"]


@pytest.mark.parametrize("n_seconds", LENGTHS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("share", [0.16, 0.3, 0.6])
@pytest.mark.parametrize(("state", "cause"), [(Category.ON_CPU, "host_compute"), (Category.IO, "block_io")])
def test_a_fault_of_a_sixth_of_the_time_is_named(n_seconds, phase, share, state, cause):
    trace = loop(share, 1 - share, n_seconds=n_seconds, phase=phase, doing=state)
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.causes[0].cause.name) == ("process", cause)
    assert verdict.causes[0].share == pytest.approx(share, abs=0.02)


def test_a_reading_that_covers_time_before_the_process_does_not_make_its_gpu_idle():
    (activity,) = activities(loop(0.1, 0.97, n_seconds=2, phase=0.5))
    assert activity.gpu_busy == pytest.approx(0.97, abs=0.01)


def test_a_fault_that_a_short_trace_cannot_confirm_is_reported_as_uncertain():
    budget = {Category.ON_CPU: 0.16, Category.DEVICE: 0.84}
    trace = process(
        budget, [gpu(Category.ON_CPU, TORCH, n=2)], LOOP, readings=((1.0, 70), (2.0, 94)), n_seconds=2
    )
    verdict = only(report_of(trace))
    assert verdict.kind == "inconclusive"
    assert "too short for a reliable answer" in str(verdict.abstained_because)
    assert "Trace the process for longer." in verdict.advice


def test_work_on_the_cpu_may_overlap_where_the_driver_does_not_report_the_gpu():
    samples = [gpu(Category.ON_CPU, TORCH)]
    assert only(report_of(process({Category.ON_CPU: 0.2, Category.DEVICE: 0.8}, samples))).kind != "process"
    named = only(report_of(process({Category.ON_CPU: 0.4, Category.DEVICE: 0.6}, samples)))
    assert named.causes[0].cause.name == "host_compute"


def test_the_error_of_a_mean_shrinks_with_the_number_of_values():
    errors = [standard_error(np.full(n, 0.2), np.ones(n), spread=0.03) for n in (1, 2, 4, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(0.03)
    varied = standard_error(np.array([0.1, 0.3]), np.ones(2), spread=0.03)
    assert varied > errors[1]
