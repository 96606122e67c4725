"""The requests of inference engines in sums of ten seconds, for a hub: rows of LATENCIES.

Single requests stay on the machine: a busy engine answers thousands in a second.
"""

from dataclasses import dataclass, field

import numpy as np

from stallscope.events import histograms, layout
from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.request_times import first_token_ns, is_aborted, is_failed

_EVERY_NS = 10_000_000_000
_MAX_PATHS = 50
_OTHER = b"(other)"
_KEY = ("node", "pid", "path")


@dataclass
class RequestSums:
    """The rows of requests and tokens since the last rows of LATENCIES."""

    _requests: list[Array] = field(default_factory=list)
    _tokens: list[Array] = field(default_factory=list)
    _since_ns: int = UNKNOWN

    def take(self, table: Table, rows: Array) -> None:
        """Keep rows of REQUESTS and TOKENS."""
        if table is layout.REQUESTS and len(rows):
            self._requests.append(rows)
        elif table is layout.TOKENS and len(rows):
            self._tokens.append(rows)

    def rows(self, now_ns: int) -> Array:
        """The rows of LATENCIES, once in ten seconds; otherwise no rows."""
        if self._since_ns == UNKNOWN:
            self._since_ns = now_ns
        if now_ns - self._since_ns < _EVERY_NS or not self._requests:
            return layout.empty(layout.LATENCIES)
        self._since_ns = now_ns
        requests = layout.joined(self._requests)
        tokens = layout.joined([layout.empty(layout.TOKENS), *self._tokens])
        self._requests, self._tokens = [], []
        return latency_rows(requests, tokens, now_ns)


def latency_rows(requests: Array, tokens: Array, now_ns: int) -> Array:
    """Rows of LATENCIES, one for each node, process and path of these requests."""
    requests, tokens = requests.copy(), tokens.copy()
    paths, n = np.unique(requests["path"], return_counts=True)
    kept = paths[np.argsort(-n, kind="stable")][:_MAX_PATHS]
    for rows in (requests, tokens):
        rows["path"][~np.isin(rows["path"], kept)] = _OTHER
    keys = np.unique(requests[list(_KEY)])
    out = layout.empty(layout.LATENCIES, len(keys))
    for row, key in zip(out, keys, strict=True):
        _fill(row, _of(requests, key), _of(tokens, key), now_ns)
    return out


def _of(rows: Array, key: Array) -> Array:
    is_same = np.ones(len(rows), bool)
    for name in _KEY:
        is_same &= rows[name] == key[name]
    return rows[is_same]


def _fill(row: Array, requests: Array, tokens: Array, now_ns: int) -> None:
    for name in (*_KEY, "engine", "model"):
        row[name] = requests[name][0]
    row["ts_ns"], row["n"], row["n_tokens"] = now_ns, len(requests), requests["n_tokens"].sum()
    row["n_failed"], row["n_aborted"] = is_failed(requests).sum(), is_aborted(requests).sum()
    row["first"] = histograms.histogram(first_token_ns(requests))
    row["whole"] = histograms.histogram(requests["end_ns"] - requests["ts_ns"])
    row["between"] = histograms.text_of(histograms.joined(tokens["histogram"].tolist()))
