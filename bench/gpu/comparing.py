"""Statistics of the slowdown: compares steps with and without probes, in alternating windows.

At each switch, the half window before is compared with the half window after. A drift of the machine increases the
result of one kind of switch and decreases the other, so it cancels out. The agent keeps running (switching.py), so the
windows are short. The result is Huber's mean of the comparisons, which outliers hardly affect. Its 95 % interval comes
from Student's t and grows with the correlation of neighbours, which share a window.

A virtual CPU takes twice as long for seconds while another virtual machine uses its second hyperthread; the CPUs change
independently of each other. Where a job measures its CPU's speed between two steps, the steps without probes give the
step time by speed, and each step is converted to one speed. Jobs that run at the same time are compared each with
itself, and a job counts less where it scatters more. A governor has high-frequency probes on for a part of the time.
That part is known for each window, and the mean is converted to the average part.
"""

import math
import warnings
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from running import Failed
from switching import Turn

from stallscope.capture.probes.operations import BUDGETED

SETTLE_S = 0.1
"""After a switch, before a window begins."""
_MAX_SPEEDS, _STEPS_A_SPEED, _MIN_STEPS = 8, 40, 10
"""Classes of speeds before and after a step, steps without probes for each pair of classes on average, and at least."""
_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12)
_T_975_MANY = 2.10
_HUBER = 1.345
"""Standard deviations from which on a comparison weighs less: 95 % as sharp as the mean where all is normal."""
_N_FITS = 30
_MAX_ALIKE, _MIN_KNOWN = 0.5, 40
"""The correlation of neighbours that differ by whole windows only; used if there are too few comparisons."""
_NORMAL_MAD = 1.4826


class Window(NamedTuple):
    """A time in which nothing was switched (monotonic ns), and whether the agent traced in it."""

    begin_ns: int
    end_ns: int
    is_on: bool

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.begin_ns) / 1e9


class Interval(NamedTuple):
    """A mean and half the width of its 95 % interval, in per cent."""

    mean: float
    half: float


class Steps(NamedTuple):
    """Steps of a rank, at whose ends it had waited for the GPU, and so for all: int64, int64, float64 (n,).

    length_ns: of one step, of those up to this end.
    """

    number: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    length_ns: NDArray[np.float64]


def at_one_speed(steps: Steps, turn_ns: NDArray[np.float64], windows: list[Window]) -> Steps:
    """The steps as if the CPU had been equally fast before and after all of them. turn_ns: measured after each.

    A step is divided by the median of the steps without probes at the same speeds before and after. A CPU changes
    between two speeds, also within a step, so no smooth function of the speeds fits. Steps at speeds that hardly occur
    without probes are left out.
    """
    n = min(len(turn_ns), len(steps.number))
    number, end_ns, length_ns = (window[1:n] for window in steps)
    is_off = np.zeros(len(number), bool)
    for window in windows:
        is_off |= (not window.is_on) & (end_ns >= window.begin_ns) & (end_ns <= window.end_ns)
    n_speeds = int(np.clip((is_off.sum() / _STEPS_A_SPEED) ** 0.5, 1, _MAX_SPEEDS))
    bounds = np.quantile(turn_ns, np.linspace(0, 1, n_speeds + 1)[1:-1])
    speed = np.digitize(turn_ns, bounds)
    pair = speed[number - 1] * n_speeds + speed[number]
    median_ns = np.full(n_speeds**2, math.nan)
    for each in range(n_speeds**2):
        alike_ns = length_ns[is_off & (pair == each)]
        if len(alike_ns) >= min(_MIN_STEPS, is_off.sum()):
            median_ns[each] = np.median(alike_ns)
    length_ns = length_ns / median_ns[pair] * np.nanmedian(median_ns)
    is_known = ~np.isnan(length_ns)
    return Steps(number[is_known], end_ns[is_known], length_ns[is_known])


def mean_step_ns(window: Window, ranks: list[Steps]) -> float:
    """Mean ns of a step of all ranks that are compared; nan where none has a whole step."""
    each_ns = [entry for steps in ranks if not math.isnan(entry := step_ns(window, steps))]
    return fmean(each_ns) if each_ns else math.nan


def step_ns(window: Window, steps: Steps) -> float:
    """Mean ns of a step inside the window; nan with fewer than two ends of steps."""
    inside = steps.length_ns[(steps.end_ns >= window.begin_ns) & (steps.end_ns <= window.end_ns)]
    return float(inside[1:].mean()) if len(inside) > 1 else math.nan


def halves(windows: list[Window]) -> tuple[list[Window], list[Window]]:
    """The half windows before and after each switch."""
    middle_ns = [(window.begin_ns + window.end_ns) // 2 for window in windows]
    before = [window._replace(begin_ns=ns) for window, ns in zip(windows[:-1], middle_ns[:-1], strict=True)]
    after = [window._replace(end_ns=ns) for window, ns in zip(windows[1:], middle_ns[1:], strict=True)]
    return before, after


def estimates(windows: list[Window], ranks: list[Steps]) -> NDArray[np.float64]:
    """Per cent by which a step with hooks is longer than one without, at each switch: (windows - 1,).

    The mean of the ranks that are compared, of each that has whole steps on both sides; nan where none has.
    """
    before, after = (
        np.log(np.array([[step_ns(window, steps) for window in side] for steps in ranks]))
        for side in halves(windows)
    )
    longer = (after - before) * [1 if window.is_on else -1 for window in windows[1:]]
    return np.asarray(100 * np.expm1(_mean_of_ranks(longer)))


def _mean_of_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over the ranks (first axis); nan where no rank has a value.

    A rank weighs less if it scatters more around the median of all ranks, and its outliers are limited: the CPU of one
    rank may change its speed at any switch.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a switch, or a rank, without any value
        middle = np.nanmedian(values, axis=0)
        apart = values - middle
        scale = np.maximum(_NORMAL_MAD * np.nanmedian(np.abs(apart), axis=1, keepdims=True), 1e-9)
        limited = np.clip(apart, -_HUBER * scale, _HUBER * scale)
        weight = np.where(np.isnan(limited), 0, scale**-2)
        return np.asarray(middle + np.nansum(limited * weight, axis=0) / weight.sum(axis=0))


def on_shares(turns: list[Turn], windows: list[Window]) -> NDArray[np.float64]:
    """For which share of each window each governed group was on: (windows, groups). At first all are."""
    result = np.ones((len(windows), len(BUDGETED)))
    for at, group in enumerate(BUDGETED):
        of = [
            (0, True),
            *((turn.at_ns, turn.is_on) for turn in turns if turn.group == group),
            (1 << 62, True),
        ]
        for row, turn in enumerate(windows):
            off_ns = sum(
                max(0, min(until_ns, turn.end_ns) - max(since_ns, turn.begin_ns))
                for (since_ns, is_on), (until_ns, _) in pairwise(of)
                if not is_on
            )
            result[row, at] -= off_ns / (turn.end_ns - turn.begin_ns)
    return result


def mean_of_group(values: NDArray[np.float64]) -> Interval:
    """The mean of independent values and its 95 % interval, by Student's t."""
    half = _t_975(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(float(values.mean()), half)


def difference_of_groups(values: NDArray[np.float64], base: NDArray[np.float64]) -> Interval:
    """The difference of two means and its 95 % interval, by Student's t with the common variance of both groups."""
    free = len(values) + len(base) - 2
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in (values, base))
    half = _t_975(free) * math.sqrt(squares / free * (1 / len(values) + 1 / len(base)))
    return Interval(float(values.mean() - base.mean()), half)


def _t_975(free: int) -> float:
    """The 97.5 % quantile of Student's t."""
    return _T_975[free - 1] if free <= len(_T_975) else _T_975_MANY


class Found(NamedTuple):
    """Comparisons: per cent (n,), share of the time with each group on (n, k), and that share overall (k,)."""

    percent: NDArray[np.float64]
    shares: NDArray[np.float64]
    whole: NDArray[np.float64]


def found_in(windows: list[Window], ranks: list[Steps], turns: list[Turn]) -> Found:
    """The comparisons at switches that have whole steps on both sides."""
    percent = estimates(windows, ranks)
    is_known = ~np.isnan(percent)
    before, after = halves(windows)
    traced = [b if b.is_on else a for b, a in zip(before, after, strict=True)]
    settled = [
        window._replace(begin_ns=window.begin_ns - int(SETTLE_S * 1e9)) for window in windows if window.is_on
    ]
    return Found(
        percent[is_known], on_shares(turns, traced)[is_known], on_shares(turns, settled).mean(axis=0)
    )


def interval(result: Found, *, shares_windows: bool = True) -> Interval:
    """Mean and 95 % interval: where a line through the comparisons (Huber's, as many columns as differ at all) has the
    shares of the whole. Huber, Robust Statistics (1981), 7.6. shares_windows: neighbours have a window in common.
    """
    n = len(result.percent)
    columns = [entry for entry in (result.shares - result.whole).T if np.ptp(entry) > 0]
    design = np.column_stack([np.ones(n), *columns])
    free = n - design.shape[1]
    if free < 1:
        return Interval(float(result.percent.mean()) if n else math.nan, math.nan)
    weight = np.ones(n)
    for _ in range(_N_FITS):
        root = np.sqrt(weight)
        fit = np.linalg.lstsq(design * root[:, None], result.percent * root, rcond=None)[0]
        rest = result.percent - design @ fit
        scale = max(_NORMAL_MAD * float(np.median(np.abs(rest))), 1e-12)
        weight = 1 / np.maximum(np.abs(rest) / (_HUBER * scale), 1)
    is_near, pull = np.abs(rest) <= _HUBER * scale, weight * rest
    variance = (pull**2).sum() / free / is_near.mean() ** 2 * np.linalg.pinv(design.T @ design)[0, 0]
    alike = float(pull[1:] @ pull[:-1] / max((pull**2).sum(), 1e-12)) if n >= _MIN_KNOWN else _MAX_ALIKE
    if shares_windows or n >= _MIN_KNOWN:
        variance *= 1 + 2 * min(max(alike, 0), _MAX_ALIKE)
    return Interval(float(fit[0]), _t_975(free) * math.sqrt(variance))


def slowdown(windows: list[Window], ranks: list[Steps], turns: list[Turn]) -> dict[str, Any]:
    """The slowdown and its comparisons. Raises Failed with fewer than two comparisons."""
    known = found_in(windows, ranks, turns)
    result = [float(window) for window in known.percent]
    if len(result) < 2:
        raise Failed(f"only {len(result)} of {len(windows) - 1} switches have whole steps on both sides")
    mean, half = interval(known)
    off_ns = [mean_step_ns(window, ranks) for window in windows if not window.is_on]
    return {
        "slowdown_percent": round(mean, 3),
        "spread_percent": round(half, 3),
        "upper_bound_percent": round(mean + half, 3),
        "median_percent": round(median(result), 3),
        "runs": len(result),
        "slowdown_us_per_step": round(mean / 100 * float(np.nanmedian(off_ns)) / 1e3, 2),
        "steps_per_s": round(1e9 / float(np.nanmedian(off_ns)), 2),
        "on_share": dict(
            zip((group.name.lower() for group in BUDGETED), known.whole.round(4).tolist(), strict=True)
        ),
        "each_percent": [round(window, 3) for window in result],
        "off_step_ms": [round(window / 1e6, 4) for window in off_ns],
    }


def pooled(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of a workload as one: the slowdown is their mean, weighted by 1 / spread^2.

    runs: results of slowdown() with further fields. Lists are joined, other numbers are means weighted by comparisons,
    and `of` has the result of each run.
    """
    if len(runs) == 1:
        return runs[0]
    weight = np.array([run["spread_percent"] ** -2 for run in runs])
    mean = float(np.average([run["slowdown_percent"] for run in runs], weights=weight))
    half = float(weight.sum() ** -0.5)
    return {
        **_together(runs, [run["runs"] for run in runs]),
        "slowdown_percent": round(mean, 3),
        "spread_percent": round(half, 3),
        "upper_bound_percent": round(mean + half, 3),
        "runs": sum(run["runs"] for run in runs),
        "of": [{key: run[key] for key in ("slowdown_percent", "spread_percent", "runs")} for run in runs],
    }


def _together(values: list[Any], n: list[int]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _together([entry[key] for entry in values], n) for key in first}
    if isinstance(first, list):
        return [entry for value in values for entry in value] if isinstance(first[0], float) else first
    if isinstance(first, float):
        return round(float(np.average(values, weights=n)), 3)
    return first
