"""Handles one request on any endpoint: authenticates, decodes, stores; answers when the rows are on disk."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from stallscope.errors import (
    BadInput,
    NotAllowed,
    NotAuthenticated,
    Overloaded,
    StallscopeError,
    StorageFailed,
    TooLarge,
)
from stallscope.health.cohorts import Cohorts
from stallscope.receive import arrow, arrow_batches, otlp_requests
from stallscope.receive.admission import SharedLimit
from stallscope.receive.arrow import Request as ArrowRequest
from stallscope.receive.counters import Counters
from stallscope.receive.error_status import Refusal, refusal
from stallscope.receive.micro_batches import SMALL_BYTES, MicroBatches, Waiting
from stallscope.store.hub.batches import Batch, BatchMember, Receipt
from stallscope.store.hub.store_protocol import Store

CAPABILITIES: Mapping[str, object] = {"otlp": list(otlp_requests.SIGNALS), "arrow": arrow.VERSION}
"""The capabilities that senders can read without a token."""

_SMALL_ARROW_BYTES = 1 << 16
"""As sent: a larger request has more than SMALL_BYTES after decompression."""

_BYTES_A_REQUEST = 1 << 20
"""Of the hub's memory: a request in flight holds a thread and its message."""

_LOG = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0


class Sender(Protocol):
    """The sender of a request, as seen by the receivers."""

    @property
    def tenant(self) -> str:
        """The tenant that will own the rows."""

    def require(self, scope: str) -> None:
        """Raises NotAllowed unless the sender has the scope."""


Authenticate = Callable[[Mapping[str, str]], Sender]
"""From the headers (gRPC: metadata), names in lower case, to the sender. Raises NotAuthenticated, NotAllowed."""

Audit = Callable[[str, StallscopeError], None]
"""Records that a peer address was refused for its token."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of a request, and of all requests together.

    max_bytes: of one request, after decompression; max_json_bytes: in JSON, which needs many times the memory.
    max_decoded_bytes: of the rows of one request. max_bodies_bytes: of all requests that are read but not decoded yet.
    max_requests: in flight at the same time. max_reading: requests whose message is still arriving, which gRPC keeps in
    memory. max_reading_s: longest time for a message to arrive. patience_s: wait for room before a request is refused,
    for the arrival of its message and again for its decoding: together with the wait for the commit less than 2 s.
    max_waiting_s: wait for the commit.
    max_at_once: requests that are decoded at the same time. More than the number of processors would only compete with
    each other and with the thread that commits, for which all of them wait.
    """

    max_bytes: int = 32 << 20
    max_json_bytes: int = 4 << 20
    max_decoded_bytes: int = 128 << 20
    max_bodies_bytes: int = 256 << 20
    max_requests: int = 1_024
    max_reading: int = 32
    max_reading_s: float = 20.0
    patience_s: float = 0.5
    max_waiting_s: float = 30.0
    max_at_once: int = field(default_factory=lambda: os.cpu_count() or 2)

    @classmethod
    def within(cls, memory_bytes: int) -> "RequestLimits":
        """The limits of a hub with this memory limit."""
        eighth = memory_bytes // 8
        return cls(
            max_bytes=min(cls.max_bytes, memory_bytes // 64),
            max_decoded_bytes=min(cls.max_decoded_bytes, memory_bytes // 16),
            max_bodies_bytes=min(cls.max_bodies_bytes, eighth),
            max_requests=max(128, min(cls.max_requests, memory_bytes // _BYTES_A_REQUEST)),
            max_reading=max(4, min(cls.max_reading, eighth // cls.max_bytes)),
            max_at_once=max(1, min(os.cpu_count() or 2, eighth // cls.max_bytes)),
        )


@dataclass(frozen=True)
class Accepted:
    """An accepted request. future: resolves when the rows are on disk; answer: the response message."""

    future: "Future[Receipt]"
    answer: Callable[[Receipt], Any]


@dataclass(eq=False)
class _SmallLogs:
    """A logs request that waits for its decoding. n_rejected: its rejected records, once it is decoded."""

    body: bytes
    n_rejected: int = 0


class Receiver:
    """The part shared by both OTLP ports and the Arrow endpoint. Thread-safe.

    requests, reading, bodies: the bounds on requests in flight, which the ports hold.
    """

    def __init__(
        self,
        store: Store,
        authenticate: Authenticate,
        *,
        bounds: RequestLimits | None = None,
        audit: Audit | None = None,
        owner_of: Callable[[str, str], str] | None = None,
    ):
        """owner_of: where agents of a tenant's cluster should send, HOST:PORT; "": here. None: a hub alone."""
        self.bounds = bounds or RequestLimits()
        self.counters = Counters()
        self.requests = SharedLimit(self.bounds.max_requests, "requests")
        self.reading = SharedLimit(self.bounds.max_reading, "incoming messages")
        self.bodies = SharedLimit(self.bounds.max_bodies_bytes, "bytes of requests")
        self.cohorts = Cohorts()
        self._store, self._authenticate, self._audit = store, authenticate, audit
        self._owner_of = owner_of
        self._logged = ("", 0.0)
        self._decoder = otlp_requests.Decoder(max_bytes=self.bounds.max_decoded_bytes)
        self._decoding = threading.BoundedSemaphore(self.bounds.max_at_once)
        self._small_logs = MicroBatches(
            self._store_logs, room=self.bodies, at_work=self._at_work, announced=store.announced
        )
        self._small_arrow = MicroBatches(
            self._store_arrow, room=self.bodies, at_work=self._at_work, announced=store.announced
        )

    def sender(self, headers: Mapping[str, str]) -> Sender:
        """The sender, authenticated before the body is read. Raises NotAuthenticated, NotAllowed."""
        sender = self._authenticate(headers)
        sender.require("ingest")
        return sender

    def check_room(self) -> None:
        """Raises Overloaded while the store accepts no more rows, before a message is decoded."""
        self._store.check_room()

    def is_queued(self, signal: str | None, n_bytes: int, *, is_json: bool = False) -> bool:
        """Whether a request is queued and decoded later together with others, so that accepting it takes no time.

        signal: None is the Arrow endpoint.
        """
        if signal is None:
            return n_bytes <= _SMALL_ARROW_BYTES
        return signal == "logs" and not is_json and n_bytes <= SMALL_BYTES

    def otlp(self, signal: str, body: bytes, tenant: str, *, is_json: bool = False) -> Accepted:
        """An OTLP request, decompressed. Raises StallscopeError."""
        self._check_size(body)
        self.check_room()
        if self.is_queued(signal, len(body), is_json=is_json):
            request = _SmallLogs(body)
            future = self._small_logs.submit(request, tenant, n_bytes=len(body))
            return Accepted(future, lambda _receipt: otlp_requests.response(signal, request.n_rejected))
        with self._store.announced(), self._at_work():
            if is_json and len(body) > self.bounds.max_json_bytes:
                raise TooLarge(
                    f"a JSON request may have at most {self.bounds.max_json_bytes:,} bytes; use protobuf"
                )
            limit = self.bounds.max_decoded_bytes
            plain = otlp_requests.json_to_protobuf(signal, body, limit=limit) if is_json else body
            decoded = self._decoder.decode(signal, plain, tenant)
            self._count(signal, decoded)
            future = self._appended(decoded.batch)
        return Accepted(future, lambda _receipt: otlp_requests.response(signal, decoded.n_rejected))

    def arrow(self, body: bytes, tenant: str) -> Accepted:
        """A request of the Arrow endpoint. Raises StallscopeError."""
        self._check_size(body)
        self.check_room()
        cluster = arrow.cluster_of(body) if self._owner_of else ""
        if self.is_queued(None, len(body)):
            future = self._small_arrow.submit(body, tenant, n_bytes=len(body))
        else:
            with self._store.announced(), self._at_work():
                request = arrow.read(body, limit=self.bounds.max_decoded_bytes)
                future = self._appended(self._arrow_batch(request, tenant))
        return Accepted(
            future,
            lambda receipt: {
                "n_rows": receipt.n_rows,
                "is_duplicate": receipt.is_duplicate,
                **self._direction(tenant, cluster),
            },
        )

    def _direction(self, tenant: str, cluster: str) -> dict[str, str]:
        """The hub that an agent should send to, if another hub owns its cluster."""
        owner = self._owner_of(tenant, cluster) if self._owner_of else ""
        if not owner:
            return {}
        self.counters.add(agents_directed=1)
        return {"owner": owner}

    def _store_logs(self, group: "list[Waiting[_SmallLogs]]", tenant: str) -> None:
        """Store small logs requests of a tenant together, or each alone if they cannot be decoded together."""
        bodies = [entry.request.body for entry in group]
        together = self._decoder.logs_together(bodies, tenant) if len(group) > 1 else None
        if together is None:
            for entry in group:
                self._store_alone(entry, partial(self._decoded_logs, entry.request, tenant))
            return
        self.counters.add(logs_received=sum(together.n_records), records_rejected=sum(together.n_rejected))
        members = []
        for number, entry in enumerate(group):
            entry.request.n_rejected = together.n_rejected[number]
            members.append(BatchMember(together.batch_ids[number], together.n_rows[number], entry.stored))
        self._append_together(together.batch, members)

    def _decoded_logs(self, request: "_SmallLogs", tenant: str) -> Batch:
        decoded = self._decoder.decode("logs", request.body, tenant)
        self._count("logs", decoded)
        request.n_rejected = decoded.n_rejected
        return decoded.batch

    def _store_arrow(self, group: list[Waiting[bytes]], tenant: str) -> None:
        """Store small requests of a tenant together if they have the same tables and columns."""
        small: list[tuple[Waiting[bytes], ArrowRequest]] = []
        for entry in group:
            try:
                request = arrow.read(entry.request, limit=self.bounds.max_decoded_bytes)
            except StallscopeError as error:
                entry.stored.set_exception(error)
                continue
            if len(group) > 1 and request.n_bytes <= SMALL_BYTES:
                small.append((entry, request))
            else:
                self._store_alone(entry, partial(self._arrow_batch, request, tenant))
        for numbers in arrow_batches.alike([request for _, request in small]):
            self._store_alike([small[number] for number in numbers], tenant)

    def _store_alike(self, group: list[tuple[Waiting[bytes], ArrowRequest]], tenant: str) -> None:
        """Store requests with the same tables and columns; decoding each alone finds an invalid request."""
        requests = [request for _, request in group]
        try:
            batch, n_rows = arrow_batches.together(requests, tenant)
        except (BadInput, pa.ArrowException):
            for entry, request in group:
                self._store_alone(entry, partial(self._arrow_batch, request, tenant))
            return
        members = [
            BatchMember(request.batch_id, rows, entry.stored)
            for (entry, request), rows in zip(group, n_rows, strict=True)
        ]
        self.counters.add(arrow_received=batch.n_rows)
        self._append_together(batch, members)

    def _store_alone(self, entry: Waiting[Any], decoded: Callable[[], Batch]) -> None:
        try:
            batch = decoded()
            n_rows = {name: len(rows) for name, rows in batch.tables.items()}
            self._append_together(batch, [BatchMember(batch.batch_id, n_rows, entry.stored)])
        except Exception as error:  # noqa: BLE001 (its sender gets it)
            entry.stored.set_exception(error)

    def _append_together(self, batch: Batch, members: list[BatchMember]) -> None:
        """Store the rows of requests; a request without rows succeeds."""
        if batch.tables:
            self._store.append_together(batch, members)
            return
        for member in members:
            member.stored.set_result(Receipt(0, False, 0))

    def _count(self, signal: str, decoded: otlp_requests.Decoded) -> None:
        self.counters.add(**{f"{signal}_received": decoded.n_records, **decoded.counts})
        if decoded.n_rejected:
            self.counters.add(records_rejected=decoded.n_rejected)

    def refused(self, error: Exception, *, peer: str) -> Refusal:
        """The answer to an error. Counts the error, and audits refused tokens. peer: its address."""
        answer = refusal(error)
        self.counters.add(requests_refused=1, **{f"refused_{answer.grpc.lower()}": 1})
        if isinstance(error, NotAuthenticated | NotAllowed) and self._audit:
            self._audit(peer, error)
        if not isinstance(error, StallscopeError):
            _LOG.error("a request failed", exc_info=error)
        elif isinstance(error, StorageFailed):
            self._log_once_a_minute(str(error))
        return answer

    def _log_once_a_minute(self, message: str) -> None:
        now_s = time.monotonic()
        if self._logged[0] != message or now_s - self._logged[1] > _LOG_EVERY_S:
            self._logged = (message, now_s)
            _LOG.error("a request failed: %s", message)

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
            "requests_under_way": self.requests.n_held,
            "request_bytes_under_way": self.bodies.n_held,
            "hot_bytes": self._store.hot_bytes,
            **asdict(self._store.kept),
            **self.cohorts.numbers(),
            "listener_failures": stored.listener_failures,
        }

    def _arrow_batch(self, request: ArrowRequest, tenant: str) -> Batch:
        batch = arrow.batch(request, tenant)
        self.counters.add(arrow_received=batch.n_rows)
        return batch

    def _appended(self, batch: Batch) -> "Future[Receipt]":
        if batch.tables:
            return self._store.append(batch)
        done: Future[Receipt] = Future()  # nothing to store: an empty request succeeds
        done.set_result(Receipt(0, False, 0))
        return done

    def _check_size(self, body: bytes) -> None:
        if len(body) > self.bounds.max_bytes:
            raise TooLarge(f"the request exceeds {self.bounds.max_bytes:,} bytes; send smaller requests")

    def _at_work(self) -> "_DecodingSlot":
        if not self._decoding.acquire(timeout=self.bounds.patience_s):
            raise Overloaded("too many requests are being decoded; send again later", 2.0)
        return _DecodingSlot(self._decoding)


@dataclass(frozen=True)
class _DecodingSlot:
    """A decoding slot, given back at the end of the with block."""

    slot: threading.BoundedSemaphore

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.slot.release()
