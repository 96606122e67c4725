"""Small requests that wait at one time are decoded together.

Most of what decoding a small request takes does not depend on its size. Whoever comes first decodes what waits; what
arrives meanwhile waits for the next. So one sender alone never waits for others, and the groups grow with the load.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

SMALL_BYTES = 1 << 18
"""Larger requests are decoded alone: together they would not be quicker."""

_MOST_BYTES = 1 << 21  # of those that are decoded together
_MOST_REQUESTS = 64
_GATHER_S = 0.01
"""Where several came at one time before: of the answers that went out together the next requests come together."""

Request = TypeVar("Request")
Decoded = TypeVar("Decoded")


@dataclass(frozen=True)
class _Waiting(Generic[Request, Decoded]):
    request: Request
    n_bytes: int
    decoded: "Future[Decoded]" = field(default_factory=Future)


class Gathering(Generic[Request, Decoded]):
    """For any number of threads."""

    def __init__(
        self,
        alone: Callable[[Request, str], Decoded],
        together: Callable[[list[Request], str], list[Decoded] | None],
    ):
        """alone: from a request and its tenant to what it holds; together: the same of several of one tenant, None
        where each must be looked at by itself.
        """
        self._alone, self._together = alone, together
        self._changing, self._decoding = threading.Lock(), threading.Lock()
        self._n_last = 0
        self._waiting: dict[str, deque[_Waiting[Request, Decoded]]] = {}

    def decode(self, request: Request, tenant: str, *, n_bytes: int) -> Decoded:
        """What the request holds. Raises what decoding it alone raises."""
        mine: _Waiting[Request, Decoded] = _Waiting(request, n_bytes)
        with self._changing:
            self._waiting.setdefault(tenant, deque()).append(mine)
        while not mine.decoded.done():
            with self._decoding:
                if not mine.decoded.done():
                    if self._n_last > 1:
                        time.sleep(_GATHER_S)
                    group = self._taken(tenant)
                    self._n_last = len(group)
                    self._settle(group, tenant)
        return mine.decoded.result()

    def _taken(self, tenant: str) -> list[_Waiting[Request, Decoded]]:
        """Those that are decoded next, at least one."""
        with self._changing:
            waiting = self._waiting[tenant]
            taken = [waiting.popleft()]
            n_bytes = taken[0].n_bytes
            while waiting and len(taken) < _MOST_REQUESTS and n_bytes + waiting[0].n_bytes <= _MOST_BYTES:
                taken.append(waiting.popleft())
                n_bytes += taken[-1].n_bytes
            if not waiting:
                del self._waiting[tenant]
        return taken

    def _settle(self, group: list[_Waiting[Request, Decoded]], tenant: str) -> None:
        """Decode them; one that is wrong does not harm the others."""
        together: list[Decoded] | None = None
        try:
            if len(group) > 1:
                together = self._together([one.request for one in group], tenant)
        except Exception as error:  # noqa: BLE001 (each of their threads raises it)
            for one in group:
                one.decoded.set_exception(error)
            return
        for place, one in enumerate(group):
            try:
                decoded = together[place] if together else self._alone(one.request, tenant)
                one.decoded.set_result(decoded)
            except Exception as error:  # noqa: BLE001 (its thread raises it)
                one.decoded.set_exception(error)
