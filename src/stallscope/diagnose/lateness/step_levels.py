"""A lasting change of steps that have a few typical lengths (levels), as with batches of several lengths.

The lengths vary by more than a change of 15 to 40 %, so means and medians do not show it. After a change most steps
have lengths that did not occur before, and these are the earlier lengths times one factor. Lengths drawn from a wide
range have no levels: a step without a step of similar length in its own part shows this.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.subsample import spread_out
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import Array

_LIKE = 0.035  # difference of logarithms up to which two steps have a similar length: GPUs vary by 1.5 %
_MAX_STEPS = 400  # steps that are compared, each with each
_MAX_COMMON = 0.62
"""Share of the steps with a similar length in the other part; 0.77 and more without a change."""
_MIN_LIKE = 0.85
"""Share of the steps with a similar length in their own part, and in the other part times the factor."""
_MIN_SHIFTED = 0.5  # share of the earlier steps that occur later with the factor: some lengths are rare
_MAX_FACTOR = 2.0
_FACTOR_STEP = 0.005


@dataclass(frozen=True)
class LevelShift:
    """cut: the number of steps before the change. factor: how many times as long the steps are since."""

    cut: int
    factor: float


def shifted_levels(duration_ns: Array, limits: Thresholds) -> LevelShift | None:
    """The change of the levels, with at least `slowdown_steps` steps before and after it; None without one."""
    chosen = spread_out(len(duration_ns), _MAX_STEPS)
    logs, n_least = np.log(np.maximum(duration_ns[chosen], 1.0)), limits.slowdown_steps
    if len(logs) < 2 * n_least:
        return None
    is_like = np.abs(logs[:, None] - logs) <= _LIKE
    np.fill_diagonal(is_like, False)
    cut = _cut(is_like, n_least)
    parts = slice(0, cut), slice(cut, len(logs))
    own = min(float(is_like[part, part].any(axis=1).mean()) for part in parts)
    common = sum(float(is_like[one, other].any(axis=1).mean()) for one, other in (parts, parts[::-1])) / 2
    if own < _MIN_LIKE or common > _MAX_COMMON:
        return None
    shift = _shift(logs[:cut], logs[cut:], least=float(np.log1p(limits.change_share)))
    return None if shift is None else LevelShift(int(chosen[cut]), float(np.exp(shift)))


def _cut(is_like: Array, n_least: int) -> int:
    """The number of steps before the cut across which the fewest steps have a similar length."""
    n = len(is_like)
    number, has_like = np.arange(n), is_like.any(axis=1)
    first = np.where(has_like, is_like.argmax(axis=1), n)
    last = np.where(has_like, n - 1 - is_like[:, ::-1].argmax(axis=1), -1)
    cuts = np.arange(n_least, n - n_least + 1)
    after = ((first < cuts[:, None]) & (number >= cuts[:, None])).sum(axis=1) / (n - cuts)
    before = ((last >= cuts[:, None]) & (number < cuts[:, None])).sum(axis=1) / cuts
    return int(cuts[np.argmin(np.maximum(before, after))])


def _shift(before: Array, after: Array, *, least: float) -> float | None:
    """The logarithm of the factor by which most later steps are longer than earlier steps; None without one.

    Most earlier steps must occur later with this factor: the steps of a job that becomes faster may be longer than a
    few short steps at its start.
    """
    shifts = np.arange(least, np.log(_MAX_FACTOR), _FACTOR_STEP)
    if not len(shifts):  # the smallest change that counts is larger than any that is searched for
        return None
    apart = after[:, None] - before
    is_like = [np.abs(apart - shift) <= _LIKE for shift in shifts.tolist()]
    shares = np.array([each.any(axis=1).mean() for each in is_like])
    shifted = np.array([each.any(axis=0).mean() for each in is_like])
    shares[shifted < _MIN_SHIFTED] = 0.0
    best = shares >= max(float(shares.max()), _MIN_LIKE)
    return float(np.median(shifts[best])) if best.any() else None
