"""Slowdown under drift and noise is found, with an interval of the stated coverage."""

import comparing
import numpy as np
import pytest
from comparing import Steps, Window
from running import Failed
from switching import Turn

from stallscope.events.kernel import HookGroup

STEP_NS = 10_000_000
WINDOW_NS = 3_000_000_000


def job(
    percent: float, *, noise: float, drift: float, n_on: int, seed: int = 0
) -> tuple[list[Window], list[Steps]]:
    """Windows off, on, ..., off and steps, slower by `percent` while on and by `drift` over all.

    noise: standard deviation of a window's step, relative.
    """
    rng = np.random.default_rng(seed)
    windows, ends, now, n_windows = [], [], 0, 2 * n_on + 1
    for i in range(n_windows):
        slower = 1 + drift * i / n_windows + rng.normal(0, noise)
        one_ns = STEP_NS * slower * (1 + percent / 100 * (i % 2))
        times = now + np.arange(1, int(WINDOW_NS / one_ns)) * one_ns
        windows.append(Window(now, now + WINDOW_NS, bool(i % 2)))
        ends.append(times)
        now += WINDOW_NS + 1_000_000_000
    end_ns = np.concatenate(ends).astype(np.int64)
    length_ns = np.diff(end_ns, prepend=end_ns[0] - STEP_NS).astype(np.float64)
    return windows, [Steps(np.arange(len(end_ns)), end_ns, length_ns)]


def test_the_slowdown_is_measured_correctly_under_drift():
    slowdown = comparing.slowdown(*job(0.5, noise=0, drift=0.05, n_on=8), [])
    assert slowdown["slowdown_percent"] == pytest.approx(0.5, abs=0.02)
    assert slowdown["runs"] == 16


def test_seven_jobs_whose_cpus_change_their_speeds_are_compared_within_a_third_of_a_per_cent():
    """Each CPU takes twice as long for some seconds, independently of the others."""
    rng, windows, ranks = np.random.default_rng(5), [], []
    for i in range(121):
        begin_ns = i * 700_000_000
        windows.append(Window(begin_ns, begin_ns + 500_000_000, bool(i % 2)))
    for _ in range(7):
        n = 121 * 700
        slow = np.repeat(rng.random(n // 2000 + 1) < 0.6, 2000)[:n]
        turn_ns = np.where(slow, 77_000, 42_000) * rng.normal(1, 0.05, n)
        length_ns = 1e6 * (turn_ns / 42_000) ** 0.8 * rng.normal(1, 0.08, n)
        end_ns = np.arange(n) * 1_000_000
        is_on = (end_ns // 700_000_000) % 2 == 1
        steps = Steps(np.arange(n), end_ns, length_ns * np.where(is_on, 1.004, 1))
        ranks.append(comparing.at_one_speed(steps, turn_ns, windows))
    result = comparing.slowdown(windows, ranks, [])
    assert abs(result["slowdown_percent"] - 0.4) <= 1.5 * result["spread_percent"]
    assert result["spread_percent"] < 0.15


def test_the_interval_has_its_stated_coverage():
    n_held, n = 0, 400
    for seed in range(n):
        slowdown = comparing.slowdown(*job(0.3, noise=0.002, drift=0.01, n_on=8, seed=seed), [])
        n_held += abs(slowdown["slowdown_percent"] - 0.3) <= slowdown["spread_percent"]
    assert 0.92 <= n_held / n <= 0.99


def test_windows_in_which_the_machine_was_slow_pull_it_to_neither_side():
    """One step in six takes a quarter longer, with and without probes."""
    result = []
    for seed in range(16):
        windows, (steps,) = job(0.5, noise=0.004, drift=0, n_on=100, seed=seed)
        length_ns, rng = steps.length_ns.copy(), np.random.default_rng(seed)
        for window in windows:
            if rng.random() < 1 / 6:
                length_ns[(steps.end_ns >= window.begin_ns) & (steps.end_ns <= window.end_ns)] *= 1.25
        result.append(comparing.slowdown(windows, [steps._replace(length_ns=length_ns)], []))
    assert np.mean([entry["slowdown_percent"] for entry in result]) == pytest.approx(0.5, abs=0.1)
    assert (
        np.mean([abs(entry["slowdown_percent"] - 0.5) <= entry["spread_percent"] for entry in result]) >= 0.8
    )
    assert np.mean([entry["spread_percent"] for entry in result]) < 0.4


def test_windows_without_complete_steps_are_rejected():
    windows, (steps,) = job(0.3, noise=0, drift=0, n_on=3)
    with pytest.raises(Failed):
        comparing.slowdown(windows, [Steps(*(step[::1000] for step in steps))], [])


def test_the_speed_of_the_cpu_is_taken_out_of_the_steps():
    windows, (steps,) = job(0.5, noise=0, drift=0, n_on=12)
    rng = np.random.default_rng(1)
    slower = np.where(
        np.repeat(rng.random(len(steps.number) // 40 + 1), 40)[: len(steps.number)] < 0.5, 1.5, 1.0
    )
    faster = rng.uniform(1, 1.1, len(slower))
    turn_ns = 30_000 * slower * faster * rng.normal(1, 0.01, len(slower))
    wandering = steps._replace(length_ns=steps.length_ns * slower**0.7 * faster)
    slowdown = comparing.slowdown(windows, [comparing.at_one_speed(wandering, turn_ns, windows)], [])
    assert comparing.slowdown(windows, [wandering], [])["spread_percent"] > 2
    assert slowdown["slowdown_percent"] == pytest.approx(0.5, abs=0.3)
    assert slowdown["spread_percent"] < 0.7


def test_jobs_side_by_side_are_compared_each_with_itself():
    jobs = [job(0.5, noise=0.01, drift=0, n_on=16, seed=seed) for seed in range(8)]
    windows, ranks = jobs[0][0], [steps for _, (steps,) in jobs]
    alone_percent = np.median([comparing.slowdown(windows, [rank], [])["spread_percent"] for rank in ranks])
    slower = ranks[0]._replace(length_ns=ranks[0].length_ns * 3)
    slowdown = comparing.slowdown(windows, [slower, *ranks[1:]], [])
    assert slowdown["slowdown_percent"] == pytest.approx(0.5, abs=0.4)
    assert slowdown["spread_percent"] < alone_percent / 2
    gap = Steps(*(np.delete(rank, slice(0, 2000)) for rank in ranks[0]))
    assert comparing.slowdown(windows, [gap, *ranks[1:]], [])["runs"] == 32


def test_the_cost_of_intermittent_hot_probes_is_measured_correctly():
    """Probes that are on in a tenth of the windows cost 10 %: without the times, the machine seems irregular."""
    windows, (steps,) = job(0.2, noise=0.002, drift=0, n_on=60)
    rng = np.random.default_rng(3)
    is_hot = rng.random(60) < 0.1
    length_ns, turns = steps.length_ns.copy(), [Turn(0, HookGroup.HOT, False)]
    for window, hot in zip(windows[1:-1:2], is_hot, strict=True):
        if hot:
            inside = (steps.end_ns >= window.begin_ns) & (steps.end_ns <= window.end_ns)
            length_ns[inside] *= 1.1
            turns += [
                Turn(window.begin_ns - 10**9, HookGroup.HOT, True),
                Turn(window.end_ns, HookGroup.HOT, False),
            ]
    slower = [steps._replace(length_ns=length_ns)]
    result, blind = (comparing.slowdown(windows, slower, output) for output in (turns, []))
    share = result["on_share"]["hot"]
    assert share == pytest.approx(is_hot.mean(), abs=1e-3)
    assert result["slowdown_percent"] == pytest.approx(0.2 + 10 * share, abs=0.2)
    assert blind["slowdown_percent"] < 0.2 + 5 * share


def test_runs_are_put_together_by_how_sharp_they_are():
    runs = [
        {
            "slowdown_percent": mean,
            "spread_percent": half,
            "runs": n,
            "each_percent": [mean] * n,
            "agent": {"cpu": cpu},
        }
        for mean, half, n, cpu in ((1.0, 0.3, 30, 2.0), (0.5, 0.15, 90, 4.0))
    ]
    pooled = comparing.pooled(runs)
    assert (pooled["slowdown_percent"], pooled["spread_percent"]) == (0.6, 0.134)
    assert pooled["upper_bound_percent"] == 0.734
    assert (pooled["runs"], len(pooled["each_percent"]), pooled["agent"]["cpu"]) == (120, 120, 3.5)
    assert [entry["runs"] for entry in pooled["of"]] == [30, 90]
    assert comparing.pooled(runs[:1]) is runs[0]
