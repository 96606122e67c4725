"""Sends spooled batches to a hub: a thread with a few batches in flight at a time, and pauses after failures.

A batch leaves the spool only when the hub has acknowledged it. After a failure the sender waits for the time that the
hub asked for (RetryInfo), or for a time that doubles up to half a minute. A random part shortens that time, so that
a thousand agents do not reconnect at the same moment. Only a batch that the hub rejects as bad leaves the spool
without being stored: it is set aside on disk and reported. A batch at which the
hub fails goes behind the others, so that it holds up no other batch.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np

from stallscope.events.layout import Array
from stallscope.exporters.spool import Spool, SpooledBatch, read

MAX_IN_FLIGHT = 4
"""An acknowledgement comes after the hub's commit: with one batch at a time it would hold up the next."""

FIRST_RETRY_S = 0.2
MAX_RETRY_S = 30.0
_MAX_FORMING_BYTES = 64 << 20
_MAX_BATCH_BYTES = 4 << 20
_POLL_EVERY_S = 0.05


class Outcome(Enum):
    """The result of one attempt."""

    ACKNOWLEDGED = auto()
    LATER = auto()  # the hub is unreachable or busy
    FAILED = auto()  # the hub failed at this batch: others may pass
    BAD_BATCH = auto()  # the hub will never take this batch
    SHUT_OUT = auto()  # token or certificate refused: the hub takes nothing until a person acts


@dataclass(frozen=True)
class Answer:
    """The end of one attempt. retry_after_s: the wait that the hub asked for, if any; reason: for people."""

    outcome: Outcome
    retry_after_s: float | None = None
    reason: str = ""


class Channel(Protocol):
    """A connection to a hub."""

    def send(self, batch_id: str, tables: Mapping[str, Array], done: Callable[[Answer], None]) -> None:
        """Start sending; `done` is called once, in any thread."""

    def close(self) -> None:
        """End the connection; batches in flight are given up."""


class HubSender:
    """Takes rows at any speed, never blocks, and sends them to a hub."""

    def __init__(
        self,
        spool: Spool,
        channel: Channel,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ):
        self._spool, self._channel = spool, channel
        self._clock_s, self._jitter = clock_s, jitter
        self._forming: dict[str, list[Array]] = {}
        self._forming_bytes = 0
        self._in_flight: dict[int, SpooledBatch] = {}
        self._n_failures_of: Counter[int] = Counter()
        self._answers: list[tuple[SpooledBatch, Answer]] = []
        self._n_lost_before_spool = 0
        self._n_failures = 0
        self._resume_s = 0.0
        self._away_since_s: float | None = None
        self._reason = ""
        self._reason_set_aside = ""
        self._n_acknowledged = 0
        self._changed = threading.Condition()
        self._is_ending = False
        self._end_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="to-hub", daemon=True)
        self._thread.start()

    def offer(self, tables: Mapping[str, Array]) -> None:
        """Queue rows, by table. Beyond 64 MB that are not yet on disk, rows are dropped and counted."""
        n_bytes = sum(rows.nbytes for rows in tables.values())
        with self._changed:
            if self._forming_bytes + n_bytes > _MAX_FORMING_BYTES:
                self._n_lost_before_spool += sum(map(len, tables.values()))
                return
            for name, rows in tables.items():
                if len(rows):
                    self._forming.setdefault(name, []).append(rows)
            self._forming_bytes += n_bytes
            self._changed.notify()

    @property
    def n_dropped(self) -> int:
        """Rows that were dropped because the spool had no room for them."""
        return self._spool.n_dropped + self._n_lost_before_spool

    @property
    def n_not_sent(self) -> int:
        """Rows that the hub does not have and will not get: dropped, or set aside because the hub refuses them."""
        return self.n_dropped + self._spool.n_set_aside

    @property
    def n_acknowledged(self) -> int:
        """Rows that the hub has stored."""
        return self._n_acknowledged

    def status(self) -> str:
        """The state of the connection, in a few words."""
        with self._changed:
            n_waiting = sum(batch.n_rows for batch in self._spool.batches())
            away_since_s, reason = self._away_since_s, self._reason
        dropped = f", {self.n_dropped:,} dropped" if self.n_dropped else ""
        if self._spool.n_set_aside:
            dropped += f", {self._spool.n_set_aside:,} set aside ({self._reason_set_aside})"
        if away_since_s is None:
            return f"hub has {self._n_acknowledged:,}{dropped}"
        away_s = self._clock_s() - away_since_s
        return f"hub away for {away_s:.0f} s ({reason}), {n_waiting:,} wait on disk{dropped}"

    def complaint(self) -> str:
        """The reason why the hub accepts no data at present; empty while it accepts data."""
        with self._changed:
            return "" if self._away_since_s is None else self._reason

    def close(self, patience_s: float) -> None:
        """Send the remaining batches for patience_s at most; the rest waits on disk for the next agent."""
        with self._changed:
            self._is_ending = True
            self._end_s = self._clock_s() + patience_s
            self._changed.notify()
        self._thread.join()
        self._channel.close()

    def _run(self) -> None:
        while self._step():
            with self._changed:
                if not self._answers and not self._is_ending:
                    self._changed.wait(_POLL_EVERY_S)
                elif not self._answers:
                    self._changed.wait(_POLL_EVERY_S / 5)

    def _step(self) -> bool:
        """Process answers, write new rows to disk, start sending. False when nothing remains to be sent."""
        with self._changed:
            answers, self._answers = self._answers, []
            for batch, answer in answers:
                self._process_answer(batch, answer)
            forming: dict[str, list[Array]] = {}
            is_free = len(self._in_flight) < MAX_IN_FLIGHT or self._forming_bytes > _MAX_BATCH_BYTES
            if self._forming and (is_free or self._is_ending):
                forming, self._forming, self._forming_bytes = self._forming, {}, 0
        if forming:
            tables = {name: np.concatenate(rows) for name, rows in forming.items()}
            with self._changed:
                for batch_tables in _split(tables):
                    self._spool.put(batch_tables)
        self._send_next()
        with self._changed:
            is_done = not self._spool.batches() or self._clock_s() >= self._end_s
            is_done = is_done or (self._away_since_s is not None and not self._in_flight)
            return not (self._is_ending and is_done and not self._forming)

    def _send_next(self) -> None:
        """Send the oldest batches that are not in flight; a single batch while the hub is unreachable."""
        if self._clock_s() < self._resume_s:
            return
        n_at_once = 1 if self._n_failures else MAX_IN_FLIGHT
        with self._changed:
            batches = [batch for batch in self._spool.batches() if batch.number not in self._in_flight]
            batches.sort(key=lambda batch: (self._n_failures_of[batch.number], batch.number))
            batches = batches[: max(0, n_at_once - len(self._in_flight))]
            self._in_flight |= {batch.number: batch for batch in batches}
        for batch in batches:
            try:
                self._channel.send(batch.batch_id, read(batch), self._answer_callback(batch))
            except Exception as error:  # noqa: BLE001 (one batch that cannot be sent must not hold up the rest)
                self._queue_answer(batch, Answer(Outcome.BAD_BATCH, reason=f"{batch.path.name}: {error}"))

    def _answer_callback(self, batch: SpooledBatch) -> Callable[[Answer], None]:
        return lambda answer: self._queue_answer(batch, answer)

    def _queue_answer(self, batch: SpooledBatch, answer: Answer) -> None:
        with self._changed:
            self._answers.append((batch, answer))
            self._changed.notify()

    def _process_answer(self, batch: SpooledBatch, answer: Answer) -> None:
        self._in_flight.pop(batch.number, None)
        if answer.outcome in (Outcome.ACKNOWLEDGED, Outcome.BAD_BATCH):
            self._n_failures, self._away_since_s, self._resume_s = 0, None, 0.0
            self._n_failures_of.pop(batch.number, None)
            with suppress(OSError):
                if answer.outcome is Outcome.ACKNOWLEDGED:
                    self._spool.done(batch)
                    self._n_acknowledged += batch.n_rows
                else:
                    self._spool.set_aside(batch)
                    self._reason_set_aside = answer.reason
            return
        if answer.outcome is Outcome.FAILED:
            self._n_failures_of[batch.number] += 1
        now_s = self._clock_s()
        if self._away_since_s is None:
            self._away_since_s = now_s
        self._reason = answer.reason
        if now_s < self._resume_s:  # several batches were in flight together: count their failures once
            return
        self._n_failures += 1
        self._resume_s = now_s + self._pause_s(answer)

    def _pause_s(self, answer: Answer) -> float:
        if answer.retry_after_s is not None:
            return answer.retry_after_s * (1 + self._jitter() / 4)
        if answer.outcome is Outcome.SHUT_OUT:
            return MAX_RETRY_S * (1 - self._jitter() / 2)
        doubled_s = FIRST_RETRY_S * 2 ** min(self._n_failures - 1, 16)
        return min(MAX_RETRY_S, doubled_s) * (1 - self._jitter() / 2)


def _split(tables: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The tables, split into batches below the hub's size limit."""
    n_bytes = sum(rows.nbytes for rows in tables.values())
    n_pieces = -(-n_bytes // _MAX_BATCH_BYTES)
    if n_pieces <= 1:
        return [dict(tables)]
    splits = {name: np.array_split(rows, n_pieces) for name, rows in tables.items()}
    return [{name: split[i] for name, split in splits.items() if len(split[i])} for i in range(n_pieces)]
