"""The streams of one process, one for each tenant and cluster. They share one limit on the rows that they keep."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from stallscope.continuous.backlog import MAX_CLUSTERS, Key
from stallscope.diagnose import SKIPPED, Change, JobState, Stream
from stallscope.store.hub import traces

_LOG = logging.getLogger(__name__)
_MAX_STREAMS = MAX_CLUSTERS
_TENANT_SHARE = 0.75  # of the streams: the clusters of one tenant cannot take all
_WINDOWS = 0.75
"""Share of the rows that may be kept: beyond it evaluations drop old rows. The rest is for rows between evaluations."""

_AN_EVALUATION = 3
"""The memory of an evaluation, as a multiple of the memory of its rows: 813 bytes a row of 268, by measurement."""


@dataclass(frozen=True)
class AdvancedStream:
    """A stream after its time has advanced.

    confirmed_ns, jobs: see Stream. failure: the kind of a failure, "" for none. n_left_out: rows that were dropped
    since the last advance, because too many were kept; every: of the others, every k-th round is kept.
    """

    changes: list[Change] = field(default_factory=list)
    n_jobs: int = 0
    confirmed_ns: dict[str, int] = field(default_factory=dict)
    jobs: list[JobState] = field(default_factory=list)
    failure: str = ""
    n_left_out: int = 0
    every: int = 1


class Diagnoses(Protocol):
    """The streams of some clusters, in this process or in another process."""

    def feed(
        self, key: Key, tables: Mapping[str, pa.Table], *, n_left_out: int = 0, is_behind: bool = False
    ) -> list[Change] | None:
        """The changes by new rows of a cluster; None if there are too many clusters."""

    def tick(self, keys: Collection[Key] | None = None) -> dict[Key, AdvancedStream]:
        """The changes by passing time, of all clusters or of these."""

    def forget(self, keys: Iterable[Key]) -> None:
        """End the streams of clusters without jobs."""

    def close(self) -> None:
        """End all streams."""


class Streams:
    """Streams in this process."""

    def __init__(self, make_stream: Callable[[], Stream]):
        self._make_stream = make_stream
        self._streams: dict[Key, Stream] = {}
        self._sizes: dict[Key, int] = {}
        self._max_rows: float = math.inf

    def feed(
        self, key: Key, tables: Mapping[str, pa.Table], *, n_left_out: int = 0, is_behind: bool = False
    ) -> list[Change] | None:
        """See Diagnoses."""
        stream = self._streams.get(key)
        if stream is None:
            n_of_tenant = sum(tenant == key[0] for tenant, _ in self._streams)
            if len(self._streams) >= _MAX_STREAMS or n_of_tenant >= _TENANT_SHARE * _MAX_STREAMS:
                return None
            stream = self._streams[key] = self._make_stream()
            self._share_rows()
        trace = traces.trace(tables)
        n_left_out += sum(
            len(tables[name]) - len(getattr(trace, name)) for name in traces.TABLES if name in tables
        )
        if n_left_out:
            trace = replace(trace, lost={SKIPPED: n_left_out})
        changes = stream.feed(trace, lost=traces.losses(tables), is_behind=is_behind)
        self._sizes[key] = stream.n_rows
        self._bound_rows()
        return changes

    def tick(self, keys: Collection[Key] | None = None) -> dict[Key, AdvancedStream]:
        """See Diagnoses. A failure of one stream is part of its answer, and does not end the others."""
        ticked = {key: stream for key, stream in self._streams.items() if keys is None or key in keys}
        advances = {key: _advance(stream) for key, stream in ticked.items()}
        self._sizes |= {key: stream.n_rows for key, stream in ticked.items()}
        return advances

    def forget(self, keys: Iterable[Key]) -> None:
        """See Diagnoses."""
        for key in keys:
            self._streams.pop(key, None)
            self._sizes.pop(key, None)
        self._share_rows()

    def close(self) -> None:
        """See Diagnoses."""
        self._streams.clear()
        self._sizes.clear()

    def _bound_rows(self) -> None:
        """Drop rows of the largest stream while the rows, and an evaluation of these rows, need too much memory."""
        while True:
            key = max(self._sizes, key=lambda key: self._sizes[key])
            n_before = self._sizes[key]
            if sum(self._sizes.values()) + _AN_EVALUATION * n_before <= (1 + _AN_EVALUATION) * self._max_rows:
                return
            self._streams[key].thin_out()
            self._sizes[key] = self._streams[key].n_rows
            if self._sizes[key] == n_before:
                return  # only rows that are always kept

    def _share_rows(self) -> None:
        """Divide the rows that may be kept among the streams."""
        whole = getattr(self._make_stream(), "retention", None)
        if whole is not None and self._streams:
            self._max_rows = whole.all_rows
            part = replace(whole, all_rows=int(_WINDOWS * whole.all_rows) // len(self._streams))
            for stream in self._streams.values():
                stream.retention = part


def _advance(stream: Stream) -> AdvancedStream:
    try:
        advance = AdvancedStream(stream.tick(), stream.n_jobs, stream.confirmed_ns(), stream.jobs())
        n_left_out, every = stream.left_out()
        return replace(advance, n_left_out=n_left_out, every=every)
    except Exception as error:  # noqa: BLE001 (logged here, and stated in every answer about the cluster)
        _LOG.exception("the continuous diagnosis failed at a tick")
        return AdvancedStream(n_jobs=stream.n_jobs, failure=type(error).__name__)
