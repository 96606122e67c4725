"""Waiting for a state that another thread or process reaches: never for a length of time.

A machine that runs other work can be slow by any factor, so the limit is generous: it costs time only in a test that
fails. A condition is evaluated repeatedly, so it must not change the state that it tests.
"""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 60.0
"""Less than a third of the limit of one test (pyproject.toml): a test that fails states the missing condition."""

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    *,
    seconds: float = PATIENCE_S,
    state: Callable[[], object] = lambda: "the condition did not become true",
    every_s: float = 0.02,
) -> T:
    """The first true value of a condition. Fails with `state()` after `seconds`."""
    end_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end_s, state()
        time.sleep(every_s)
    return value
