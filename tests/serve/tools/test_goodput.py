"""Goodput: every GPU second is productive or lost, by job, owner and day."""

import json
from typing import Any

import pytest

from stallscope.events.owner import GROUP_LABELS, column
from stallscope.serve.tools.goodput import _row, _summary
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
    members = json.dumps([["n1", 100 + rank, rank] for rank in range(n_ranks)])
    row = {"job": name, "cluster_id": "c", "n_ranks": n_ranks, "members": members}
    return row | times | owner(**labels)


def verdict(
    kind: str,
    gpu_seconds: float,
    *,
    of: str | None = "a",
    cause: str = "",
    begin_ns=T0,
    length_ns=HOUR,
    pids=(),
    **labels: str,
):
    row = {
        "job": of,
        "cluster_id": "c",
        "node_id": "n1",
        "kind": kind,
        "cause": cause,
        "pids": json.dumps(pids),
    }
    row |= {"gpu_seconds": gpu_seconds, "since_ns": begin_ns, "until_ns": begin_ns + length_ns}
    return row | owner(**labels)


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


def test_verdicts_of_unknown_cost_are_counted_in_the_group_and_on_the_day_where_they_begin():
    unknown = verdict("straggler", 0.0, begin_ns=T0 + 23 * HOUR, length_ns=2 * HOUR) | {"gpu_seconds": None}
    open_end = unknown | {"since_ns": T0 + 25 * HOUR, "until_ns": None}
    before = verdict("hang", 0.0, begin_ns=T0 - 2 * HOUR) | {"gpu_seconds": None}
    long = job("a", T0 + 22 * HOUR, T0 + 26 * HOUR, **ANN)
    days = Window(T0, T0 + 2 * DAY, has_days=True)
    cells = gpu_times([long], [unknown, open_end, before, verdict("idle", 60.0)], by="user", window=days)
    counts = {day: time.n_unknown_costs for (group, day), time in cells.items() if group == "ann"}
    assert list(counts.values()) == [1, 1]
    summary = _summary(list(cells.values()))
    assert summary.endswith("the cost of 2 verdicts is unknown and not subtracted.")
    assert "unknown" not in _summary([GpuTime(held=3600.0)])


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


def test_losses_that_count_a_moment_twice_are_at_most_the_held_time():
    twice = [verdict("straggler", 6 * 3600.0), verdict("hang", 6 * 3600.0)]
    (time,) = gpu_times([RUN], twice, by="user", window=WINDOW).values()
    assert (time.held, time.productive) == (8 * 3600, 0)
    assert dict(time.lost) == {"stragglers": 4 * 3600, "hangs": 4 * 3600}


def test_a_job_that_hangs_lasts_as_long_as_its_verdict():
    """The last collective was at the start of a hang of three hours."""
    hangs = verdict("hang", 8 * 3 * 3600.0, begin_ns=T0 + HOUR, length_ns=3 * HOUR)
    running = RUN | {"ended_ns": None}
    (time,) = gpu_times([running], [hangs], by="user", window=WINDOW).values()
    assert (time.held, time.productive, time.lost["hangs"]) == (8 * 4 * 3600, 8 * 3600, 8 * 3 * 3600)


def test_a_loss_of_a_job_that_is_not_known_any_more_counts_as_held():
    (time,) = gpu_times([], [verdict("hang", 900.0, of="old", user="ann")], by="user", window=WINDOW).values()
    assert (time.held, time.lost["hangs"], time.productive) == (900, 900, 0)


def test_jobs_of_two_clusters_with_one_id_are_two_jobs():
    other = job("a", T0, T0 + HOUR, user="bob") | {"cluster_id": "d"}
    slow = verdict("straggler", 900.0) | {"cluster_id": "d"}
    cells = gpu_times([RUN, other], [slow], by="user", window=WINDOW)
    assert (cells["ann", None].productive, cells["bob", None].productive) == (8 * 3600, 8 * 3600 - 900)


NOTEBOOK = job("n1/100", T0, T0 + HOUR, n_ranks=1, user="bob")


def test_a_notebook_that_sleeps_on_eight_gpus_holds_each_of_them_once():
    asleep = verdict("idle", 8 * 1800.0, of=None, begin_ns=T0 + 1800 * S, length_ns=1800 * S, pids=[100])
    (cell,) = gpu_times([NOTEBOOK], [asleep], by="job", window=WINDOW).items()
    assert cell[0] == ("n1/100", None)
    time = cell[1]
    assert (time.held, time.lost["idle"], time.productive) == (3600 + 7 * 1800, 8 * 1800, 1800)


def test_idle_processes_of_one_scheduler_job_are_counted_once():
    runs = [
        job(f"n1/{pid}", T0, T0 + HOUR, n_ranks=1, **ANN) | {"members": json.dumps([["n1", pid, None]])}
        for pid in (100, 101)
    ]
    asleep = verdict("idle", 2 * 3600.0, of=None, pids=[100], **ANN)
    (time,) = gpu_times(runs, [asleep], by="job", window=WINDOW).values()
    assert (time.held, time.lost["idle"], time.productive) == (2 * 3600, 2 * 3600, 0)


def test_a_pause_before_a_restart_is_not_counted_as_idle_as_well():
    again = job("b", T0 + HOUR + 600 * S, T0 + 2 * HOUR, **ANN)
    unused = verdict("idle", 8 * 600.0, of=None, begin_ns=T0 + HOUR, length_ns=600 * S, **ANN)
    (time,) = gpu_times([RUN, again], [unused], by="user", window=WINDOW).values()
    assert (time.lost["restarts"], time.lost["idle"]) == (8 * 600, 0)
    assert time.held == 8 * 7200


def test_free_gpus_next_to_a_running_job_are_held_in_addition():
    unused = verdict("idle", 4 * 3600.0, of=None, **ANN)
    (time,) = gpu_times([RUN], [unused], by="user", window=WINDOW).values()
    assert (time.held, time.lost["idle"], time.productive) == (12 * 3600, 4 * 3600, 8 * 3600)


@pytest.mark.parametrize("held", [1.0, 7.77, 1234.567891, 3e6])
def test_the_hours_of_a_row_add_up(held):
    time = GpuTime(held)
    time.add(GpuTime(0.0, {"hangs": held / 3, "stragglers": held / 7, "input": held / 11}))
    row = _row("ann", None, time)
    parts = (row.productive, row.stragglers, row.hangs, row.restarts, row.input, row.idle)
    assert row.gpu_hours == pytest.approx(held / 3600, abs=1e-6)
    assert round(sum(parts), 6) == row.gpu_hours


def test_a_short_job_has_hours_in_the_summary():
    short = GpuTime()
    short.add(GpuTime(64.0, {"input": 16.0}))
    assert _summary([short]) == ("At most 75.0% of 0.0178 GPU hours were productive; lost: 25.0% input.")
    nearly_whole = GpuTime()
    nearly_whole.add(GpuTime(64.0, {"stragglers": 0.001}))
    tiny = _summary([nearly_whole])
    assert tiny.startswith("At most 99.9% of ")
    assert tiny.endswith("; lost: less than 0.1% stragglers.")
    assert "of 2,777.8 GPU hours" in _summary([GpuTime(1e7)])
