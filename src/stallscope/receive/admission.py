"""Bounds on the requests in flight: their number, and their bytes, in total and for each tenant.

A tenant never has more than three quarters of a bound, so the requests of one tenant cannot shut out another tenant.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from stallscope.errors import Overloaded

_TENANT_SHARE = 0.75


class _Signal(Protocol):
    """A threading.Event, or the same for a request that waits in an event loop."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class _Waiter:
    """A request that waits for room. has_room: set once it holds n."""

    n: int
    has_room: _Signal


class _LoopSignal:
    """Created and awaited in an event loop; set in any thread."""

    def __init__(self) -> None:
        self._loop, self._event, self._is_set = asyncio.get_running_loop(), asyncio.Event(), False

    def set(self) -> None:
        self._is_set = True
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._event.set)

    def is_set(self) -> bool:
        return self._is_set

    async def wait(self, timeout_s: float) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._event.wait()


class SharedLimit:
    """A bounded quantity that requests hold while they are in flight. Thread-safe.

    Requests that wait get room in order of arrival, and only these are woken: at hundreds of waiting requests, waking
    all of them for each free place would cost more than the requests.
    """

    def __init__(self, total: int, name: str):
        """name: the quantity, as shown in error messages."""
        self._total, self._name = total, name
        self._of_tenant = max(1, int(total * _TENANT_SHARE))
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._lock = threading.Lock()

    def take(self, tenant: str, n: int = 1, *, patience_s: float = 0.0) -> None:
        """Hold n until give(). patience_s: longest wait for room. Raises Overloaded."""
        with self._lock:
            if self._took(tenant, n):
                return
            if patience_s <= 0.0:
                raise self._overloaded()
            has_room = threading.Event()
            waiter = self._queued(tenant, n, has_room)
        if not has_room.wait(patience_s) and not self._has_left_with_room(tenant, waiter):
            raise self._overloaded()

    async def take_in_loop(self, tenant: str, n: int = 1, *, patience_s: float) -> None:
        """take() for a request in an event loop, without blocking the loop."""
        with self._lock:
            if self._took(tenant, n):
                return
            has_room = _LoopSignal()
            waiter = self._queued(tenant, n, has_room)
        try:
            await has_room.wait(patience_s)
        except TimeoutError:
            if not self._has_left_with_room(tenant, waiter):
                raise self._overloaded() from None
        except asyncio.CancelledError:
            if self._has_left_with_room(tenant, waiter):
                self.give(tenant, n)
            raise

    def _took(self, tenant: str, n: int) -> bool:
        if tenant in self._waiting or not self._has_room(tenant, n):
            return False
        self._held[tenant] += n
        return True

    def _queued(self, tenant: str, n: int, has_room: _Signal) -> _Waiter:
        waiter = _Waiter(n, has_room)
        self._waiting.setdefault(tenant, deque()).append(waiter)
        return waiter

    def _has_left_with_room(self, tenant: str, waiter: _Waiter) -> bool:
        """End the wait of a request; True if it got room at the last moment."""
        with self._lock:
            if waiter.has_room.is_set():
                return True
            self._leave(tenant, waiter)
            return False

    def give(self, tenant: str, n: int = 1) -> None:
        """Release the quantity that take() held."""
        with self._lock:
            self._held[tenant] -= n
            if not self._held[tenant]:
                del self._held[tenant]
            self._admit()

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
        with self._lock:
            return self._held.total()

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        """A request gives up; a smaller request behind it may have room."""
        waiters = self._waiting[tenant]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[tenant]
        self._admit()

    def _admit(self) -> None:
        """Give room to the requests that waited longest, one of each tenant in turn: a tenant that got room goes
        behind the others.
        """
        while (tenant := self._next_tenant()) is not None:
            waiters = self._waiting.pop(tenant)
            waiter = waiters.popleft()
            self._held[tenant] += waiter.n
            waiter.has_room.set()
            if waiters:
                self._waiting[tenant] = waiters

    def _next_tenant(self) -> str | None:
        """The first tenant with a waiting request for which there is room."""
        return next(
            (tenant for tenant, waiters in self._waiting.items() if self._has_room(tenant, waiters[0].n)),
            None,
        )

    def _overloaded(self) -> Overloaded:
        return Overloaded(f"the hub has no room for more {self._name}; send again later", 1.0)

    def _has_room(self, tenant: str, n: int) -> bool:
        held = self._held
        return not held or (
            held.total() + n <= self._total and (not held[tenant] or held[tenant] + n <= self._of_tenant)
        )
