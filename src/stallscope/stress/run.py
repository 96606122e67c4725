"""Sends a load to a hub at a given pace or at full speed, and measures the time until acknowledgement."""

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.errors import NotAllowed, Unreachable
from stallscope.events.layout import Array
from stallscope.exporters.hub_sender import Answer, Channel, Outcome
from stallscope.stress import load
from stallscope.stress.load import Job

_MAX_WAIT_S = 0.25
"""Longest gap between requests of a paced load, as for an agent."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """events: rows to send. rate: rows per second; 0 for full speed. batch: rows per request.

    at_once: concurrent requests. patience_s: give up after this time without an acknowledgement.
    """

    job: Job
    events: int
    rate: float
    batch: int = 500
    at_once: int = 4
    patience_s: float = 30.0


@dataclass
class Result:
    """The measurements. ack_ms: one value per acknowledged request, retries included."""

    n_sent: int = 0
    n_acknowledged: int = 0
    n_retried: int = 0
    n_refused: int = 0
    seconds: float = 0.0
    ack_ms: list[float] = field(default_factory=list)
    reason: str = ""

    def numbers(self) -> dict[str, float | int]:
        """The figures for the output."""
        p50, p99 = np.percentile(self.ack_ms, [50, 99]).round(2).tolist() if self.ack_ms else (0.0, 0.0)
        return {
            "sent": self.n_sent,
            "acknowledged": self.n_acknowledged,
            "retried_requests": self.n_retried,
            "refused": self.n_refused,
            "seconds": round(self.seconds, 3),
            "acknowledged_per_s": round(self.n_acknowledged / self.seconds) if self.seconds else 0,
            "ack_p50_ms": p50,
            "ack_p99_ms": p99,
        }


def run(plan: Plan, channel: Channel) -> Result:
    """Send all rows and wait for the answers. Raises NotAllowed (token, certificate), Unreachable (no answer)."""
    result, flight = Result(), _Flight(plan, channel)
    begin_s = time.monotonic()
    origin = load.rounds_until(plan.job, time.time_ns())
    next_round, n_made = origin, 0
    flight.send({"processes": load.processes(plan.job, time.time_ns())}, is_counted=False)
    while n_made < plan.events:
        n_rounds = _rounds_due(plan, next_round, origin, n_made, begin_s)
        rows = load.collectives(plan.job, next_round, n_rounds, origin_round=origin)
        rows = rows[: plan.events - n_made]
        flight.send({"collectives": rows})
        next_round, n_made = next_round + n_rounds, n_made + len(rows)
    flight.wait()
    result.seconds = time.monotonic() - begin_s
    result.n_sent, result.n_acknowledged = n_made, flight.n_acknowledged
    result.n_retried, result.n_refused = flight.n_retried, flight.n_refused
    result.ack_ms, result.reason = flight.ack_ms, flight.reason
    return result


def _rounds_due(plan: Plan, next_round: int, origin: int, n_made: int, begin_s: float) -> int:
    """Number of rounds in the next request; for a paced load, returns when these rounds are due."""
    most = max(1, -(-plan.batch // plan.job.ranks))
    remaining = -(-(plan.events - n_made) // plan.job.ranks)
    n_rounds = min(most, remaining)
    if not plan.rate:
        return n_rounds
    a_second = plan.rate / plan.job.ranks
    n_rounds = max(1, min(n_rounds, int(a_second * _MAX_WAIT_S)))
    due_s = begin_s + (next_round - origin + n_rounds) / a_second
    time.sleep(max(0.0, due_s - time.monotonic()))
    return n_rounds


class _Flight:
    """Requests in flight. Each is repeated, with its id, until the hub accepts or refuses it."""

    def __init__(self, plan: Plan, channel: Channel):
        self.n_acknowledged = self.n_retried = self.n_refused = 0
        self.ack_ms: list[float] = []
        self.reason = ""
        self._plan, self._channel = plan, channel
        self._changed = threading.Condition()
        self._n_under_way = 0
        self._retries: list[tuple[float, Callable[[], None]]] = []
        self._shut_out = ""
        self._last_good_s = time.monotonic()

    def send(self, tables: Mapping[str, Array], *, is_counted: bool = True) -> None:
        """Send one request; waits while the maximum number of requests is in flight."""
        self._until(lambda: self._n_under_way < self._plan.at_once)
        with self._changed:
            self._n_under_way += 1
        self._attempt(uuid.uuid4().hex, tables, is_counted, time.monotonic())

    def wait(self) -> None:
        """Wait until no request is in flight."""
        self._until(lambda: not self._n_under_way)

    def _attempt(self, batch_id: str, tables: Mapping[str, Array], is_counted: bool, begin_s: float) -> None:
        self._channel.send(
            batch_id, tables, lambda answer: self._ended(answer, batch_id, tables, is_counted, begin_s)
        )

    def _ended(
        self, answer: Answer, batch_id: str, tables: Mapping[str, Array], is_counted: bool, begin_s: float
    ) -> None:
        n = sum(map(len, tables.values())) if is_counted else 0
        with self._changed:
            if answer.outcome in (Outcome.LATER, Outcome.FAILED):
                self.n_retried += 1
                self.reason = answer.reason
                at_s = time.monotonic() + (0.2 if answer.retry_after_s is None else answer.retry_after_s)
                self._retries.append((at_s, lambda: self._attempt(batch_id, tables, is_counted, begin_s)))
                self._changed.notify_all()
                return
            self._n_under_way -= 1
            if answer.outcome is Outcome.ACKNOWLEDGED:
                self._last_good_s = time.monotonic()
                self.n_acknowledged += n
                self.ack_ms.append((self._last_good_s - begin_s) * 1000)
            elif answer.outcome is Outcome.BAD_BATCH:
                self.n_refused += n
                self.reason = answer.reason
            else:
                self._shut_out = answer.reason
            self._changed.notify_all()

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait, and repeat requests that are due. Raises NotAllowed, Unreachable."""
        while True:
            with self._changed:
                if self._shut_out:
                    raise NotAllowed(
                        f"the hub refuses the rows: {self._shut_out}; check --token-file and --ca-cert"
                    )
                if is_so():
                    return
                now_s = time.monotonic()
                if now_s - self._last_good_s > self._plan.patience_s:
                    raise Unreachable(
                        f"the hub has acknowledged nothing for {self._plan.patience_s:g} s "
                        f"({self.reason or 'no answer'}); check --endpoint"
                    )
                due = [again for at_s, again in self._retries if at_s <= now_s]
                self._retries = [request for request in self._retries if request[0] > now_s]
                if not due:
                    self._changed.wait(0.02)
            for again in due:
                again()
