"""Live updates: one feed for each tenant, and any number of event streams that read it.

A feed compares the rows of the list of jobs once a second, and gives each changed row the next version. A browser that
reconnects sends the last version that it has, and gets the rows that have changed since.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread

from stallscope.errors import StallscopeError
from stallscope.serve.http_errors import public_message

_EVERY_S = 1.0
_MAX_STREAMS = 64
"""Streams of one tenant: a browser opens one for all of its tabs."""


@dataclass
class Feed:
    """The rows of one tenant, each with the version in which it changed; None: the job has left the list."""

    rows_now: Callable[[], list[dict[str, Any]]]
    clock_s: Callable[[], float] = time.monotonic
    version: int = 0
    rows: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    n_streams: int = 0
    _at_s: float = float("-inf")
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refresh(self) -> None:
        """Compare the rows, unless that was done within the last second."""
        async with self._lock:
            if self.clock_s() - self._at_s < _EVERY_S / 2:
                return
            rows = await anyio.to_thread.run_sync(self.rows_now)
            self._at_s = self.clock_s()
        texts = {row["job"]: json.dumps(row, separators=(",", ":")) for row in rows}
        gone = {key: None for key, (_, text) in self.rows.items() if key not in texts and text is not None}
        for key, text in (texts | gone).items():
            if key not in self.rows or self.rows[key][1] != text:
                self.version += 1
                self.rows[key] = self.version, text

    def since(self, version: int) -> list[tuple[int, str, str | None]]:
        """The changes after a version, in order: version, job, row."""
        changes = [(at, key, text) for key, (at, text) in self.rows.items() if at > version]
        return sorted(changes, key=lambda change: change[0])


class Feeds:
    """The feeds of all tenants. begun: distinguishes versions of this start of the hub."""

    def __init__(self, rows: Callable[[str], list[dict[str, Any]]]):
        self._rows = rows
        self._feeds: dict[str, Feed] = {}
        self.begun = f"{time.time_ns() // 1_000_000:x}"
        self.ended = False

    def of(self, tenant: str) -> Feed:
        """The feed of a tenant."""
        return self._feeds.setdefault(tenant, Feed(lambda: self._rows(tenant)))

    def has_room(self, tenant: str) -> bool:
        """Whether the tenant may open another stream."""
        return self.of(tenant).n_streams < _MAX_STREAMS

    async def events(
        self,
        tenant: str,
        last_event_id: str,
        *,
        is_signed_in: Callable[[], bool],
        only: str = "",
        health: Callable[[], dict[str, Any]] = dict,
    ) -> AsyncIterator[str]:
        """The text of a stream. only: the job of a share link; "" for all jobs. Ends when the session ends."""
        feed = self.of(tenant)
        begun, _, version_text = last_event_id.partition("-")
        version = int(version_text) if begun == self.begun and version_text.isdigit() else 0
        feed.n_streams += 1
        last_health = ""
        try:
            yield "retry: 2000\n\n"
            while not self.ended:
                if not is_signed_in():
                    yield "event: signed_out\ndata: {}\n\n"
                    return
                try:
                    await feed.refresh()
                    text = json.dumps(health(), separators=(",", ":"))
                except StallscopeError as error:
                    yield f"event: failed\ndata: {json.dumps(public_message(error))}\n\n"
                    await asyncio.sleep(_EVERY_S)
                    continue
                for at, key, row in feed.since(version):
                    version = at
                    if only in ("", key):
                        kind, data = ("job", row) if row is not None else ("gone", json.dumps(key))
                        yield f"id: {self.begun}-{at}\nevent: {kind}\ndata: {data}\n\n"
                if text != last_health:
                    last_health = text
                    yield f"event: health\ndata: {text}\n\n"
                yield f"event: tick\ndata: {time.time_ns() // 1_000_000}\n\n"
                await asyncio.sleep(_EVERY_S)
        finally:
            feed.n_streams -= 1
