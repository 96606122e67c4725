"""Late requests: the part of each late request that took much longer than the same part of other requests.

The parts: `pickup` (in the socket until the server reads it), `first` (until the first token, or the first byte) and
`gap` (the longest time between two tokens). A request with a longer prompt may take longer until its first token, and a
response that is not streamed takes longer if it has more bytes. Of requests that arrived before the first answer on
their path, only the gaps after the first complete response count: before it, the engine loads, compiles and warms up.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.serving.endpoints import between_ms, tokens_of
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import RequestFlag
from stallscope.events.trace import Trace

LONG_FACTOR = 4
MANY_WAITING = 3
"""A request that arrives while this many earlier requests wait for their first token waits in a queue."""

MANY_LONGER = 5
"""The growth of a time with the bytes of a request is known from this number of longer requests on."""

LONGER_FACTOR = 1.5
"""A request is longer than others from this multiple of the median on."""

LONG_BYTES = 2000
"""A prompt is long from this many bytes on, if it also has LONG_FACTOR times the median of its path."""


OVERTAKEN = 0.1
"""Requests do not queue if more than this share is overtaken by later requests, by more than this share of a wait."""

EXACT = 0.1
"""First tokens follow the ends of requests if the times between them vary by less than this share of the waits."""

SAME_NUMBER = 0.7
"""An engine that is full answers the same number of requests for this share of the time in which others wait."""


@dataclass(frozen=True)
class Late:
    """A late part of a request. request: a row of REQUESTS. typical_ns: the same part of other requests.

    min_late_ns: the excess from which on it is late.
    """

    request: Array
    part: str
    begin_ns: int
    end_ns: int
    typical_ns: int
    min_late_ns: int

    @property
    def excess_ns(self) -> int:
        return self.end_ns - self.begin_ns - self.typical_ns


def late_requests(trace: Trace, rows: Array, limits: Thresholds) -> list[Late]:
    """The late part of each late request, of rows of one path; the part with the largest excess counts."""
    typical_gap_ns = int(between_ms(tokens_of(trace, rows)).get("p50", 0.0) * 1e6)
    is_long = is_long_prompt(rows)
    typical_first_ns = _typical_first_ns(rows, is_long)
    complete_ns = _first_complete_ns(rows)
    late = []
    for row, long, warm, first_ns in zip(
        rows, is_long, is_warm(rows), typical_first_ns.tolist(), strict=True
    ):
        parts = []
        if warm:
            parts.append(_part(row, "pickup", int(row["ts_ns"]), int(row["read_ns"]), 0, limits))
        if warm and row["first_ns"] != UNKNOWN and not long:
            times = int(row["read_ns"]), int(row["first_ns"]), first_ns
            parts.append(_part(row, "first", *times, limits))
        begin_ns = int(row["gap_at_ns"])
        if begin_ns != UNKNOWN and (warm or begin_ns > complete_ns):
            times = begin_ns, begin_ns + int(row["gap_ns"]), typical_gap_ns
            parts.append(_part(row, "gap", *times, limits))
        worst = max(parts, key=lambda part: part.excess_ns, default=None)
        if worst and worst.excess_ns >= worst.min_late_ns:
            late.append(worst)
    return late


def _first_complete_ns(rows: Array) -> int:
    """The end of the first response that was not aborted; the end of time without such a response."""
    complete = rows[(rows["first_ns"] != UNKNOWN) & (rows["flags"] & RequestFlag.ABORTED == 0)]
    return int(complete["end_ns"].min(initial=np.iinfo(np.int64).max))


def is_warm(rows: Array) -> Array:
    """Whether a request arrived after the first answer on its path: bool (n,). rows: of one path."""
    answers_ns = rows["first_ns"][rows["first_ns"] != UNKNOWN]
    warm: Array = rows["ts_ns"] > answers_ns.min(initial=np.iinfo(np.int64).max)
    return warm


def _typical_first_ns(rows: Array, is_long: Array) -> Array:
    """The typical time until the first token for each request: int64 (n,), by the bytes of prompt and response.

    The typical time is the time of requests that did not queue, if there are any. Where most requests queue until an
    engine that is full has room, it is the time from the end that made room.
    """
    known = rows[(rows["first_ns"] != UNKNOWN) & ~is_long]
    queues = n_before(known, known["ts_ns"]) >= MANY_WAITING
    is_full = queues.mean() > 0.5 and waits_for_room(known) if len(known) else False
    if not is_full and _are_overtaken(known, queues):
        queues[:] = False
    chosen = known[~queues] if (~queues).sum() >= MANY_WAITING and not is_full else known
    if not len(chosen):
        return np.zeros(len(rows), np.int64)
    times_ns = chosen["first_ns"] - chosen["read_ns"]
    if is_full:
        times_ns = np.minimum(times_ns, _after_end_ns(chosen))
    typical_ns = np.percentile(times_ns, 25, method="lower")
    by_prompt = _growth(chosen["request_bytes"], rows["request_bytes"], times_ns - typical_ns)
    rest_ns = (
        times_ns
        - typical_ns
        - _growth(chosen["request_bytes"], chosen["request_bytes"], times_ns - typical_ns)
    )
    is_whole = rows["flags"] & RequestFlag.STREAMS == 0  # the first byte follows the last token
    of_chosen = np.where(chosen["flags"] & RequestFlag.STREAMS == 0, chosen["response_bytes"], 0)
    by_response = _growth(of_chosen, np.where(is_whole, rows["response_bytes"], 0), rest_ns)
    out: Array = (typical_ns + by_prompt + by_response).astype(np.int64)
    return out


def _after_end_ns(rows: Array) -> Array:
    """The time from the latest end of a request until the first token of each request: int64 (n,)."""
    ends_ns = np.concatenate([[rows["read_ns"].min()], np.sort(rows["end_ns"])])
    after: Array = rows["first_ns"] - ends_ns[np.searchsorted(ends_ns, rows["first_ns"], side="right") - 1]
    return after


def waits_for_room(rows: Array) -> bool:
    """Whether requests begin when other requests end: the engine answers no more requests at once.

    First tokens follow the ends of other requests more exactly than the arrivals of their own, and while requests wait,
    the number of requests that receive tokens stays the same. The number varies if the engine does not answer in the
    order of arrival; then first tokens must follow the ends much more exactly than by chance.
    """
    first_ns, end_ns = rows["first_ns"], rows["end_ns"]
    after_ns, wait_ns = _after_end_ns(rows), first_ns - rows["read_ns"]
    if _spread(after_ns) >= _spread(wait_ns) or np.median(after_ns) > np.median(wait_ns) / LONG_FACTOR:
        return False
    between_ends_ns = np.ptp(end_ns) / len(end_ns)
    if _spread(after_ns) < min(EXACT * _spread(wait_ns), between_ends_ns / 2):
        return True
    at_ns = np.unique(np.concatenate([rows["ts_ns"], first_ns, end_ns]))
    for_ns = np.diff(at_ns) * (n_before(rows, at_ns[:-1]) >= MANY_WAITING)
    n_answered = np.searchsorted(np.sort(first_ns), at_ns[:-1], side="right")
    n_answered -= np.searchsorted(np.sort(end_ns), at_ns[:-1], side="right")
    by_number = np.bincount(n_answered, weights=for_ns)
    return bool(by_number[1:].max(initial=0) > SAME_NUMBER * for_ns.sum())


def _are_overtaken(rows: Array, queues: Array) -> bool:
    """Whether requests that arrive later are often answered first, so the engine works on all requests at once."""
    order = np.argsort(rows["ts_ns"], kind="stable")
    first_ns, wait_ns = rows["first_ns"][order], (rows["first_ns"] - rows["read_ns"])[order]
    is_overtaken = np.zeros(len(rows), bool)
    for n_later in range(1, MANY_WAITING + 1):
        is_overtaken[:-n_later] |= first_ns[n_later:] < first_ns[:-n_later] - OVERTAKEN * wait_ns[:-n_later]
    queues = queues[order]
    return bool(is_overtaken[queues].sum() > OVERTAKEN * queues.sum())


def _spread(times_ns: Array) -> float:
    """The distance between the quartiles."""
    low, high = np.percentile(times_ns, [25, 75])
    return float(high - low)


def _growth(known_bytes: Array, n_bytes: Array, excess_ns: Array) -> Array:
    """The typical excess for these numbers of bytes, by the excess of requests with known_bytes: float64.

    The excess grows with the bytes beyond the median. It is 0 if fewer than MANY_LONGER requests are longer.
    """
    typical = np.median(known_bytes)
    is_longer = known_bytes > LONGER_FACTOR * typical
    if is_longer.sum() < MANY_LONGER:
        return np.zeros(len(n_bytes))
    slope = np.median(excess_ns[is_longer] / (known_bytes[is_longer] - typical))
    out: Array = max(float(slope), 0.0) * np.maximum(n_bytes - typical, 0)
    return out


def n_before(rows: Array, at_ns: Array) -> Array:
    """How many of these requests wait for their first token at each moment: int64 (n,)."""
    until_ns = np.where(rows["first_ns"] == UNKNOWN, rows["end_ns"], rows["first_ns"])
    began = np.searchsorted(np.sort(rows["ts_ns"]), at_ns, side="left")
    ended: Array = np.searchsorted(np.sort(until_ns), at_ns, side="right")
    return began - ended


def _part(row: Array, name: str, begin_ns: int, end_ns: int, typical_ns: int, limits: Thresholds) -> Late:
    min_ns = max(int((limits.late_request_factor - 1) * typical_ns), limits.late_request_ns)
    return Late(row, name, begin_ns, end_ns, typical_ns, min_ns)


def is_long_prompt(rows: Array) -> Array:
    """Whether a request has a much longer prompt than most requests: bool (n,)."""
    n_bytes = rows["request_bytes"]
    typical = np.median(n_bytes) if len(n_bytes) else 0
    return (n_bytes >= LONG_BYTES) & (n_bytes >= LONG_FACTOR * typical)
