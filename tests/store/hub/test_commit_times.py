"""The estimated wait for a commit follows the times of the last commits."""

import pytest

from stallscope.store.hub.commit_times import CommitTimes


def times_of(*commits: tuple[int, float]) -> CommitTimes:
    times = CommitTimes()
    for n_rows, took_s in commits:
        times.add(n_rows, took_s)
    return times


def test_many_small_commits_do_not_make_a_longer_queue_look_slow():
    times = times_of(*[(100, 0.03)] * 50)
    assert times.wait_s(100, 50_000) == pytest.approx(0.03, abs=0.005)
    assert times.wait_s(10_000, 50_000) < 0.2


@pytest.mark.parametrize("fixed_s", [0.0, 0.02])
@pytest.mark.parametrize("row_s", [1e-6, 4e-5])
def test_fixed_time_and_time_per_row_are_told_apart(fixed_s, row_s):
    commits = [(n_rows, fixed_s + row_s * n_rows) for n_rows in (1_000, 50_000, 20_000)] * 30
    true_s = 3 * fixed_s + 150_000 * row_s
    assert times_of(*commits).wait_s(150_000, 50_000) == pytest.approx(true_s, rel=0.15, abs=0.06)


def test_slow_commits_make_a_queue_wait():
    assert times_of(*[(10_000, 2.0)] * 20).wait_s(10_000, 50_000) > 1.5
    assert CommitTimes().wait_s(0, 50_000) == 0
