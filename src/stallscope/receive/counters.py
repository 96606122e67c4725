"""Counters of the receivers, as plain numbers for /metrics."""

import threading
from collections import Counter


class Counters:
    """Totals since the start, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()

    def add(self, **numbers: int) -> None:
        """Add to the numbers of these names."""
        with self._lock:
            self._numbers.update(numbers)

    def read(self) -> dict[str, int]:
        """All non-zero counters."""
        with self._lock:
            return dict(self._numbers)
