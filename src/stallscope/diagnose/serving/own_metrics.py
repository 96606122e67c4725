"""The metrics that an engine publishes itself, next to the recorded requests: space in the KV cache, and differences.

The values are read every few seconds, so a moment is known to the interval between two reads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stallscope.diagnose.serving.joined_spans import joined_spans
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import RequestFlag
from stallscope.events.request_times import first_token_ns
from stallscope.events.trace import Trace

_FULL_PERMILLE = 950
_MIN_N = 20
"""A mean of fewer times is not compared."""

_MIN_SHARE, _MIN_NS = 0.2, 10_000_000
"""A smaller difference between two means is expected: the engine measures at other points."""

_WORDS = {"first": "until the first token", "between": "between two tokens", "whole": "until the end"}


@dataclass(frozen=True)
class Pressure:
    """The state of the KV cache in an interval. n_preempted: requests that lost their space."""

    n_preempted: int
    max_permille: int
    max_waiting: int

    @property
    def is_full(self) -> bool:
        """Whether requests lost their space, or waited while the cache was full."""
        return self.n_preempted > 0 or (self.max_permille >= _FULL_PERMILLE and self.max_waiting > 0)

    def text(self) -> str:
        """The state in words."""
        if self.n_preempted > 0:
            return f"{self.n_preempted} requests lost their space in the KV cache"
        return f"{self.max_permille / 10:.0f} % of the KV cache was in use, and {self.max_waiting} requests waited"


def pressure(rows: Array, begin_ns: int, end_ns: int) -> Pressure | None:
    """From the last read before an interval until the first read after it; None without two reads. rows: one engine."""
    rows = rows[np.argsort(rows["ts_ns"], kind="stable")]
    begin = max(int(np.searchsorted(rows["ts_ns"], begin_ns, side="right")) - 1, 0)
    end = int(np.searchsorted(rows["ts_ns"], end_ns, side="left")) + 1
    rows = rows[begin:end]
    if len(rows) < 2:
        return None
    return Pressure(
        _growth(rows["n_preempted"]), int(rows["kv_permille"].max()), int(rows["n_waiting"].max())
    )


def differences(trace: Trace, node: int, pids: tuple[int, ...]) -> list[dict[str, Any]]:
    """Remarks on the means that the engine publishes and that the recorded requests contradict, one for each kind."""
    rows = trace.engine_metrics
    rows = rows[(rows["node"] == node) & np.isin(rows["pid"], pids)]
    if len(rows) < 2:
        return []
    begin_ns, end_ns = int(rows["ts_ns"].min()), int(rows["ts_ns"].max())
    remarks = []
    for name, words in _WORDS.items():
        own_ns = _mean_ns(rows, name)
        recorded_ns = _recorded_mean_ns(trace, name, node, pids, (begin_ns, end_ns))
        if own_ns is None or recorded_ns is None:
            continue
        difference_ns = abs(recorded_ns - own_ns)
        if difference_ns > max(_MIN_NS, _MIN_SHARE * min(recorded_ns, own_ns)):
            engine = rows["engine"][0].decode("utf-8", "replace")
            remarks.append(
                {
                    "what": f"The mean time {words} that {engine} publishes differs from the recorded time",
                    "published_ms": round(own_ns / 1e6, 3),
                    "recorded_ms": round(recorded_ns / 1e6, 3),
                }
            )
    return remarks


def span_differences(trace: Trace, node: int, pids: tuple[int, ...]) -> list[dict[str, Any]]:
    """Remarks on the means of the engine's spans that the recorded times of the same requests contradict."""
    rows = trace.requests[(trace.requests["node"] == node) & np.isin(trace.requests["pid"], pids)]
    spans = joined_spans(trace, rows)
    if not spans:
        return []
    remarks = []
    for name, recorded_ms in spans.recorded_ms.items():
        n, own_ms = spans.n_recorded[name], spans.own_ms[name]
        if n < _MIN_N:
            continue
        if abs(recorded_ms - own_ms) > max(_MIN_NS / 1e6, _MIN_SHARE * min(recorded_ms, own_ms)):
            what = f"The mean time {_WORDS[name]} in the engine's spans differs from the recorded time"
            remarks.append({"what": what, "n_requests": n, "in_spans_ms": own_ms, "recorded_ms": recorded_ms})
    return remarks


def _growth(values: Array) -> int:
    """The growth of a counter; 0 if it is unknown. A restarted counter begins at 0."""
    known = values[values != UNKNOWN]
    steps = np.diff(known)
    return int(np.where(steps >= 0, steps, known[1:]).sum())


def _mean_ns(rows: Array, name: str) -> float | None:
    n = _growth(rows[f"n_{name}"])
    return _growth(rows[f"{name}_ns"]) / n if n >= _MIN_N else None


def _recorded_mean_ns(
    trace: Trace, name: str, node: int, pids: tuple[int, ...], span: tuple[int, int]
) -> float | None:
    def own(rows: Array, at: str) -> Array:
        is_own = (rows["node"] == node) & np.isin(rows["pid"], pids)
        return rows[is_own & (rows[at] > span[0]) & (rows[at] <= span[1])]

    if name == "between":
        tokens = own(trace.tokens, "ts_ns")
        n = int(tokens["n"].sum())
        return float(tokens["total_ns"].sum()) / n if n >= _MIN_N else None
    requests = own(trace.requests, "end_ns")
    requests = requests[(requests["method"] == b"POST") & (requests["status"] == 200)]
    if name == "first":
        requests = requests[requests["flags"] & RequestFlag.STREAMS > 0]
    times_ns = first_token_ns(requests) if name == "first" else requests["end_ns"] - requests["ts_ns"]
    return float(times_ns.mean()) if len(times_ns) >= _MIN_N else None
