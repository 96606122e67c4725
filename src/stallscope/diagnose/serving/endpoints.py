"""The requests of each model and path: rate, and percentiles of their times.

Percentiles of times between tokens come from histograms and are at most 9 % too large.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stallscope.events.histograms import PERCENTS, Percentiles, joined, percentiles_ms
from stallscope.events.layout import Array, process_keys
from stallscope.events.request_times import first_token_ns, is_aborted, is_failed
from stallscope.events.trace import Trace


@dataclass(frozen=True)
class Endpoint:
    """The requests with the same engine, model and path. Times in ms by percentile; empty without such a time.

    first: arrival until the first token, or the first byte. between: between two tokens. whole: arrival until the end.
    """

    engine: str
    model: str
    path: str
    n: int
    n_failed: int
    n_aborted: int
    per_second: float
    first_ms: Percentiles
    between_ms: Percentiles
    whole_ms: Percentiles

    def numbers(self) -> dict[str, Any]:
        """Rate and times, for a remark of the report."""
        first, between, whole = self.first_ms, self.between_ms, self.whole_ms
        known = {"model": self.model, "n_failed": self.n_failed, "n_aborted": self.n_aborted}
        return {
            "n_requests": self.n,
            "per_second": self.per_second,
            **{name: value for name, value in known.items() if value},
            **{f"first_ms_{name}": value for name, value in first.items()},
            **{f"between_ms_{name}": value for name, value in between.items()},
            **{f"whole_ms_{name}": value for name, value in whole.items()},
        }


def endpoints(trace: Trace) -> list[Endpoint]:
    """The endpoints of a trace, the endpoint with most requests first."""
    keys = trace.requests[["engine", "model", "path"]]
    groups = [trace.requests[keys == key] for key in np.unique(keys)]
    return sorted((_endpoint(trace, rows) for rows in groups), key=lambda each: -each.n)


def _endpoint(trace: Trace, rows: Array) -> Endpoint:
    seconds = max(float(rows["end_ns"].max() - rows["ts_ns"].min()) / 1e9, 1e-9)
    engine, model, path = (rows[name][0].decode("utf-8", "replace") for name in ("engine", "model", "path"))
    return Endpoint(
        engine=engine,
        model=model,
        path=path,
        n=len(rows),
        n_failed=int(is_failed(rows).sum()),
        n_aborted=int(is_aborted(rows).sum()),
        per_second=round(len(rows) / seconds, 3),
        first_ms=percentiles(first_token_ns(rows) / 1e6),
        between_ms=between_ms(tokens_of(trace, rows)),
        whole_ms=percentiles((rows["end_ns"] - rows["ts_ns"]) / 1e6),
    )


def tokens_of(trace: Trace, rows: Array) -> Array:
    """The rows of TOKENS of the processes and the path of some requests, which have a single path."""
    is_path = trace.tokens["path"] == rows["path"][0]
    return trace.tokens[is_path & np.isin(process_keys(trace.tokens), process_keys(rows))]


def percentiles(values: Array) -> Percentiles:
    """Percentiles by name: the smallest value that at least this share of the values does not exceed."""
    if not len(values):
        return {}
    found = np.percentile(values, PERCENTS, method="inverted_cdf")
    return {f"p{percent:g}": round(float(value), 3) for percent, value in zip(PERCENTS, found, strict=True)}


def between_ms(tokens: Array) -> Percentiles:
    """Percentiles of the times between tokens, of rows of TOKENS."""
    return percentiles_ms(joined(tokens["histogram"].tolist()))
