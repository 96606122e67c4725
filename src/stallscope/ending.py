"""Requests to end a service: signals set an event."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

ASKS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def set_by_signals(
    stop: threading.Event, signals: Sequence[signal.Signals] = ASKS
) -> Iterator[threading.Event]:
    """Inside the with block, these signals set `stop`; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def set_it(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = [signal.signal(number, set_it) for number in signals]
    try:
        yield stop
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def signal_descriptor() -> Iterator[int]:
    """Inside the with block this descriptor becomes readable at a signal, for callers that also wait for others.

    Outside the main thread it never does.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = None
    with suppress(ValueError):  # not the main thread
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        if before is not None:
            signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
