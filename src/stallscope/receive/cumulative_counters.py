"""Cumulative counters: the growth since the previous point, with resets detected.

State is kept for a bounded number of recently updated series. A series is known by the digest of its identity, so
long attributes take no memory, and the tenant with the most series loses its oldest series first. A repeated point (a
retry) gets the same answer as the first time.
"""

import hashlib
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


def digest(*texts: str) -> bytes:
    """A short key of an identity."""
    hashed = hashlib.blake2b(digest_size=16)
    for text in texts:
        hashed.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return hashed.digest()


class Series:
    """The last points of cumulative series, by tenant and digest. Thread-safe."""

    def __init__(self, most: int = MAX_SERIES):
        self._most, self._n = most, 0
        self._lock = threading.Lock()
        self._of: dict[str, OrderedDict[bytes, _Point]] = {}

    def growth(
        self, tenant: str, key: bytes, *, ts_ns: int, start_ns: int, value: float, is_monotonic: bool
    ) -> CounterIncrease:
        """The growth of the counter. start_ns: 0 if the sender does not report when counting began."""
        with self._lock:
            of_tenant = self._of.setdefault(tenant, OrderedDict())
            last = of_tenant.get(key)
            is_again = last is not None and last.ts_ns == ts_ns
            before = last.before if last is not None and is_again else last
            if last is not None and ts_ns < last.ts_ns:
                return CounterIncrease(None, False)
            point = _Point(
                ts_ns, start_ns, value, before and _Point(before.ts_ns, before.start_ns, before.value)
            )
            self._n += key not in of_tenant
            of_tenant[key] = point
            of_tenant.move_to_end(key)
            while self._n > self._most:
                max(self._of.values(), key=len).popitem(last=False)
                self._n -= 1
        if before is None:
            return CounterIncrease(None, False)
        began_anew = bool(start_ns and before.start_ns and start_ns > before.ts_ns)
        if began_anew or (is_monotonic and value < before.value):
            return CounterIncrease(value, True)
        return CounterIncrease(value - before.value, False)
