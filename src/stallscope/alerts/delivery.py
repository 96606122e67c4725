"""Delivers the changes of alerts: one thread per receiver, so that a slow receiver does not delay the others."""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stallscope.alerts.config import Config
from stallscope.alerts.receivers import alertmanager, email, opsgenie, pagerduty, slack, webhook
from stallscope.alerts.receivers.http import DeliveryFailed
from stallscope.alerts.state import AlertState, Clock, Delivery
from stallscope.errors import StallscopeError

_LOG = logging.getLogger(__name__)
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 300.0

SENDERS: Mapping[str, Callable[[Any, Delivery], None]] = {
    "alertmanager": alertmanager.send,
    "email": email.send,
    "opsgenie": opsgenie.send,
    "pagerduty": pagerduty.send,
    "slack": slack.send,
    "webhook": webhook.send,
}
_RENEW_NS = {"alertmanager": alertmanager.RENEW_NS}


@dataclass
class DeliveryCounts:
    """Totals since the start, for /metrics."""

    alerts_delivered: int = 0
    alert_delivery_failures: int = 0


class Deliveries:
    """The threads. wake() after a change of the state; close() sends due changes that have not failed yet, once."""

    def __init__(self, state: AlertState, config: Config, *, clock_ns: Clock = time.time_ns):
        self.counts = DeliveryCounts()
        self._state, self._config, self._clock_ns = state, config, clock_ns
        self._ended = threading.Event()
        self._wakes = {name: threading.Event() for name in config.receivers}
        self._threads = [
            threading.Thread(target=self._run, args=(name,), name=f"alerts-{name}", daemon=True)
            for name in config.receivers
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        for event in self._wakes.values():
            event.set()

    def close(self) -> None:
        self._ended.set()
        self.wake()
        for thread in self._threads:
            thread.join()

    def _run(self, name: str) -> None:
        wake = self._wakes[name]
        is_last = False
        while not is_last:
            wake.wait(1.0)
            wake.clear()
            is_last = self._ended.is_set()
            try:
                # A raise and the end of its alert can be due at once.
                while self._attempt(name, is_last=is_last):
                    pass
            except StallscopeError as error:
                _LOG.error("alerts to %s: %s", name, error)
            except Exception:  # noqa: BLE001 (a failure at one alert must not end the thread)
                _LOG.exception("alerts to %s failed", name)

    def _attempt(self, name: str, *, is_last: bool) -> bool:
        """Send every due change of a receiver once; whether any was delivered."""
        renew_ns = _RENEW_NS.get(self._config.receivers[name].type, 0)
        before = self.counts.alerts_delivered
        for delivery in self._state.due(name, self._clock_ns(), renew_ns=renew_ns):
            if not delivery.n_failures or not (is_last or self._ended.is_set()):
                send_once(self._state, self._config, name, delivery, self._clock_ns, self.counts)
        return self.counts.alerts_delivered > before


def send_once(
    state: AlertState,
    config: Config,
    name: str,
    delivery: Delivery,
    clock_ns: Clock,
    counts: DeliveryCounts,
) -> None:
    """Send one change, and record the outcome."""
    receiver = config.receivers[name]
    try:
        SENDERS[receiver.type](receiver, delivery)
    except (DeliveryFailed, StallscopeError) as error:
        failure = (
            error if isinstance(error, DeliveryFailed) else DeliveryFailed(str(error), is_permanent=True)
        )
        counts.alert_delivery_failures += 1
        wait_s = retry_wait_s(delivery.n_failures, failure, random.random())
        if delivery.n_failures == 0 or failure.is_permanent:
            advice = "; check the receiver's settings" if failure.is_permanent else ""
            _LOG.warning("alert %s to %s: %s%s", delivery.notice.key, name, failure, advice)
        state.failed(name, delivery, str(failure), clock_ns() + round(wait_s * 1e9))
        return
    counts.alerts_delivered += 1
    state.delivered(name, delivery, clock_ns())


def retry_wait_s(n_failures: int, failure: DeliveryFailed, jitter: float) -> float:
    """Time to the next attempt: 1 s, doubled by each failure, at most 5 minutes, but never less than Retry-After.

    A request that the receiver rejects as invalid is repeated every 5 minutes, because a user may correct the setting
    that caused it. jitter: 0 to 1, spreads the attempts over the second half of the wait.
    """
    wait_s = (
        _MAX_RETRY_S if failure.is_permanent else min(_FIRST_RETRY_S * 2 ** min(n_failures, 20), _MAX_RETRY_S)
    )
    return max(wait_s * (0.5 + jitter / 2), failure.retry_after_s or 0.0)
