"""Decodes small waiting requests together.

The cost of decoding a small request hardly depends on its size. The first thread decodes the waiting requests;
requests that arrive during that time wait for the next turn. So a single sender never waits for others, and the
groups grow with the load. Each tenant has its own queue: no tenant waits for another tenant's requests.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

SMALL_BYTES = 1 << 18
"""Larger requests are decoded alone: decoding them together would not be faster."""

_MAX_BYTES = 1 << 21  # of requests that are decoded together
_MAX_REQUESTS = 64
_GATHER_S = 0.01
"""Wait if several requests came together before: senders that get their answers together send together again."""

Request = TypeVar("Request")
Decoded = TypeVar("Decoded")


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[Request, Decoded]):
    request: Request
    n_bytes: int
    decoded: "Future[Decoded]" = field(default_factory=Future)


@dataclass
class _Line(Generic[Request, Decoded]):
    """A tenant's requests. n_last: size of the last group."""

    waiting: deque[_Waiting[Request, Decoded]] = field(default_factory=deque)
    decoding: threading.Lock = field(default_factory=threading.Lock)
    n_last: int = 0


class MicroBatches(Generic[Request, Decoded]):
    """Thread-safe. Tenants come from the tokens, so their number is small."""

    def __init__(
        self,
        alone: Callable[[Request, str], Decoded],
        together: Callable[[list[Request], str], list[Decoded] | None],
        *,
        at_work: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        """alone: decodes one request of a tenant; together: decodes several requests of one tenant, None if each
        must be decoded alone. at_work: reserves a decoding slot; may raise.
        """
        self._alone, self._together, self._at_work = alone, together, at_work
        self._changing = threading.Lock()
        self._lines: dict[str, _Line[Request, Decoded]] = {}

    def decode(self, request: Request, tenant: str, *, n_bytes: int) -> Decoded:
        """The decoded request. Raises the errors of decoding it alone, and of at_work()."""
        entry: _Waiting[Request, Decoded] = _Waiting(request, n_bytes)
        with self._changing:
            line = self._lines.setdefault(tenant, _Line())
            line.waiting.append(entry)
        try:
            while not entry.decoded.done():
                with line.decoding:
                    if not entry.decoded.done():
                        self._decode_some(line, tenant)
        except BaseException:
            with self._changing, suppress(ValueError):
                line.waiting.remove(entry)
            raise
        return entry.decoded.result()

    def _decode_some(self, line: _Line[Request, Decoded], tenant: str) -> None:
        if line.n_last > 1:
            time.sleep(_GATHER_S)
        with self._at_work():
            group = self._next_group(line)
            line.n_last = len(group)
            self._settle(group, tenant)

    def _next_group(self, line: _Line[Request, Decoded]) -> list[_Waiting[Request, Decoded]]:
        """The requests to decode next, at least one."""
        with self._changing:
            waiting = line.waiting
            group = [waiting.popleft()]
            n_bytes = group[0].n_bytes
            while waiting and len(group) < _MAX_REQUESTS and n_bytes + waiting[0].n_bytes <= _MAX_BYTES:
                group.append(waiting.popleft())
                n_bytes += group[-1].n_bytes
        return group

    def _settle(self, group: list[_Waiting[Request, Decoded]], tenant: str) -> None:
        """Decode the requests; an invalid request does not affect the others."""
        together: list[Decoded] | None = None
        try:
            if len(group) > 1:
                together = self._together([entry.request for entry in group], tenant)
        except Exception as error:  # noqa: BLE001 (each of their threads raises it)
            for entry in group:
                entry.decoded.set_exception(error)
            return
        for index, entry in enumerate(group):
            try:
                decoded = together[index] if together else self._alone(entry.request, tenant)
                entry.decoded.set_result(decoded)
            except Exception as error:  # noqa: BLE001 (its thread raises it)
                entry.decoded.set_exception(error)
