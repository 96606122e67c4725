"""The cost of the plugin is found among jobs that differ, with an interval of the stated coverage."""

import numpy as np
import pytest
from plugin_cost import NONE, OFF, ON, SAMPLED, Windows, change

N_JOBS, N_TURNS = 5, 4


def windows(*, off: float, on: float, jobs: float, seed: int) -> Windows:
    """off, on: cost in per cent relative to no plugin. jobs: standard deviation of the jobs of a kind, in per cent."""
    rng = np.random.default_rng(seed)
    drift = rng.normal(0, 1.0, N_TURNS)
    with_plugin, without = rng.normal(0, jobs, (2, N_JOBS, 1))
    percent = {
        NONE: without,
        OFF: with_plugin + off,
        SAMPLED: with_plugin + off + (on - off) / 10,
        ON: with_plugin + on,
    }
    return {
        mode: (400e-6 * np.exp((own + drift + rng.normal(0, 0.01, (N_JOBS, N_TURNS))) / 100)).tolist()
        for mode, own in percent.items()
    }


def test_jobs_that_differ_are_not_a_cost_of_the_plugin():
    found = [change(windows(off=0, on=0.3, jobs=0.03, seed=seed), NONE, OFF) for seed in range(400)]
    assert np.mean([abs(mean) <= half for mean, half in found]) == pytest.approx(0.95, abs=0.04)


def test_the_cost_of_recording_is_measured_within_each_job():
    mean, half = change(windows(off=0.1, on=0.3, jobs=1.0, seed=1), OFF, ON)
    assert mean == pytest.approx(0.2, abs=0.02)
    assert half < 0.03


def test_a_cost_above_the_differences_of_jobs_is_found():
    mean, half = change(windows(off=0.2, on=0.3, jobs=0.03, seed=2), NONE, OFF)
    assert 0 < mean - half < 0.2 < mean + half
