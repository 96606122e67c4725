"""Cumulative counters: the growth since the previous point, with resets detected.

State is kept for a bounded number of recently updated series. A repeated point (a retry) gets the same answer as the
first time.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

MAX_SERIES = 200_000


class CounterIncrease(NamedTuple):
    """increase: None without an earlier point, or if this point is older. is_reset: the counter restarted."""

    increase: float | None
    is_reset: bool


@dataclass
class _Point:
    ts_ns: int
    start_ns: int
    value: float
    before: "_Point | None" = None


class Series:
    """The last points of cumulative series, by any key. Thread-safe."""

    def __init__(self, most: int = MAX_SERIES):
        self._most = most
        self._lock = threading.Lock()
        self._last: OrderedDict[object, _Point] = OrderedDict()

    def growth(
        self, key: object, *, ts_ns: int, start_ns: int, value: float, is_monotonic: bool
    ) -> CounterIncrease:
        """The growth of the counter. start_ns: 0 if the sender does not report when counting began."""
        with self._lock:
            last = self._last.get(key)
            is_again = last is not None and last.ts_ns == ts_ns
            before = last.before if last is not None and is_again else last
            if last is not None and ts_ns < last.ts_ns:
                return CounterIncrease(None, False)
            point = _Point(
                ts_ns, start_ns, value, before and _Point(before.ts_ns, before.start_ns, before.value)
            )
            self._last[key] = point
            self._last.move_to_end(key)
            while len(self._last) > self._most:
                self._last.popitem(last=False)
        if before is None:
            return CounterIncrease(None, False)
        began_anew = bool(start_ns and before.start_ns and start_ns > before.ts_ns)
        if began_anew or (is_monotonic and value < before.value):
            return CounterIncrease(value, True)
        return CounterIncrease(value - before.value, False)
