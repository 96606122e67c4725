"""The streams of one process, one for each tenant and cluster. They share one limit on the rows that they keep."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from stallscope.continuous.backlog import MAX_CLUSTERS, Key
from stallscope.diagnose import Change, JobState, Stream
from stallscope.store.hub import traces

_LOG = logging.getLogger(__name__)
_MAX_STREAMS = MAX_CLUSTERS
_TENANT_SHARE = 0.75  # of the streams: the clusters of one tenant cannot take all
_SKIPPED = "skipped_by_hub"


@dataclass(frozen=True)
class AdvancedStream:
    """A stream after its time has advanced.

    confirmed_ns, jobs: see Stream. failure: the kind of a failure, "" for none.
    """

    changes: list[Change] = field(default_factory=list)
    n_jobs: int = 0
    confirmed_ns: dict[str, int] = field(default_factory=dict)
    jobs: list[JobState] = field(default_factory=list)
    failure: str = ""


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
        if n_left_out:
            trace = replace(trace, lost={_SKIPPED: n_left_out})
        return stream.feed(trace, lost=traces.losses(tables), is_behind=is_behind)

    def tick(self, keys: Collection[Key] | None = None) -> dict[Key, AdvancedStream]:
        """See Diagnoses. A failure of one stream is part of its answer, and does not end the others."""
        return {key: _advance(stream) for key, stream in self._streams.items() if keys is None or key in keys}

    def forget(self, keys: Iterable[Key]) -> None:
        """See Diagnoses."""
        for key in keys:
            self._streams.pop(key, None)
        self._share_rows()

    def close(self) -> None:
        """See Diagnoses."""
        self._streams.clear()

    def _share_rows(self) -> None:
        """Divide the rows that may be kept among the streams."""
        whole = getattr(self._make_stream(), "retention", None)
        if whole is not None and self._streams:
            part = replace(whole, all_rows=whole.all_rows // len(self._streams))
            for stream in self._streams.values():
                stream.retention = part


def _advance(stream: Stream) -> AdvancedStream:
    try:
        return AdvancedStream(stream.tick(), stream.n_jobs, stream.confirmed_ns(), stream.jobs())
    except Exception as error:  # noqa: BLE001 (logged here, and stated in every answer about the cluster)
        _LOG.exception("the continuous diagnosis failed at a tick")
        return AdvancedStream(n_jobs=stream.n_jobs, failure=type(error).__name__)
