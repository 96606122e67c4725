"""The engine's own spans of requests, joined with the recorded requests by the hash of their id.

The engine's times begin when its front end has read and tokenized a request, and end before the response is written.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import RequestFlag
from stallscope.events.request_times import is_aborted
from stallscope.events.trace import Trace

_TIMES = ("queue", "prefill", "decode", "first", "whole")


@dataclass(frozen=True)
class JoinedSpans:
    """n: requests with a span. own_ms: means of the engine's times. recorded_ms: means of the recorded times.

    The times in recorded_ms are means of the same requests in both: n_recorded of each.
    """

    n: int
    own_ms: dict[str, float]
    recorded_ms: dict[str, float]
    n_recorded: dict[str, int]


def joined_spans(trace: Trace, requests: Array) -> JoinedSpans | None:
    """The spans of some requests; None without a span. A repeated id is left out, as it may mean several requests."""
    spans, requests = _unique(trace.engine_spans), _unique(requests)
    _, of_span, of_request = np.intersect1d(spans["id_hash"], requests["id_hash"], return_indices=True)
    spans, requests = spans[of_span], requests[of_request]
    if not len(spans):
        return None
    recorded_ns = {
        "first": requests["first_ns"] - requests["ts_ns"],
        "whole": requests["end_ns"] - requests["ts_ns"],
    }
    is_whole = ~is_aborted(requests)
    is_recorded = {
        # The first byte of a response in one part comes at its end.
        "first": is_whole & (requests["first_ns"] != UNKNOWN) & (requests["flags"] & RequestFlag.STREAMS > 0),
        "whole": is_whole,
    }
    own_ms, recorded_ms, n_recorded = {}, {}, {}
    for name in _TIMES:
        own_ns = spans[f"{name}_ns"]
        is_used = (own_ns != UNKNOWN) & is_recorded.get(name, True)
        if not is_used.any():
            continue
        own_ms[name] = _mean_ms(own_ns[is_used])
        if name in recorded_ns:
            recorded_ms[name] = _mean_ms(recorded_ns[name][is_used])
            n_recorded[name] = int(is_used.sum())
    return JoinedSpans(len(spans), own_ms, recorded_ms, n_recorded)


def _mean_ms(times_ns: Array) -> float:
    return round(float(times_ns.mean()) / 1e6, 3)


def _unique(rows: Array) -> Array:
    rows = rows[rows["id_hash"] != UNKNOWN]
    _, first, n = np.unique(rows["id_hash"], return_index=True, return_counts=True)
    out: Array = rows[first[n == 1]]
    return out
