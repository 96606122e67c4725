"""The current value of every metric: written by the agent's loop, read by the exporters' threads.

Counters and histograms grow from `start_wall_ns`, the start of the agent; a reader detects a restart by a new
`start_wall_ns`. The number of series of one metric is bounded: the excess is summed in one more series.
"""

import math
import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from stallscope.events.layout import Array
from stallscope.exporters.metric_table import Kind, Metric

MAX_SERIES = 512
"""The bound for one metric: well above a node's ranks times operations, and low enough to stop a leak of names."""

OVERFLOW = "otel.metric.overflow"
"""The attribute of the excess series, as in the OpenTelemetry SDK."""

Values = tuple[str, ...]

NATIVE_SCHEMA = 3
"""Of native histograms: 2^3 buckets for each doubling, the same as in events/histograms.py."""


@dataclass
class Histogram:
    """Counts by bucket (the number of bounds plus 1), and the sum of all values.

    native: counts by exponential bucket: number i has the values above 2^((i - 1) / 8), up to 2^(i / 8). n_zero: values
    of 0 and less.
    """

    counts: list[int]
    total: float = 0.0
    native: Counter[int] = field(default_factory=Counter)
    n_zero: int = 0

    @property
    def n(self) -> int:
        """The number of values."""
        return sum(self.counts)


@dataclass(frozen=True)
class Series:
    """One series of numbers. values: of the metric's attributes; None: the excess series."""

    values: Values | None
    number: float = 0.0
    histogram: Histogram | None = None


@dataclass
class Meter:
    """All metrics. Numbers that are not finite are dropped, because backends disagree on them.

    boot_wall_ns: the time from which the machine's own counters grow; 0 unknown.
    """

    start_wall_ns: int
    boot_wall_ns: int = 0
    _numbers: dict[str, dict[Values | None, float]] = field(default_factory=dict)
    _histograms: dict[str, dict[Values | None, Histogram]] = field(default_factory=dict)
    _metrics: dict[str, Metric] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, metric: Metric, by: float, *values: str) -> None:
        """Increase a counter. Raises ValueError for a negative step."""
        if by < 0 and metric.kind is Kind.COUNTER:
            raise ValueError(f"{metric.name} is a counter, which cannot decrease")
        with self._lock:
            numbers = self._numbers.setdefault(metric.name, {})
            key = self._key(metric, values, numbers)
            if math.isfinite(by):
                numbers[key] = numbers.get(key, 0.0) + by

    def set(self, metric: Metric, value: float, *values: str) -> None:
        """Set the current value; for a counter, its new total."""
        with self._lock:
            numbers = self._numbers.setdefault(metric.name, {})
            key = self._key(metric, values, numbers)
            if math.isfinite(value):
                numbers[key] = value

    def replace(self, metric: Metric, numbers: dict[Values, float]) -> None:
        """Replace all series of a gauge; series missing from `numbers` end."""
        with self._lock:
            self._metrics[metric.name] = metric
            finite = {values: number for values, number in numbers.items() if math.isfinite(number)}
            self._numbers[metric.name] = dict(list(finite.items())[:MAX_SERIES])

    def observe(self, metric: Metric, observed: Array, *values: str) -> None:
        """Put values, in the metric's unit, into its buckets: each into the first whose bound is not below it."""
        observed = np.asarray(observed, np.float64)
        observed = observed[np.isfinite(observed)]
        if not len(observed):
            return
        self._put(metric, observed, np.ones(len(observed), np.int64), float(observed.sum()), values)

    def observe_counted(
        self, metric: Metric, observed: Array, counts: Array, total: float, *values: str
    ) -> None:
        """Put values with their counts into the buckets, for values known only by bucket. total: their sum."""
        if len(observed) and math.isfinite(total):
            self._put(metric, observed, counts, total, values)

    def _put(self, metric: Metric, observed: Array, counts: Array, total: float, values: Values) -> None:
        positions = np.searchsorted(metric.bounds, observed, side="left")
        is_positive = observed > 0
        native = Counter[int]()
        numbers = _native_buckets(observed[is_positive]).tolist()
        for number, n in zip(numbers, counts[is_positive].tolist(), strict=True):
            native[number] += n
        new = np.bincount(positions, counts, minlength=len(metric.bounds) + 1).astype(np.int64).tolist()
        with self._lock:
            known = self._histograms.setdefault(metric.name, {})
            key = self._key(metric, values, known)
            buckets = known.setdefault(key, Histogram([0] * (len(metric.bounds) + 1)))
            buckets.counts = [a + b for a, b in zip(buckets.counts, new, strict=True)]
            buckets.total += total
            buckets.native.update(native)
            buckets.n_zero += int(counts[~is_positive].sum())

    def since_wall_ns(self, metric: Metric) -> int:
        """The time from which a counter counts."""
        is_of_machine = metric.name.startswith("system.") and self.boot_wall_ns > 0
        return self.boot_wall_ns if is_of_machine else self.start_wall_ns

    def read(self) -> list[tuple[Metric, list[Series]]]:
        """All current values, by metric, in the order of first use."""
        with self._lock:
            return [(metric, self._series(name)) for name, metric in self._metrics.items()]

    def _series(self, name: str) -> list[Series]:
        numbers = [Series(values, number) for values, number in self._numbers.get(name, {}).items()]
        histograms = self._histograms.get(name, {}).items()
        return numbers + [
            Series(
                values,
                histogram=Histogram(
                    list(buckets.counts), buckets.total, Counter(buckets.native), buckets.n_zero
                ),
            )
            for values, buckets in histograms
        ]

    def _key(
        self,
        metric: Metric,
        values: Values,
        known: dict[Values | None, float] | dict[Values | None, Histogram],
    ) -> Values | None:
        if len(values) != len(metric.attributes):
            raise ValueError(f"{metric.name} has the attributes {metric.attributes}, not {values}")
        self._metrics[metric.name] = metric
        return values if values in known or len(known) < MAX_SERIES else None


def _native_buckets(observed: Array) -> Array:
    """The number of the exponential bucket of each positive value: int64 (n,)."""
    numbers: Array = np.ceil(np.log2(observed) * 2**NATIVE_SCHEMA).astype(np.int64)
    return numbers
