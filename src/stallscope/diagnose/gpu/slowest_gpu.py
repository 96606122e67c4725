"""GPUs that are among the slowest of a step again and again, also where the work of a step differs between ranks.

Work that is drawn anew for each rank and step (lengths of sequences, of answers) varies by more than the slowness of a
GPU, so single steps do not show it. Its order among the GPUs of a step does: without a slow GPU each order is as likely
as every other order, whatever the distribution of the work. Work that stays with a rank for some steps (a hot expert)
makes successive orders similar, so they count as fewer independent steps.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.timeline.step_table import Cells
from stallscope.events.layout import Array

_FEWEST_GPUS = 4
_FEWEST_STEPS = 16
_CUT_EVERY = 2  # steps between two beginnings of the slowness that are tried
_DEVIATIONS = 5.5  # standard deviations of a mean order, for any of hundreds of GPUs and beginnings
_MIN_SLOWER = 0.1  # share of its own work by which a GPU is slower: GPUs of a model differ by up to 3 %
_MAX_MEMORY = 0.99
_OF_ORDER = 12.0**0.5  # 1 / standard deviation of a uniform order


@dataclass(frozen=True)
class SlowSince:
    """cells: int64 (k,), the steps of a GPU since it is slow. share: the median share of its work that is excess."""

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
    """The GPUs that are among the slowest in most steps from some step on, by process.

    own_ns, excess_ns: float64 (c,), by cell, the work of a GPU and its excess over its peers'. order_by: float64 (c,),
    their order, the slowest last. explained: process and step of cells that are no evidence about GPUs.
    """
    steps, at = np.unique(table.step, return_inverse=True)
    n = int(table.process.max(initial=-1)) + 1
    value, cell_of = np.full((n, len(steps)), np.nan), np.full((n, len(steps)), -1)
    value[table.process, at], cell_of[table.process, at] = order_by, np.arange(len(at))
    for process, step in explained:
        if process < n:
            value[process, steps == step] = np.nan
    is_known = np.isfinite(value) & (own_ns[cell_of] > 0)
    n_known = is_known.sum(axis=0)
    order = np.where(is_known, value, np.inf).argsort(axis=0).argsort(axis=0)
    order = np.where(
        is_known & (n_known >= _FEWEST_GPUS), (order + 0.5) / np.maximum(n_known, 1) - 0.5, np.nan
    )
    memory_of_all = _memory(order)
    found = {}
    for process in range(n):
        here = np.flatnonzero(np.isfinite(order[process]))
        begin = _beginning(order[process, here], memory_of_all)
        if begin is None:
            continue
        cells = cell_of[process, here[begin:]]
        share = float(np.median(excess_ns[cells] / np.maximum(own_ns[cells], 1.0)))
        if share >= _MIN_SLOWER:
            found[process] = SlowSince(cells, share)
    return found


def _beginning(order: Array, memory_of_all: float) -> int | None:
    """The step from which on the mean order deviates most from 0; None where it deviates too little."""
    starts = range(0, len(order) - _FEWEST_STEPS + 1, _CUT_EVERY)
    deviations = [_deviation(order[start:], memory_of_all) for start in starts]
    best = int(np.argmax(deviations)) if deviations else 0
    return starts[best] if deviations and deviations[best] >= _DEVIATIONS else None


def _deviation(order: Array, memory_of_all: float) -> float:
    """The mean of some orders, in its standard deviations without a slow GPU."""
    memory = max(_memory(order[None]) - len(order) ** -0.5, memory_of_all, 0.0)
    memory = min(memory, _MAX_MEMORY)
    return float(order.mean()) * _OF_ORDER * (len(order) * (1.0 - memory) / (1.0 + memory)) ** 0.5


def _memory(order: Array) -> float:
    """The correlation of successive orders of a GPU, over all GPUs: (gpus, steps), NaN where unknown."""
    known = np.isfinite(order).sum(axis=1) > 1
    apart = order[known] - np.nanmean(order[known], axis=1, keepdims=True)
    squares = float(np.nansum(apart * apart))
    return float(np.nansum(apart[:, 1:] * apart[:, :-1])) / max(squares, 1e-9)
