"""How a service is asked to end: an event that signals set."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

ASKS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def set_by_signals(
    stop: threading.Event, signals: Sequence[signal.Signals] = ASKS
) -> Iterator[threading.Event]:
    """Inside the with block, these signals set `stop`; outside the main thread nothing changes."""
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
