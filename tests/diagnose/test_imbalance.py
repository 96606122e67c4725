"""Uneven work: a slow stage is not a bad machine, and a bad machine in a stage is still found."""

import pytest

from stallscope.events.names import Op

from .builders import MS, Call, Delay, Job, every, trace_of
from .reports import only, report_of


def pipeline(first_ms: int, second_ms: int):
    """Two stages of two ranks: activations go forward, gradients come back, each stage reduces its own."""
    a, b = first_ms * MS, second_ms * MS
    return (
        Call(((0, 2), (1, 3)), op=Op.SEND, count=77, work_ns=(a, a, 0, 0), waits=True),
        Call(((2, 0), (3, 1)), op=Op.SEND, count=78, work_ns=(0, 0, b, b), waits=True),
        Call(((0, 1),), count=500, work_ns=MS, waits=True),
        Call(((2, 3),), count=700, work_ns=MS, waits=True),
    )


def test_a_slow_stage_is_an_imbalance_without_a_culprit():
    verdict = only(report_of(trace_of(Job(pipeline(4, 14)))))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("imbalance", [], [0, 1])
    assert verdict.evidence.slow_stage == [2, 3]
    assert verdict.late_ms["median"] == pytest.approx(10, rel=0.1)
    n_steps, n_victims = verdict.evidence.n_steps, 2
    assert verdict.cost.at_most_gpu_seconds == pytest.approx(0.010 * n_steps * n_victims, rel=0.1)


def test_a_slow_first_stage_is_recognised():
    assert only(report_of(trace_of(Job(pipeline(14, 4))))).evidence.slow_stage == [0, 1]


def test_even_stages_are_healthy():
    assert report_of(trace_of(Job(pipeline(6, 6)))).healthy


@pytest.mark.parametrize("culprit", range(4))
def test_a_bad_machine_in_an_even_pipeline_is_named(culprit):
    trace = trace_of(Job(pipeline(6, 6), delays=tuple(every(culprit, 5, 60 * MS, until=50)), n_steps=50))
    assert [verdict.ranks for verdict in report_of(trace).verdicts if verdict.ranks] == [[culprit]]


def test_a_straggler_is_named_in_addition_to_a_slow_stage():
    trace = trace_of(Job(pipeline(4, 14), delays=tuple(every(1, 5, 60 * MS, until=50)), n_steps=50))
    kinds = {(verdict.kind, *verdict.ranks) for verdict in report_of(trace).verdicts}
    assert kinds == {("imbalance",), ("straggler", 1)}


def test_delays_that_take_turns_are_imbalance():
    delays = tuple(Delay(step % 4, step, 40 * MS) for step in range(4, 60, 3))
    program = (Call(((0, 1, 2, 3),), count=1), Call(((0, 1, 2, 3),), count=2, waits=True))
    verdict = only(report_of(trace_of(Job(program, n_steps=60, delays=delays))))
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert set(verdict.evidence.late_steps_by_rank) == {"0", "1", "2", "3"}
    n_delays = len(range(4, 60, 3))
    assert verdict.cost.gpu_seconds == pytest.approx(3 * n_delays * 0.040, rel=0.1)
