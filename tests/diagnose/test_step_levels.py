"""Changes of steps that have a few typical lengths, as with batches of several lengths."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.lateness.step_levels import shifted_levels
from stallscope.diagnose.thresholds import Thresholds

LENGTHS = (0.5, 0.75, 1.0, 1.5, 2.0)


def batches(n: int, *, seed: int, cut: int = 0, factor: float = 1.0, lengths=LENGTHS) -> np.ndarray:
    """Steps of 40 ms times a random length, with 1 % scatter; longer by a factor from `cut` on."""
    rng = np.random.default_rng(seed)
    steps = 4e7 * rng.choice(lengths, n) * np.exp(0.01 * rng.standard_normal(n))
    steps[cut:] *= factor
    return steps


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [1.15, 1.22, 1.4])
def test_a_change_of_all_lengths_is_found_with_its_size(seed: int, factor: float) -> None:
    shift = shifted_levels(batches(100, seed=seed, cut=45, factor=factor), Thresholds())
    assert shift is not None
    assert abs(shift.cut - 45) <= 5
    assert shift.factor == pytest.approx(factor, rel=0.04)


def test_the_change_of_a_long_job_is_found() -> None:
    shift = shifted_levels(batches(5000, seed=1, cut=3000, factor=1.2), Thresholds())
    assert shift is not None
    assert shift.cut == pytest.approx(3000, abs=100)


@pytest.mark.parametrize("seed", range(20))
def test_batches_of_random_lengths_are_not_a_change(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert shifted_levels(batches(80, seed=seed, factor=1.0), Thresholds()) is None
    assert shifted_levels(batches(30, seed=seed, factor=1.0), Thresholds()) is None
    assert shifted_levels(4e7 * np.exp(0.3 * rng.standard_normal(80)), Thresholds()) is None


def test_steps_that_become_shorter_are_not_a_slowdown() -> None:
    assert shifted_levels(batches(100, seed=2, cut=45, factor=0.8), Thresholds()) is None


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_longer_than_a_few_short_steps_at_the_start_are_not_a_slowdown(seed: int) -> None:
    """A host runs ahead of its GPU until its launch queue is full, and again after a save."""
    rng = np.random.default_rng(seed)
    steps = 4e6 * np.exp(0.005 * rng.standard_normal(60))
    steps[:5] *= rng.uniform(0.45, 0.55, 5)
    steps[45] *= 9
    steps[46:] *= rng.uniform(0.55, 0.66, 14)
    assert shifted_levels(steps, Thresholds()) is None


@pytest.mark.parametrize("change_share", [1.0, 2.5])
def test_no_change_is_large_enough_for_a_high_limit(change_share: float) -> None:
    limits = replace(Thresholds(), change_share=change_share)
    assert shifted_levels(batches(100, seed=1, cut=45, factor=1.4), limits) is None
