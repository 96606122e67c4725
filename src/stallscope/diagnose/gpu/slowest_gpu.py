"""GPUs that are among the slowest of a step again and again, where the work of a step differs between ranks.

Work of random size in each rank and step (lengths of sequences or answers) varies by more than the slowness of a GPU,
so single steps do not show a slow GPU. The order of the GPUs in each step shows it: without a slow GPU each order is as
likely as every other order, for any distribution of the work. Work that stays with a rank for some steps (a hot expert)
makes successive orders similar, so they count as fewer independent steps.

A GPU that is slow at times is the slowest in more steps than chance allows, and not slow in most steps.

A rank with more work in most steps looks like a slow GPU, so such a GPU is not named.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.lateness.recurrence import beyond_chance
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.events.layout import Array

_FEWEST_GPUS = 4
_FEWEST_STEPS = 16
_DEVIATIONS = 4.5
"""Standard deviations of a mean order, for any GPU and beginning: one job in 2,000 by chance."""
_CHANCE = 1e-4  # that a GPU is the slowest this often: low, since successive steps may have similar work
_FROM_END = 0.75  # GPUs from the end of the order: the slowest is at 0.5, two equal GPUs are at 1.0
_MIN_SLOWER = 0.1  # share of its own work by which a GPU is slower: GPUs of a model differ by up to 3 %
_SIMILAR = 0.04  # share of a step's typical work by which two GPUs may differ by manufacture
_MAX_MEMORY = 0.99
_OF_ORDER = 12.0**0.5  # 1 / standard deviation of a uniform order


@dataclass(frozen=True)
class SlowSince:
    """cells: int64 (k,), the steps of a GPU since it is slow, or in which it is the slowest if it is slow at times.
    share: the median share of its work that is excess.
    """

    cells: Array
    share: float


def slow_since(
    table: Cells,
    own_ns: Array,
    excess_ns: Array,
    *,
    order_by: Array,
    explained: Collection[tuple[int, int]],
) -> dict[int, SlowSince]:
    """The GPUs that are among the slowest in most steps from some step on, or the slowest in many steps, by process.

    own_ns, excess_ns: float64 (c,), by cell, the work of a GPU and its excess over its peers'. order_by: float64 (c,),
    their order, the slowest last. explained: process and step of the cells that hosts explain.
    """
    steps, at = np.unique(table.step, return_inverse=True)
    n = int(table.process.max(initial=-1)) + 1
    value, cell_of = np.full((n, len(steps)), np.nan), np.full((n, len(steps)), -1)
    value[table.process, at], cell_of[table.process, at] = order_by, np.arange(len(at))
    for process, step in explained:
        if process < n:
            value[process, steps == step] = np.nan
    value[own_ns[cell_of] <= 0] = np.nan
    order = np.full(value.shape, np.nan)
    for step in range(len(steps)):
        here = np.flatnonzero(np.isfinite(value[:, step]))
        if len(here) >= _FEWEST_GPUS:
            similar_ns = _SIMILAR * float(np.median(own_ns[cell_of[here, step]]))
            order[here, step] = _order(value[here, step], similar_ns)
    found: dict[int, SlowSince] = {}
    for is_late in (_late_since(order), _slowest_at_times(order)):
        for process in np.flatnonzero(is_late.any(axis=1)).tolist():
            cells = cell_of[process, is_late[process]]
            share = float(np.median(excess_ns[cells] / np.maximum(own_ns[cells], 1.0)))
            if share >= _MIN_SLOWER:
                found.setdefault(process, SlowSince(cells, share))
    return found


def _late_since(order: Array) -> Array:
    """The steps of each GPU since it is among the slowest: bool (processes, steps). order: see _beginnings()."""
    is_late = np.zeros(order.shape, bool)
    for process, begin in _beginnings(order).items():
        is_late[process, begin:] = np.isfinite(order[process, begin:])
    return is_late


def _slowest_at_times(order: Array) -> Array:
    """The steps in which each GPU is the slowest, of GPUs that are the slowest in more steps than chance allows: bool
    (processes, steps). order: see _beginnings().
    """
    n, is_slowest = len(order), np.zeros(order.shape, bool)
    if order.shape[1] < _FEWEST_STEPS or n < _FEWEST_GPUS:
        return is_slowest
    known = np.isfinite(order)
    is_slowest[known] = order[known] >= 0.5 - _FROM_END / n
    apart = np.where(known, is_slowest - 1.0 / n, 0.0)
    both, alone = (apart[:, 1:] * apart[:, :-1]).sum(axis=1), (apart * apart).sum(axis=1)
    counts = is_slowest.sum(axis=1)
    for process in range(n):
        # The steps of a GPU that is slow at times resemble each other, so the memory is taken from the others.
        memory = np.delete(both, process).sum() / max(float(np.delete(alone, process).sum()), 1e-9)
        memory = float(np.clip(memory + (1.0 + 3.0 * memory) / order.shape[1], 0.0, _MAX_MEMORY))
        independent = np.floor(counts * (1.0 - memory) / (1.0 + memory)).astype(np.int64)
        if not beyond_chance(int(independent[process]), np.delete(independent, process), _CHANCE):
            is_slowest[process] = False
    return is_slowest


def _order(value: Array, similar: float) -> Array:
    """The order of each value among all: -0.5 for the least, 0.5 for the largest; 0 where all are similar."""
    ranked = np.sort(value)
    n_less = np.searchsorted(ranked, value - similar, side="left")
    n_more = len(value) - np.searchsorted(ranked, value + similar, side="right")
    return np.asarray((n_less - n_more) / (2.0 * len(value)))


def _beginnings(order: Array) -> dict[int, int]:
    """By process, the step from which on its mean order deviates most from 0, if it deviates enough.

    order: float64 (processes, steps), NaN where unknown.
    """
    if order.shape[1] < _FEWEST_STEPS:
        return {}
    known = np.isfinite(order)
    value, n_steps = np.where(known, order, 0.0), _from(known.astype(np.float64))
    mean = _from(value) / np.maximum(n_steps, 1.0)
    own = _memory(value, known, mean, n_steps)
    apart = np.where(known, value - mean[:, :1], 0.0)
    of_all = float((apart[:, 1:] * apart[:, :-1]).sum()) / max(float((apart * apart).sum()), 1e-9)
    of_all += (1.0 + 3.0 * of_all) / order.shape[1]  # a sample underestimates it
    memory = np.clip(np.maximum(own - np.maximum(n_steps, 1.0) ** -0.5, of_all), 0.0, _MAX_MEMORY)
    deviation = mean * _OF_ORDER * (n_steps * (1.0 - memory) / (1.0 + memory)) ** 0.5
    deviation[n_steps < _FEWEST_STEPS] = -np.inf
    best = deviation.argmax(axis=1)
    is_slow = deviation[np.arange(len(best)), best] >= _DEVIATIONS
    return {process: int(best[process]) for process in np.flatnonzero(is_slow).tolist()}


def _memory(value: Array, known: Array, mean: Array, n_steps: Array) -> Array:
    """The correlation of successive orders of a GPU from each step on: float64 (processes, steps)."""
    both = np.zeros(value.shape)
    both[:, :-1] = known[:, :-1] & known[:, 1:]
    following = np.zeros(value.shape)
    following[:, :-1] = value[:, 1:]
    products = (
        _from(both * value * following) - mean * _from(both * (value + following)) + mean**2 * _from(both)
    )
    squares = _from(value * value) - n_steps * mean**2
    return np.asarray(products / np.maximum(squares, 1e-9))


def _from(value: Array) -> Array:
    """The sum of a value over each step and all later steps: (processes, steps)."""
    return np.asarray(value[:, ::-1].cumsum(axis=1)[:, ::-1])
