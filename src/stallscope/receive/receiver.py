"""One request, whatever way it came: who sends, decode, store; the answer follows when the rows are on disk."""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from stallscope.errors import Overloaded, StallscopeError, TooLarge
from stallscope.receive import arrow, arrow_batches, otlp
from stallscope.receive.counters import Counters
from stallscope.receive.error_status import Refusal, refusal
from stallscope.receive.micro_batches import SMALL_BYTES, Gathering
from stallscope.store.hub.store import Batch, HubStore, Receipt

CAPABILITIES: Mapping[str, object] = {"otlp": list(otlp.SIGNALS), "arrow": arrow.VERSION}
"""What senders may know of this hub without a token."""

_LOG = logging.getLogger(__name__)


class Sender(Protocol):
    """Who sends, as far as the receivers need to know."""

    @property
    def tenant(self) -> str:
        """Whose the rows will be."""

    def require(self, scope: str) -> None:
        """Raises NotAllowed unless the sender has the scope."""


Authenticate = Callable[[Mapping[str, str]], Sender]
"""From the headers (gRPC: metadata), names in lower case, to who sends. Raises NotAuthenticated, NotAllowed."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of a request. max_bytes: after decompression.

    max_at_once: requests that are decoded and packed at one time; more than there are processors would only take turns
    with one another and with the thread that commits, which all of them wait for.
    """

    max_bytes: int = 32 << 20
    max_at_once: int = field(default_factory=lambda: os.cpu_count() or 2)
    max_waiting_s: float = 30.0
    workers: int = 64


@dataclass(frozen=True)
class Accepted:
    """A request that has been taken: its future resolves when it is on disk; answer() is then its bytes' message."""

    future: "Future[Receipt]"
    answer: Callable[[Receipt], Any]


class Receiver:
    """What both OTLP ports and the Arrow lane share. For any number of threads."""

    def __init__(self, store: HubStore, authenticate: Authenticate, *, bounds: Bounds | None = None):
        self.bounds = bounds or Bounds()
        self.counters = Counters()
        self._store, self._authenticate = store, authenticate
        self._decoder = otlp.Decoder()
        self._decoding = threading.BoundedSemaphore(self.bounds.max_at_once)
        self._small_logs = Gathering(
            lambda body, tenant: self._decoder.decode("logs", body, tenant),
            self._decoder.logs_together,
            at_work=self._at_work,
        )
        self._small_arrow = Gathering(arrow.batch, arrow_batches.batches, at_work=self._at_work)

    def sender(self, headers: Mapping[str, str]) -> Sender:
        """Who sends; looked at before the body is. Raises NotAuthenticated, NotAllowed."""
        sender = self._authenticate(headers)
        sender.require("ingest")
        return sender

    def otlp(self, signal: str, body: bytes, tenant: str, *, is_json: bool = False) -> Accepted:
        """An OTLP request, not compressed any more. Raises StallscopeError."""
        self._check_size(body)
        are_gathered = signal == "logs" and not is_json and len(body) <= SMALL_BYTES
        with self._store.announced(), nullcontext() if are_gathered else self._at_work():
            if are_gathered:
                decoded = self._small_logs.decode(body, tenant, n_bytes=len(body))
            else:
                plain = otlp.json_to_protobuf(signal, body) if is_json else body
                decoded = self._decoder.decode(signal, plain, tenant)
            self.counters.add(**{f"{signal}_received": decoded.n_records, **decoded.counts})
            future = self._appended(decoded.batch)
        if decoded.n_rejected:
            self.counters.add(records_rejected=decoded.n_rejected)
        return Accepted(future, lambda _receipt: otlp.response(signal, decoded))

    def arrow(self, body: bytes, tenant: str) -> Accepted:
        """A request of the Arrow lane. Raises StallscopeError."""
        self._check_size(body)
        with self._store.announced():
            with self._at_work():
                request = arrow.read(body, limit=4 * self.bounds.max_bytes)
                n_bytes = request.n_bytes
                are_gathered = n_bytes <= SMALL_BYTES
                if not are_gathered:
                    future = self._arrow_appended(arrow.batch(request, tenant))
            if are_gathered:
                future = self._arrow_appended(self._small_arrow.decode(request, tenant, n_bytes=n_bytes))
        return Accepted(
            future,
            lambda receipt: {"n_rows": receipt.n_rows, "is_duplicate": receipt.is_duplicate},
        )

    def refused(self, error: Exception) -> Refusal:
        """What a sender is told of an error; the error is counted, and written down if it is ours."""
        told = refusal(error)
        self.counters.add(requests_refused=1, **{f"refused_{told.grpc.lower()}": 1})
        if not isinstance(error, StallscopeError):
            _LOG.error("a request failed", exc_info=error)
        return told

    def numbers(self) -> dict[str, float]:
        """All counters of receivers and store, for /metrics."""
        rows, n_bytes = self._store.queued()
        stored = self._store.counters
        return {
            **self.counters.read(),
            "queue_rows": rows,
            "queue_bytes": n_bytes,
            "rows_stored": stored.rows,
            "batches_stored": stored.batches,
            "batches_duplicate": stored.duplicates,
            "batches_refused": stored.refused,
            "batches_failed": stored.failed,
            "commits": stored.commits,
            "commit_seconds": stored.commit_s,
            "longest_hold_seconds": stored.longest_hold_s,
            **asdict(self._store.kept),
            "listener_failures": stored.listener_failures,
        }

    def _arrow_appended(self, batch: Batch) -> "Future[Receipt]":
        self.counters.add(arrow_received=batch.n_rows)
        return self._appended(batch)

    def _appended(self, batch: Batch) -> "Future[Receipt]":
        if batch.tables:
            return self._store.append(batch)
        done: Future[Receipt] = Future()  # nothing to store: an empty request is a good one
        done.set_result(Receipt(0, False, 0))
        return done

    def _check_size(self, body: bytes) -> None:
        if len(body) > self.bounds.max_bytes:
            raise TooLarge(f"a request may hold {self.bounds.max_bytes:,} bytes: send smaller ones")

    def _at_work(self) -> "_Held":
        if not self._decoding.acquire(timeout=self.bounds.max_waiting_s):
            raise Overloaded("too many requests are being decoded; send again later", 2.0)
        return _Held(self._decoding)


@dataclass(frozen=True)
class _Held:
    """A place among those that decode, given back at the end of the with block."""

    place: threading.BoundedSemaphore

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.place.release()
