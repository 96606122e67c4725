"""Passes the results of futures of other threads to an event loop.

A commit resolves the futures of hundreds of requests. asyncio.wrap_future would wake the loop for each of them, with
a system call; this class wakes it once for all futures that resolve before it runs.
"""

import asyncio
from collections import deque
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class Completions:
    """Its futures may resolve in any thread; result() is called in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._resolved: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._is_woken = False

    async def result(self, future: "Future[Result]") -> Result:
        """The result of a future, or its error."""
        waiting: asyncio.Future[Result] = self._loop.create_future()
        future.add_done_callback(partial(self._add, waiting))
        return await waiting

    def _add(self, waiting: "asyncio.Future[Any]", future: "Future[Any]") -> None:
        self._resolved.append((waiting, future))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has ended, and its requests with it
                self._loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        self._is_woken = False  # before the first result is taken: a later one wakes the loop again
        while self._resolved:
            waiting, future = self._resolved.popleft()
            if waiting.done():  # its sender has disconnected
                continue
            if future.cancelled():
                waiting.set_exception(CancelledError())
            elif error := future.exception():
                waiting.set_exception(error)
            else:
                waiting.set_result(future.result())
