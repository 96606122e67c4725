"""Spans of late requests: a request is late if it takes four times the median of its endpoint, and 0.1 s longer.

The median is of the last requests of the endpoint. The id of a span derives from machine, process and arrival, so that
a repeated span replaces the first. The reason for a delay is in the incident, whose span covers all late requests.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stallscope.events.layout import UNKNOWN, Array

LATE_FACTOR, LATE_NS = 4.0, 100_000_000
_KEPT, _MIN_KNOWN = 500, 20
_MAX_ENDPOINTS = 512
_AT_ONCE = 20
"""Spans of one batch of rows, the latest requests first: a batch has the requests of a second."""

_DELAYED_BEFORE = {"first": "before its first token", "gap": "between two tokens"}


@dataclass
class LateSpans:
    """The times of each endpoint's last requests. node: the name of this machine."""

    node: str
    _known: dict[tuple[bytes, ...], dict[str, deque[int]]] = field(default_factory=dict)

    def take(self, rows: Array, offset_ns: int | None = None) -> Iterator[dict[str, Any]]:
        """The spans of the late requests of some rows of REQUESTS, as fields of otlp_messages.Incident.

        offset_ns: from the monotonic clock to the wall clock; None: its value now.
        """
        if offset_ns is None:
            offset_ns = time.time_ns() - time.monotonic_ns()
        late = [(excess_ns, row, part) for row in rows for excess_ns, part in [self._excess(row)] if part]
        late.sort(key=lambda each: -each[0])
        for excess_ns, row, part in late[:_AT_ONCE]:
            yield self._span(row, part, excess_ns, offset_ns)

    def _excess(self, row: Array) -> tuple[int, str]:
        """The excess of the latest part of a request, and its name; an empty name if the request is not late."""
        times_ns = {"gap": int(row["gap_ns"])} if row["gap_at_ns"] != UNKNOWN else {}
        if row["first_ns"] != UNKNOWN:
            times_ns["first"] = int(row["first_ns"] - row["ts_ns"])
        key = tuple(bytes(row[name]) for name in ("engine", "model", "path"))
        if key not in self._known and len(self._known) >= _MAX_ENDPOINTS:
            return 0, ""
        parts = self._known.setdefault(key, {})
        worst = 0, ""
        for part, ns in times_ns.items():
            known = parts.setdefault(part, deque(maxlen=_KEPT))
            if len(known) >= _MIN_KNOWN:
                typical_ns = int(np.median(known))
                if ns - typical_ns >= max((LATE_FACTOR - 1) * typical_ns, LATE_NS):
                    worst = max(worst, (ns - typical_ns, part))
            known.append(ns)
        return worst

    def _span(self, row: Array, part: str, excess_ns: int, offset_ns: int) -> dict[str, Any]:
        def text(name: str) -> str:
            return bytes(row[name]).decode("utf-8", "replace")

        attributes: dict[str, Any] = {
            "http.request.method": text("method"),
            "url.path": text("path"),
            "gen_ai.request.model": text("model"),
            "stallscope.engine": text("engine"),
            "process.pid": int(row["pid"]),
            "stallscope.late_part": part,
            "stallscope.late_ms": round(excess_ns / 1e6, 3),
            "stallscope.n_tokens": int(row["n_tokens"]),
            "stallscope.longest_gap_ms": round(int(row["gap_ns"]) / 1e6, 3),
        }
        if row["status"] != UNKNOWN:
            attributes["http.response.status_code"] = int(row["status"])
        if row["first_ns"] != UNKNOWN:
            first_ms = round(int(row["first_ns"] - row["ts_ns"]) / 1e6, 3)
            attributes["stallscope.time_to_first_token_ms"] = first_ms
        return {
            "incident_id": f"request {self.node} {row['pid']} {row['tid']} {row['ts_ns']}",
            "name": f"{text('method')} {text('path')}",
            "begin_ns": int(row["ts_ns"]) + offset_ns,
            "end_ns": int(row["end_ns"]) + offset_ns,
            "summary": f"delayed by {excess_ns / 1e6:.0f} ms {_DELAYED_BEFORE[part]}",
            "attributes": {name: value for name, value in attributes.items() if value != ""},
            "is_request": True,
        }
