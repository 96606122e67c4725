"""The engine's own spans of requests, joined with the recorded requests by the hash of their id.

The engine's times begin when its front end has read and tokenized a request, and end before the response is written.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

_TIMES = ("queue", "prefill", "decode", "first", "whole")


@dataclass(frozen=True)
class JoinedSpans:
    """n: requests with a span. own_ms: means of the engine's times. recorded_ms: means of the recorded times."""

    n: int
    own_ms: dict[str, float]
    recorded_ms: dict[str, float]


def joined_spans(trace: Trace, requests: Array) -> JoinedSpans | None:
    """The spans of some requests; None without a span. A repeated id is left out, as it may mean several requests."""
    spans, requests = _unique(trace.engine_spans), _unique(requests)
    _, of_span, of_request = np.intersect1d(spans["id_hash"], requests["id_hash"], return_indices=True)
    spans, requests = spans[of_span], requests[of_request]
    if not len(spans):
        return None
    own_ms = {
        name: round(float(known.mean()) / 1e6, 3)
        for name in _TIMES
        if len(known := spans[f"{name}_ns"][spans[f"{name}_ns"] != UNKNOWN])
    }
    has_first = requests["first_ns"] != UNKNOWN
    recorded_ns = {
        "first": (requests["first_ns"] - requests["ts_ns"])[has_first],
        "whole": requests["end_ns"] - requests["ts_ns"],
    }
    means_ms = {
        name: round(float(times.mean()) / 1e6, 3) for name, times in recorded_ns.items() if len(times)
    }
    return JoinedSpans(len(spans), own_ms, means_ms)


def _unique(rows: Array) -> Array:
    rows = rows[rows["id_hash"] != UNKNOWN]
    _, first, n = np.unique(rows["id_hash"], return_index=True, return_counts=True)
    out: Array = rows[first[n == 1]]
    return out
