"""Bounds of the rows that a query can use: files without such rows are neither fetched nor opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the SQL workers do not need it
    from stallscope.store.hub.journal import Segment

_MIN_NS, _MAX_NS = -(2**63), 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class RowBounds:
    """clusters: None for all. from_ns, to_ns: the first and the last ts_ns."""

    clusters: frozenset[str] | None = None
    from_ns: int = _MIN_NS
    to_ns: int = _MAX_NS

    def may_include_rows_of(self, segment: Segment) -> bool:
        """Whether the times of a file allow such rows."""
        if segment.min_ts_ns is None or segment.max_ts_ns is None:
            return True
        return segment.max_ts_ns >= self.from_ns and segment.min_ts_ns <= self.to_ns

    def both(self, other: RowBounds) -> RowBounds:
        """Rows within these bounds and the other bounds."""
        if self.clusters is None or other.clusters is None:
            clusters = other.clusters if self.clusters is None else self.clusters
        else:
            clusters = self.clusters & other.clusters
        return RowBounds(
            clusters=clusters,
            from_ns=max(self.from_ns, other.from_ns),
            to_ns=min(self.to_ns, other.to_ns),
        )

    def either(self, other: RowBounds) -> RowBounds:
        """Rows within these bounds or the other bounds, and perhaps more rows."""
        is_all = self.clusters is None or other.clusters is None
        return RowBounds(
            clusters=None if is_all else (self.clusters or frozenset()) | (other.clusters or frozenset()),
            from_ns=min(self.from_ns, other.from_ns),
            to_ns=max(self.to_ns, other.to_ns),
        )

    def as_json(self) -> dict[str, Any]:
        """For of_json()."""
        clusters = None if self.clusters is None else sorted(self.clusters)
        return {"clusters": clusters, "from_ns": self.from_ns, "to_ns": self.to_ns}

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> RowBounds:
        """From as_json()."""
        clusters = value["clusters"]
        return RowBounds(
            clusters=None if clusters is None else frozenset(map(str, clusters)),
            from_ns=_within_int64(int(value["from_ns"])),
            to_ns=_within_int64(int(value["to_ns"])),
        )


ALL_ROWS = RowBounds()
NO_ROWS = RowBounds(clusters=frozenset(), from_ns=_MAX_NS, to_ns=_MIN_NS)
NO_BOUNDS: Mapping[str, RowBounds] = MappingProxyType({})
"""Of a query that may use every row."""


def between(from_ns: int | None, to_ns: int | None) -> RowBounds:
    """Rows of a time, whose ends may be beyond int64; None: without this end."""
    return RowBounds(
        from_ns=_MIN_NS if from_ns is None else _within_int64(from_ns),
        to_ns=_MAX_NS if to_ns is None else _within_int64(to_ns),
    )


def selected(segments: Iterable[Segment], bounds: RowBounds) -> tuple[Segment, ...]:
    """The files that may have rows within the bounds."""
    return tuple(filter(bounds.may_include_rows_of, segments))


def _within_int64(value: int) -> int:
    return min(max(value, _MIN_NS), _MAX_NS)
