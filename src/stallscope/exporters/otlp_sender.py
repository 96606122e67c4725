"""Sends the metrics of a node and its incidents by OTLP, from a separate thread.

Metrics are cumulative, so only the newest are sent and failed requests are not kept. Incidents
wait, at most MAX_WAITING of them.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stallscope.errors import BadInput, remedy_for_extra
from stallscope.exporters.metric_values import Meter
from stallscope.exporters.otlp_wire import Wire, wire

EVERY_S = 10.0
MAX_WAITING = 1000
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
_INCIDENTS_AT_ONCE = 100


class OtlpSender:
    """A thread that sends every `every_s` seconds, later when the receiver asks for time, and once at the end."""

    def __init__(
        self,
        meter: Meter,
        to: Wire,
        *,
        node: str,
        every_s: float = EVERY_S,
        wall_ns: Callable[[], int] = time.time_ns,
        note: Callable[[str], None] = lambda text: None,
    ):
        from stallscope.exporters import otlp_messages

        self._messages = otlp_messages
        self._meter, self._wire, self._every_s, self._wall_ns, self._note = meter, to, every_s, wall_ns, note
        self._resource = otlp_messages.resource(node)
        self._waiting: deque[otlp_messages.Incident] = deque(maxlen=MAX_WAITING)
        self._is_over = threading.Event()
        self._n_failures = 0
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def incident(self, **output: Any) -> None:
        """Queue an incident for the next request, by the fields of otlp_messages.Incident.

        When the queue is full, the oldest incidents are lost.
        """
        self._waiting.append(self._messages.Incident(**output))

    def close(self) -> None:
        """Send a last time and end."""
        self._is_over.set()
        self._thread.join()
        self._wire.close()

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._is_over.wait(pause_s):
            pause_s = self._turn()
        self._turn()

    def _turn(self) -> float:
        """Send metrics and incidents; returns the seconds to wait before the next turn."""
        request = self._messages.metrics_request(self._meter, self._resource, now_ns=self._wall_ns())
        answer = self._wire.send("metrics", request.SerializeToString())
        if answer.is_taken and self._waiting:
            batch = list(self._waiting)[:_INCIDENTS_AT_ONCE]
            spans = self._messages.spans_request(batch, self._resource)
            answer = self._wire.send("traces", spans.SerializeToString())
            if answer.is_taken or not answer.may_retry:
                for _ in batch:
                    self._waiting.popleft()
        if answer.is_taken:
            if self._n_failures:
                self._note("the OTLP receiver is reachable again")
            self._n_failures = 0
            return self._every_s
        if not self._n_failures:
            self._note(f"the OTLP receiver accepts no data: {answer.reason}; stallscope will retry")
        self._n_failures += 1
        if answer.retry_after_s is not None:
            return answer.retry_after_s
        doubled_s = min(FIRST_RETRY_S * 2 ** min(self._n_failures - 1, 10), MAX_RETRY_S)
        return doubled_s * (1 - random.random() / 2)


@contextmanager
def otlp_sender(
    meter: Meter, url: str, *, node: str, note: Callable[[str], None] = lambda text: None
) -> Iterator[OtlpSender]:
    """Sends inside the with block, and once at its end. Raises BadInput."""
    try:
        import opentelemetry.proto.metrics.v1.metrics_pb2  # noqa: F401
    except ImportError:
        raise BadInput(
            f"--otlp needs the package opentelemetry-proto: {remedy_for_extra('export')}"
        ) from None
    sender = OtlpSender(meter, wire(url), node=node, note=note)
    try:
        yield sender
    finally:
        sender.close()
