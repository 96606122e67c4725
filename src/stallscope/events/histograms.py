"""Histograms of lengths as JSON text: {"upper edge in us": n}. Each edge is 2^(1/8), 9 %, above the edge before.

So a percentile is at most 9 % too large. A wide histogram has coarser edges, because its text must fit its column.
"""

import json
from collections import Counter
from collections.abc import Iterable

import numpy as np

from stallscope.events.layout import Array

STEPS_PER_DOUBLING = 8
PERCENTS = (50, 90, 99, 99.9)
Percentiles = dict[str, float]
"""Times in ms by name: p50, p90, p99, p99.9; empty without values."""

_MIN_US, _MAX_BYTES = 1.0, 2000


def histogram(lengths_ns: Array) -> bytes:
    """The histogram of lengths (n,)."""
    numbers, n = np.unique(_numbers(lengths_ns / 1e3), return_counts=True)
    return _text(dict(zip(numbers.tolist(), n.tolist(), strict=True)))


def joined(texts: Iterable[bytes | str | None]) -> Counter[int]:
    """The counts of several histograms, by upper edge in us."""
    counts = Counter[int]()
    for text in texts:
        for edge, n in json.loads(text or b"{}").items():
            counts[int(edge)] += int(n)
    return counts


def text_of(counts: Counter[int]) -> bytes:
    """The histogram with these counts by upper edge."""
    by_number = Counter[int]()
    for number, n in zip(_numbers(np.array(list(counts), float)).tolist(), counts.values(), strict=True):
        by_number[number] += n
    return _text(dict(sorted(by_number.items())))


def percentiles_ms(counts: Counter[int]) -> Percentiles:
    """Percentiles: the smallest edge that at least this share of the values does not exceed."""
    if not counts:
        return {}
    edges = np.array(sorted(counts))
    upto = np.cumsum([counts[edge] for edge in edges.tolist()])
    needed = [np.ceil(percent / 100 * upto[-1]) for percent in PERCENTS]
    values = [edges[np.searchsorted(upto, each)] / 1e3 for each in needed]
    return {f"p{percent:g}": round(float(value), 3) for percent, value in zip(PERCENTS, values, strict=True)}


def _numbers(lengths_us: Array) -> Array:
    """The number of each length's edge. An edge is rounded up, so its logarithm may exceed its number slightly."""
    exact = np.log2(np.maximum(lengths_us, _MIN_US)) * STEPS_PER_DOUBLING
    numbers = np.ceil(exact).astype(np.int64)
    is_edge = np.ceil(2.0 ** ((numbers - 1) / STEPS_PER_DOUBLING)) == lengths_us
    return np.where(is_edge, numbers - 1, numbers)


def _text(counts: dict[int, int], steps: int = STEPS_PER_DOUBLING) -> bytes:
    edges = Counter[int]()
    for number, n in counts.items():
        edges[int(np.ceil(2.0 ** (np.ceil(number * steps / STEPS_PER_DOUBLING) / steps)))] += n
    text = json.dumps({str(edge): n for edge, n in edges.items()}, separators=(",", ":")).encode()
    return text if len(text) <= _MAX_BYTES or steps == 1 else _text(counts, steps // 2)
