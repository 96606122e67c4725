"""Goodput: every GPU second is productive or lost, by job, owner and day."""

from typing import Any

import pytest

from stallscope.events.owner import GROUP_LABELS, column
from stallscope.serve.tools.goodput_sums import GpuTime, Window, gpu_times

S = 10**9
HOUR = 3600 * S
DAY = 24 * HOUR
T0 = 20_000 * DAY
WINDOW = Window(T0, T0 + 2 * DAY)


def owner(**labels: str) -> dict[str, Any]:
    return {column(label): labels.get(label) for label in GROUP_LABELS}


def job(name: str, begin_ns: int, end_ns: int | None, n_ranks: int = 8, **labels: str) -> dict[str, Any]:
    times = {"begin_ns": begin_ns, "last_ns": end_ns, "ended_ns": end_ns}
    return {"job": name, "cluster_id": "c", "n_ranks": n_ranks} | times | owner(**labels)


def verdict(
    kind: str, gpu_seconds: float, *, of: str | None = "a", cause: str = "", begin_ns=T0, **labels: str
):
    row = {"job": of, "kind": kind, "cause": cause, "gpu_seconds": gpu_seconds}
    return row | {"since_ns": begin_ns, "until_ns": begin_ns + HOUR} | owner(**labels)


ANN = {"job": "1", "job_name": "train", "user": "ann"}
RUN = job("a", T0, T0 + HOUR, **ANN)


def test_time_without_a_verdict_is_productive():
    ((cell, time),) = gpu_times([RUN], [], by="user", window=WINDOW).items()
    assert cell == ("ann", None)
    assert (time.held, time.productive, time.jobs) == (8 * 3600.0, 8 * 3600.0, {"a"})


@pytest.mark.parametrize(
    ("kind", "cause", "loss"),
    [
        ("straggler", "gil", "stragglers"),
        ("device", "gpu_slow", "stragglers"),
        ("straggler", "input_starvation", "input"),
        ("change", "block_io", "input"),
        ("hang", "", "hangs"),
        ("failure", "gpu_fault", "hangs"),
    ],
)
def test_a_loss_counts_by_its_kind_and_cause(kind, cause, loss):
    (time,) = gpu_times([RUN], [verdict(kind, 900.0, cause=cause)], by="user", window=WINDOW).values()
    assert {name: lost for name, lost in time.lost.items() if lost} == {loss: 900.0}
    assert time.productive == 8 * 3600 - 900


def test_an_inconclusive_verdict_and_an_unknown_cost_are_no_loss():
    unknown = verdict("straggler", 0.0) | {"gpu_seconds": None}
    (time,) = gpu_times([RUN], [verdict("inconclusive", 900.0), unknown], by="user", window=WINDOW).values()
    assert sum(time.lost.values()) == 0


def test_a_pause_between_two_runs_of_a_job_is_a_restart():
    again = job("b", T0 + HOUR + 600 * S, T0 + 2 * HOUR, **ANN)
    other = job("c", T0 + HOUR + 600 * S, T0 + 2 * HOUR, job="2", user="ann")
    (time,) = gpu_times([again, RUN, other], [], by="user", window=WINDOW).values()
    assert time.lost["restarts"] == 600 * 8
    assert time.held == 8 * (3600 + 600 + 2 * 3000)
    late = job("b", T0 + 4 * HOUR, T0 + 5 * HOUR, **ANN)
    (time,) = gpu_times([late, RUN], [], by="user", window=WINDOW).values()
    assert time.lost["restarts"] == 0


def test_idle_gpus_of_an_owner_without_a_job_count_as_held():
    held = verdict("idle", 7200.0, of=None, user="bob")
    cells = gpu_times([RUN], [held], by="user", window=WINDOW)
    assert (cells["bob", None].held, cells["bob", None].lost["idle"], cells["bob", None].productive) == (
        7200,
        7200,
        0,
    )
    assert cells["ann", None].productive == 8 * 3600


def test_a_job_over_midnight_is_divided_by_day():
    long = job("a", T0 + 22 * HOUR, T0 + 25 * HOUR, n_ranks=1, **ANN)
    slow = verdict("straggler", 3600.0, begin_ns=T0 + 23 * HOUR + 1800 * S)
    cells = gpu_times([long], [slow], by="job", window=Window(T0, T0 + 2 * DAY, has_days=True))
    (first, second) = sorted(cells)
    assert first[0] == "1 (train)"
    assert (cells[first].held, cells[second].held) == (7200.0, 3600.0)
    assert (cells[first].lost["stragglers"], cells[second].lost["stragglers"]) == (1800.0, 1800.0)


def test_only_the_part_within_the_window_counts():
    window = Window(T0 + 1800 * S, T0 + DAY)
    (time,) = gpu_times([RUN], [verdict("hang", 3600.0)], by="user", window=window).values()
    assert (time.held, time.lost["hangs"]) == (8 * 1800.0, 1800.0)
    assert gpu_times([job("x", 0, None)], [], by="user", window=window) == {}


def test_losses_beyond_the_held_time_leave_nothing_negative():
    assert GpuTime(held=10.0, lost={"hangs": 30.0}).productive == 0.0
