"""A signal that stops a process repeatedly is not chance, even if other ranks are late."""

import numpy as np
import pytest

from stallscope.events.names import Category

from .builders import MS, Delay, Job, data_parallel, trace_of
from .reports import report_of

STEPS = (12, 25, 33, 41)


def busy_machine(category: Category) -> Job:
    """Every rank waits for a lock in a fifth of the steps; rank 2 has four delays of the same length in addition."""
    rng = np.random.default_rng(5)
    chance = [
        Delay(rank, step, 40 * MS, Category.LOCK)
        for rank in range(4)
        for step in range(5, 50)
        if rng.random() < 0.2 and (rank, step) not in {(2, step) for step in STEPS}
    ]
    stops = [Delay(2, step, 50 * MS, category) for step in STEPS]
    return Job(data_parallel(), n_steps=50, delays=(*chance, *stops))


@pytest.mark.parametrize(("category", "named"), [(Category.STOPPED, {2}), (Category.LOCK, set())])
def test_a_stopped_rank_is_named_and_a_rank_with_a_lock_is_not(category, named):
    verdicts = report_of(trace_of(busy_machine(category))).verdicts
    stragglers = [verdict for verdict in verdicts if verdict.kind == "straggler"]
    assert {rank for verdict in stragglers for rank in verdict.ranks} == named


def test_one_long_stop_is_an_incident_although_another_rank_had_a_delay_of_that_length():
    delays = (Delay(1, 20, 700 * MS, Category.STOPPED), Delay(3, 30, 600 * MS, Category.LOCK))
    job = Job(data_parallel(work_ns=15 * MS), n_steps=60, delays=delays)
    stopped = [verdict for verdict in report_of(trace_of(job)).verdicts if verdict.kind == "straggler"]
    assert [(verdict.ranks, verdict.causes[0].cause.name) for verdict in stopped] == [
        ([1], "process_stopped")
    ]
