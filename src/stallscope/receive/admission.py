"""Bounds on the requests in flight: their number, and their bytes, in total and for each tenant.

A tenant never has more than three quarters of a bound, so the requests of one tenant cannot shut out another tenant.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from stallscope.errors import Overloaded

_TENANT_SHARE = 0.75


class SharedLimit:
    """A bounded quantity that requests hold while they are in flight. Thread-safe."""

    def __init__(self, total: int, name: str):
        """name: the quantity, as shown in error messages."""
        self._total, self._name = total, name
        self._of_tenant = max(1, int(total * _TENANT_SHARE))
        self._held: Counter[str] = Counter()
        self._changed = threading.Condition()

    def take(self, tenant: str, n: int = 1, *, patience_s: float = 0.0) -> None:
        """Hold n until give(). patience_s: longest wait for room. Raises Overloaded."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(tenant, n), timeout=patience_s):
                raise Overloaded(f"the hub has no room for more {self._name}; send again later", 1.0)
            self._held[tenant] += n

    def give(self, tenant: str, n: int = 1) -> None:
        """Release the quantity that take() held."""
        with self._changed:
            self._held[tenant] -= n
            if not self._held[tenant]:
                del self._held[tenant]
            self._changed.notify_all()

    @contextmanager
    def held(self, tenant: str, n: int = 1, *, patience_s: float = 0.0) -> Iterator[None]:
        """take() and give() around the with block."""
        self.take(tenant, n, patience_s=patience_s)
        try:
            yield
        finally:
            self.give(tenant, n)

    @property
    def n_held(self) -> int:
        """The quantity that all tenants hold now."""
        with self._changed:
            return self._held.total()

    def _has_room(self, tenant: str, n: int) -> bool:
        held = self._held
        return not held or (
            held.total() + n <= self._total and (not held[tenant] or held[tenant] + n <= self._of_tenant)
        )
