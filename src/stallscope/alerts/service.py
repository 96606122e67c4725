"""The alerts of a running hub or agent: incidents in, alerts out."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stallscope.alerts.config import Config
from stallscope.alerts.delivery import Deliveries, DeliveryCounts
from stallscope.alerts.incident import Incident, from_hub
from stallscope.alerts.state import AlertState, Clock, state_path
from stallscope.errors import StallscopeError

if TYPE_CHECKING:  # importing the store here would load the engine
    from stallscope.store.hub.store_protocol import Store

_LOG = logging.getLogger(__name__)
_EVERY_S = 1.0
_OVERLAP_NS = 5 * 10**9
"""Rows are read again for this long, because rows committed together may have slightly different times."""

HISTORY_NS = 30 * 86_400 * 10**9
"""Time that the first start looks back, and for which incidents are kept."""

Source = Callable[[], tuple[list[Incident], tuple[str, int] | None]]
"""The changed incidents, and the progress to store with them."""


class Alerts:
    """A thread that evaluates incidents once a second, and the deliveries. close() ends both."""

    def __init__(
        self, state: AlertState, config: Config | None, source: Source, *, clock_ns: Clock = time.time_ns
    ):
        self._state, self._config, self._source, self._clock_ns = state, config, source, clock_ns
        self._deliveries = Deliveries(state, config, clock_ns=clock_ns) if config else None
        self._n_failures = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._thread.start()

    def numbers(self) -> Mapping[str, float]:
        """Totals since the start, for /metrics."""
        counts = self._deliveries.counts if self._deliveries else DeliveryCounts()
        return {**asdict(counts), "alert_evaluation_failures": self._n_failures}

    def close(self, *, source_has_ended: bool = False) -> None:
        """source_has_ended: closed incidents will not open again, so that their alerts end now."""
        self._ended.set()
        self._thread.join()
        self._evaluate()
        if source_has_ended and self._config:
            self._state.evaluate(self._config, self._clock_ns() + round(self._config.resolve_after * 1e9))
        if self._deliveries:
            self._deliveries.close()
        self._state.close()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._evaluate()

    def _evaluate(self) -> None:
        try:
            incidents, progress = self._source()
            self._state.note(incidents, progress)
            self._state.evaluate(self._config, self._clock_ns())
        except Exception as error:  # noqa: BLE001 (counted and logged; the next evaluation covers the same rows)
            self._n_failures += 1
            if isinstance(error, StallscopeError):
                _LOG.error("alerts: %s", error)
            else:
                _LOG.exception("alerts: an evaluation failed")
        if self._deliveries:
            self._deliveries.wake()


def of_hub(
    store: "Store",
    state: AlertState,
    config: Config | None,
    *,
    is_active: Callable[[], bool] = lambda: True,
) -> Alerts:
    """The alerts of a hub. An open incident of an earlier start continues as the same alert.

    config: None only records the incidents, for `stallscope alerts test`. is_active: false while another hub that
    shares the store sends the alerts.
    """
    from stallscope.store.hub.changed_verdicts import changed_verdicts

    start_ns = state.progress("hub", time.time_ns() - HISTORY_NS)
    is_first = True

    def source() -> tuple[list[Incident], tuple[str, int] | None]:
        nonlocal start_ns, is_first
        if not is_active():
            is_first = True
            return [], None
        incidents = from_hub(changed_verdicts(store, start_ns - _OVERLAP_NS, with_open=is_first))
        start_ns, is_first = max([start_ns, *(i.updated_ns for i in incidents)]), False
        return incidents, ("hub", start_ns)

    return Alerts(state, config, source)


class AgentAlerts:
    """The alerts of one machine without a hub. take() accepts incidents from any thread."""

    def __init__(self, db: Path, config: Config):
        """db: the node trace; the state file is next to it. Raises StorageFailed."""
        self._incidents: queue.SimpleQueue[Incident] = queue.SimpleQueue()
        self._alerts = Alerts(AlertState(state_path(db)), config, self._source)

    def take(self, incident: Incident) -> None:
        self._incidents.put(incident)

    def close(self) -> None:
        self._alerts.close(source_has_ended=True)

    def _source(self) -> tuple[list[Incident], None]:
        return [self._incidents.get() for _ in range(self._incidents.qsize())], None
