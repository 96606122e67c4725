"""The health of this machine: its signals go to the hub every 10 s, and the hub's thresholds decide its state.

The agent's loop calls take() and second(); a thread waits for the hub, so that neither waits for a network.
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallscope.events.layout import Array, Table
from stallscope.exporters import metric_table as table_of
from stallscope.exporters.metric_values import Meter
from stallscope.health import state_file
from stallscope.health.node_state import STATES, NodeState
from stallscope.health.windows import Window, Windows

ATTEMPTS = 2
"""Of a report that the hub does not answer, within its window."""

_RETRY_S = 1.0

Ask = Callable[[bytes], bytes | None]
"""Sends a report; returns the answer, None without one."""


@dataclass(frozen=True)
class Machine:
    """The machine as the hub knows it. db: its node trace."""

    node: str
    cluster: str
    db: Path


class NodeHealth:
    """Reports the machine's health until close(). note: prints a change of the state."""

    def __init__(
        self,
        machine: Machine,
        ask: Ask,
        *,
        note: Callable[[str], None],
        meter: Meter | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ):
        self._machine, self._ask, self._note, self._meter = machine, ask, note, meter
        self._clock_ns = clock_ns
        self._windows, self._state = Windows(), NodeState()
        self._waiting: queue.SimpleQueue[Window | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="node-health", daemon=True)
        self._thread.start()

    def take(self, table: Table, rows: Array) -> None:
        """Rows of the capture."""
        self._windows.take(table, rows)

    def second(self) -> None:
        """Report the window that has ended, if any; called about once a second."""
        if window := self._windows.window(self._clock_ns()):
            self._waiting.put(window)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while window := self._waiting.get():
            before = self._state.state
            self._state.update(window.signals, self._answer(window))
            self._publish(window)
            if before != self._state.state:
                self._answer(window)  # the hub learns the new state now, not in 10 s
            if "straggler" in (before, self._state.state) and before != self._state.state:
                self._note(f"this machine is {_WORDS[self._state.state]}: {self._state.reason}")

    def _answer(self, window: Window) -> dict[str, Any] | None:
        state = self._state
        report = {
            "version": 1,
            "node": self._machine.node,
            "cluster": self._machine.cluster,
            "cohort": window.cohort,
            "signals": window.signals,
            "state": state.state,
            "score": state.score,
            "reason": state.reason,
        }
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(_RETRY_S)
            try:
                if (answer := self._ask(json.dumps(report).encode())) is not None:
                    return dict(json.loads(answer))
            except (ValueError, TypeError):
                continue
        return None

    def _publish(self, window: Window) -> None:
        state = self._state
        state_file.write(
            self._machine.db, state_file.Saved(state.state, state.score, state.reason, time.time())
        )
        if self._meter is None:
            return
        if state.score is not None:
            self._meter.set(table_of.NODE_SCORE, state.score)
        self._meter.replace(table_of.NODE_SIGNAL, {(name,): value for name, value in window.signals.items()})
        self._meter.replace(table_of.NODE_STATE, {(name,): float(name == state.state) for name in STATES})


_WORDS = {
    "unknown": "not compared any more",
    "healthy": "no straggler any more",
    "suspect": "a suspect",
    "straggler": "a straggler",
}
