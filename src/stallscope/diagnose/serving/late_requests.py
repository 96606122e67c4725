"""Late requests: the part of each late request that took much longer than the same part of other requests.

The parts: `pickup` (in the socket until the server reads it), `first` (until the first token, or the first byte) and
`gap` (the longest time between two tokens). A request with a much longer prompt may take longer until its first token.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.serving.endpoints import between_ms, tokens_of
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

LONG_FACTOR = 4
MANY_WAITING = 3
"""A request that arrives while this many earlier requests wait for their first token waits in a queue."""

LONG_BYTES = 2000
"""A prompt is long from this many bytes on, if it also has LONG_FACTOR times the median of its path."""


@dataclass(frozen=True)
class Late:
    """A late part of a request. request: a row of REQUESTS. typical_ns: the same part of other requests.

    least_late_ns: the excess from which on it is late.
    """

    request: Array
    part: str
    begin_ns: int
    end_ns: int
    typical_ns: int
    least_late_ns: int

    @property
    def excess_ns(self) -> int:
        return self.end_ns - self.begin_ns - self.typical_ns


def late_requests(trace: Trace, rows: Array, limits: Thresholds) -> list[Late]:
    """The late part of each late request, of rows of one path; the part with the largest excess counts."""
    typical_gap_ns = int(between_ms(tokens_of(trace, rows)).get("p50", 0.0) * 1e6)
    is_long = is_long_prompt(rows)
    answered = rows["first_ns"] != UNKNOWN
    typical_first_ns = _typical_first_ns(rows[answered & ~is_long])
    late = []
    for row, long in zip(rows, is_long, strict=True):
        parts = [_part(row, "pickup", int(row["ts_ns"]), int(row["read_ns"]), 0, limits)]
        if row["first_ns"] != UNKNOWN and not long:
            times = int(row["read_ns"]), int(row["first_ns"]), typical_first_ns
            parts.append(_part(row, "first", *times, limits))
        if row["gap_at_ns"] != UNKNOWN:
            begin_ns = int(row["gap_at_ns"])
            times = begin_ns, begin_ns + int(row["gap_ns"]), typical_gap_ns
            parts.append(_part(row, "gap", *times, limits))
        worst = max(parts, key=lambda part: part.excess_ns)
        if worst.excess_ns >= worst.least_late_ns:
            late.append(worst)
    return late


def _typical_first_ns(rows: Array) -> int:
    """The typical time until the first token: of requests that did not queue, if there are any."""
    if not len(rows):
        return 0
    direct = rows[n_before(rows, rows["ts_ns"]) < MANY_WAITING]
    chosen = direct if len(direct) >= MANY_WAITING else rows
    return int(np.percentile(chosen["first_ns"] - chosen["read_ns"], 25, method="lower"))


def n_before(rows: Array, at_ns: Array) -> Array:
    """How many of these requests wait for their first token at each moment: int64 (n,)."""
    until_ns = np.where(rows["first_ns"] == UNKNOWN, rows["end_ns"], rows["first_ns"])
    began = np.searchsorted(np.sort(rows["ts_ns"]), at_ns, side="left")
    ended: Array = np.searchsorted(np.sort(until_ns), at_ns, side="right")
    return began - ended


def _part(row: Array, name: str, begin_ns: int, end_ns: int, typical_ns: int, limits: Thresholds) -> Late:
    least_ns = max(int((limits.late_request_factor - 1) * typical_ns), limits.late_request_ns)
    return Late(row, name, begin_ns, end_ns, typical_ns, least_ns)


def is_long_prompt(rows: Array) -> Array:
    """Whether a request has a much longer prompt than most requests: bool (n,)."""
    n_bytes = rows["request_bytes"]
    typical = np.median(n_bytes) if len(n_bytes) else 0
    return (n_bytes >= LONG_BYTES) & (n_bytes >= LONG_FACTOR * typical)
