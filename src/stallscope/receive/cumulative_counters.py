"""Cumulative counters: how much each grew since its point before, with resets allowed for.

State is kept for the series seen last, a bounded number of them. A point that is sent again (a retry) gets the same
answer as the first time.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

MOST_SERIES = 200_000


class Growth(NamedTuple):
    """increase: None where there is no point before, or this one is older. is_reset: the counter began anew."""

    increase: float | None
    is_reset: bool


@dataclass
class _Point:
    ts_ns: int
    start_ns: int
    value: float
    before: "_Point | None" = None


class Series:
    """The last points of cumulative series, by any key. For any number of threads."""

    def __init__(self, most: int = MOST_SERIES):
        self._most = most
        self._lock = threading.Lock()
        self._last: OrderedDict[object, _Point] = OrderedDict()

    def growth(self, key: object, *, ts_ns: int, start_ns: int, value: float, is_monotonic: bool) -> Growth:
        """What the counter grew by. start_ns: 0 where the sender does not say since when it counts."""
        with self._lock:
            last = self._last.get(key)
            is_again = last is not None and last.ts_ns == ts_ns
            before = last.before if last is not None and is_again else last
            if last is not None and ts_ns < last.ts_ns:
                return Growth(None, False)
            point = _Point(
                ts_ns, start_ns, value, before and _Point(before.ts_ns, before.start_ns, before.value)
            )
            self._last[key] = point
            self._last.move_to_end(key)
            while len(self._last) > self._most:
                self._last.popitem(last=False)
        if before is None:
            return Growth(None, False)
        began_anew = bool(start_ns and before.start_ns and start_ns > before.ts_ns)
        if began_anew or (is_monotonic and value < before.value):
            return Growth(value, True)
        return Growth(value - before.value, False)
