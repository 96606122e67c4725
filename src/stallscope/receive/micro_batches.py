"""Decodes small waiting requests together.

The cost of decoding and storing a small request hardly depends on its size. A thread per tenant decodes the waiting
requests; requests that arrive during that time are in its next group, so the groups grow with the load. A request's
own thread waits only once, for the commit. No tenant waits for another tenant's requests.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stallscope.receive.admission import SharedLimit
from stallscope.store.hub.batches import Receipt

SMALL_BYTES = 1 << 18
"""Larger requests are decoded alone: decoding them together would not be faster."""

_MAX_BYTES = 1 << 21  # of requests that are decoded together
_MAX_REQUESTS = 256
_GATHER_S, _MAX_GATHER_S, _GATHER_SHARE = 0.02, 0.1, 3.0
_PAUSE_S, _SHORT_PAUSE_S, _CHECK_EVERY_S = 0.006, 0.003, 0.001
"""If several requests came together before, the thread waits until none arrives for a while: senders that get their
answers together send together again. It waits for a multiple of the time of the last group at most: at a high rate of
requests of many senders, larger groups cost less.
"""

_IDLE_S = 10.0

Request = TypeVar("Request")


@dataclass(frozen=True, eq=False)
class Waiting(Generic[Request]):
    """A request in the queue. stored: resolves once its rows are on disk."""

    request: Request
    n_bytes: int
    stored: "Future[Receipt]" = field(default_factory=Future)


@dataclass(eq=False)
class _Line(Generic[Request]):
    """A tenant's requests. n_bytes: of the waiting requests. n_last, last_s: size and time of the last group. is_idle:
    whether its thread waits for a request.
    """

    waiting: deque[Waiting[Request]] = field(default_factory=deque)
    n_bytes: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    n_last: int = 0
    last_s: float = 0.0
    is_idle: bool = False
    has_thread: bool = False


class MicroBatches(Generic[Request]):
    """Thread-safe. Tenants come from the tokens, so their number is small."""

    def __init__(
        self,
        store: Callable[[list[Waiting[Request]], str], None],
        *,
        room: SharedLimit,
        at_work: Callable[[], AbstractContextManager[object]] = nullcontext,
        announced: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        """store: decodes and stores requests of one tenant, and resolves their futures; if it raises, the unresolved
        futures get its error. room: bounds the bytes of the waiting requests. at_work: reserves a decoding slot; may
        raise. announced: announces rows to the store.
        """
        self._store, self._room, self._at_work, self._announced = store, room, at_work, announced
        self._lines: dict[str, _Line[Request]] = {}
        self._adding_line = threading.Lock()

    def submit(self, request: Request, tenant: str, *, n_bytes: int) -> "Future[Receipt]":
        """Queue a request. Raises Overloaded."""
        self._room.take(tenant, n_bytes)
        entry: Waiting[Request] = Waiting(request, n_bytes)
        line = self._lines.get(tenant)
        if line is None:
            with self._adding_line:
                line = self._lines.setdefault(tenant, _Line())
        with line.changed:
            line.waiting.append(entry)
            line.n_bytes += n_bytes
            if line.is_idle:
                line.is_idle = False
                line.changed.notify()
            elif not line.has_thread:
                line.has_thread = True
                threading.Thread(
                    target=self._run, args=(line, tenant), name="small-requests", daemon=True
                ).start()
        return entry.stored

    def _run(self, line: _Line[Request], tenant: str) -> None:
        while _has_requests(line):
            with self._announced():
                _gather(line)
                begin_s = time.monotonic()
                self._settle(_next_group(line), tenant)
                line.last_s = time.monotonic() - begin_s

    def _settle(self, group: list[Waiting[Request]], tenant: str) -> None:
        try:
            with self._at_work():
                self._store(group, tenant)
        except Exception as error:  # noqa: BLE001 (the senders of the requests get it)
            for entry in group:
                if not entry.stored.done():
                    entry.stored.set_exception(error)
        finally:
            self._room.give(tenant, sum(entry.n_bytes for entry in group))


def _has_requests(line: _Line[Request]) -> bool:
    """Wait for a request. False if none arrives for a while: the thread ends, and the next request starts another."""
    with line.changed:
        if not line.waiting:
            line.is_idle = True
            line.changed.wait_for(lambda: line.waiting, timeout=_IDLE_S)
            line.is_idle = False
        line.has_thread = bool(line.waiting)
        return line.has_thread


def _gather(line: _Line[Request]) -> None:
    """Wait briefly while requests arrive, if the last group had several and the next group is not full."""
    if line.n_last < 2:
        return
    begin_s = last_s = now_s = time.monotonic()
    end_s = begin_s + min(max(_GATHER_S, _GATHER_SHARE * line.last_s), _MAX_GATHER_S)
    n_before = len(line.waiting)
    while now_s < end_s and n_before < _MAX_REQUESTS and line.n_bytes < _MAX_BYTES:
        if now_s - last_s >= (_PAUSE_S if n_before < line.n_last else _SHORT_PAUSE_S):
            return
        time.sleep(_CHECK_EVERY_S)
        now_s = time.monotonic()
        if len(line.waiting) > n_before:
            n_before, last_s = len(line.waiting), now_s


def _next_group(line: _Line[Request]) -> list[Waiting[Request]]:
    """The requests to decode next."""
    group: list[Waiting[Request]] = []
    n_bytes = 0
    with line.changed:
        waiting = line.waiting
        while (
            waiting
            and len(group) < _MAX_REQUESTS
            and (not group or n_bytes + waiting[0].n_bytes <= _MAX_BYTES)
        ):
            group.append(waiting.popleft())
            n_bytes += group[-1].n_bytes
        line.n_bytes -= n_bytes
        line.n_last = len(group)
    return group
