"""Refused requests by peer address and token: beyond a few a minute, a peer gets a short answer and no audit line.

A client without a token can send thousands of requests a second. Individual lines for their refusals would push
all other lines out of the audit log. So the first refusals of a peer in a minute get a line each, and the rest get
one summary per address and minute. A valid token from the same address is not affected.
"""

import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from stallscope.serve.audit import AuditLog

WINDOW_S = 60.0
_MAX_PEERS = 10_000
_OTHERS = "other addresses"
_CHECK_EVERY_S = 1.0


@dataclass
class _MinuteCount:
    began_s: float
    began_at: float
    n: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


class Refusals:
    """Counts refusals and writes the summaries. Thread-safe; close() writes the remaining summaries."""

    def __init__(
        self, audit: AuditLog, *, per_minute: int = 60, clock_s: Callable[[], float] = time.monotonic
    ):
        self._audit, self._per_minute, self._clock_s = audit, per_minute, clock_s
        self._lock = threading.Lock()
        self._minutes: dict[tuple[str, str | None], _MinuteCount] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
        self._thread.start()

    def is_over(self, client: str, token_id: str | None) -> bool:
        """Whether this peer was refused too often in this minute."""
        with self._lock:
            minute = self._minutes.get((network(client), token_id))
            return minute is not None and minute.n >= self._per_minute

    def add(self, client: str, token_id: str | None, reason: str) -> bool:
        """Count a refusal. Returns whether it gets an audit line; otherwise the summary includes it."""
        key = (network(client), token_id)
        with self._lock:
            if key not in self._minutes and len(self._minutes) >= _MAX_PEERS:
                key = (_OTHERS, None)
            minute = self._minutes.setdefault(key, _MinuteCount(self._clock_s(), time.time()))
            minute.n += 1
            if minute.n > self._per_minute:
                minute.left_out[reason] += 1
            return minute.n <= self._per_minute

    def summarise(self, *, is_end: bool = False) -> None:
        """Write the summaries of the past minutes; is_end: of all minutes."""
        border_s = self._clock_s() - WINDOW_S
        with self._lock:
            over = {key: m for key, m in self._minutes.items() if is_end or m.began_s <= border_s}
            for key in over:
                del self._minutes[key]
        for (client, token_id), minute in over.items():
            if minute.left_out:
                since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(minute.began_at))
                n, reasons = minute.left_out.total(), dict(minute.left_out)
                self._audit.info(
                    "refused_summary", client=client, token_id=token_id, since=since, n=n, reasons=reasons
                )

    def close(self) -> None:
        """Stop, and write the summary of the current minute."""
        self._ended.set()
        self._thread.join()
        self.summarise(is_end=True)

    def _run(self) -> None:
        while not self._ended.wait(_CHECK_EVERY_S):
            self.summarise()


def network(client: str) -> str:
    """The address; for IPv6 the 64-bit network, because one peer owns all its addresses."""
    with suppress(ValueError):
        address = ipaddress.ip_address(client)
        if address.version == 6:
            if address.ipv4_mapped:
                return str(address.ipv4_mapped)
            return str(ipaddress.ip_network((address, 64), strict=False))
    return client
