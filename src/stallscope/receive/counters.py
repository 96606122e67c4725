"""What the receivers count, as plain numbers for /metrics."""

import threading
from collections import Counter


class Counters:
    """Numbers since the start, by name. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()

    def add(self, **numbers: int) -> None:
        """Add to the numbers of these names."""
        with self._lock:
            self._numbers.update(numbers)

    def read(self) -> dict[str, int]:
        """All numbers that are not zero."""
        with self._lock:
            return dict(self._numbers)
