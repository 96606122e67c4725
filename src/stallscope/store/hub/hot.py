"""The hot rows in memory: committed rows that are not sealed yet, for queries and for sealing.

The journal on disk has the same rows. Queries read this copy, so that no query accesses the file that the writer
commits to.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from stallscope.store.hub.arrow_tables import joined
from stallscope.store.hub.journal import Segment

_MAX_PIECE_ROWS = 16_384
"""Larger pieces gain nothing from being contiguous: engines read a few thousand rows at a time."""
_JOINED_AT_ONCE = 8
"""Joining has a cost for each column, so several pieces are joined at once."""


@dataclass(frozen=True)
class CommittedRows:
    """Rows committed up to last_us, after the rows of the previous piece.

    first_s, last_s: time.monotonic() of the first and the last commit; setting the clock does not change their age.
    """

    last_us: int
    rows: pa.Table
    n_bytes: int
    first_s: float
    last_s: float


@dataclass(frozen=True)
class Snapshot:
    """One tenant's data at one moment: sealed files and hot rows by table, no row duplicated or missing."""

    segments: Mapping[str, tuple[Segment, ...]]
    hot: Mapping[str, pa.Table]


@dataclass
class _Tenant:
    pieces: dict[str, list[CommittedRows]] = field(default_factory=dict)
    segments: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    borders: dict[str, int] = field(default_factory=dict)


class HotRows:
    """Hot rows and the list of sealed files, changed together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._bytes_of: Counter[str] = Counter()
        self.n_bytes = 0

    def add(self, tenant: str, table: str, rows: pa.Table, *, received_us: int, age_s: float = 0.0) -> None:
        """Add rows that were committed age_s ago."""
        n_bytes, at_s = _size(rows), time.monotonic() - age_s
        with self._lock:
            self._grow(tenant, n_bytes)
            data = self._tenants.setdefault(tenant, _Tenant())
            pieces = data.pieces.setdefault(table, [])
            pieces.append(CommittedRows(received_us, rows, n_bytes, at_s, at_s))
            while n := _n_to_join(pieces, data.borders.get(table, 0)):
                pieces[-n:] = [_joined(pieces[-n:])]

    def sealed(self, tenant: str, table: str, until_us: int, *, segment: Segment) -> None:
        """Remove rows received up to until_us, which are now in a file."""
        with self._lock:
            data = self._tenants.setdefault(tenant, _Tenant())
            pieces = data.pieces.get(table, [])
            data.pieces[table] = [p for p in pieces if p.last_us > until_us]
            self._grow(tenant, -sum(p.n_bytes for p in pieces if p.last_us <= until_us))
            data.segments[table] = (*data.segments.get(table, ()), segment)

    def replaced(
        self, tenant: str, table: str, gone: tuple[Segment, ...], *, new: tuple[Segment, ...]
    ) -> None:
        """Replace files (expired or merged) by others."""
        with self._lock:
            data = self._tenants.setdefault(tenant, _Tenant())
            left_out = {segment.path for segment in gone}
            remaining = [s for s in data.segments.get(table, ()) if s.path not in left_out]
            data.segments[table] = tuple(sorted([*remaining, *new], key=lambda s: (s.sealed_us, s.path)))

    def snapshot(self, tenant: str, tables: Collection[str]) -> Snapshot:
        """The tenant's current data of these tables."""
        with self._lock:
            data = self._tenants.get(tenant, _Tenant())
            pieces = {table: tuple(data.pieces[table]) for table in tables if data.pieces.get(table)}
            segments = {table: data.segments[table] for table in tables if table in data.segments}
        hot = {
            table: pa.concat_tables([p.rows for p in table_pieces]) for table, table_pieces in pieces.items()
        }
        return Snapshot(segments, hot)

    def bytes_of(self, tenant: str) -> int:
        """Bytes of the tenant's hot rows."""
        return self._bytes_of[tenant]

    def begin_seal(
        self, tenant: str, table: str, settle_s: float | None, *, max_rows: int, max_bytes: int
    ) -> tuple[tuple[CommittedRows, ...], tuple[CommittedRows, ...]]:
        """The oldest rows committed at least settle_s ago (None: all rows), and the later rows, until sealed().

        max_rows, max_bytes: at most this many rows, of this memory, at a time, but always a piece.
        Pieces are not joined across this border afterwards, so that sealed() finds it again.
        """
        with self._lock:
            data = self._tenants.get(tenant, _Tenant())
            pieces = data.pieces.get(table, [])
            settled_s = time.monotonic() - (settle_s or 0.0)
            n_now = n_rows = n_bytes = 0
            for piece in pieces:
                n_rows, n_bytes = n_rows + len(piece.rows), n_bytes + piece.rows.nbytes
                is_settled = settle_s is None or piece.last_s <= settled_s
                if not is_settled or (n_now and (n_rows > max_rows or n_bytes > max_bytes)):
                    break
                n_now += 1
            if n_now:
                data.borders[table] = pieces[n_now - 1].last_us
            return tuple(pieces[:n_now]), tuple(pieces[n_now:])

    def segments(self, tenant: str) -> dict[str, tuple[Segment, ...]]:
        """The tenant's sealed files by table, oldest first."""
        with self._lock:
            return dict(self._tenants.get(tenant, _Tenant()).segments)

    def sizes(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Rows, and the age in s of the oldest piece, by tenant and table."""
        with self._lock:
            now_s = time.monotonic()
            return {
                (tenant, table): (sum(len(p.rows) for p in pieces), now_s - pieces[0].first_s)
                for tenant, data in self._tenants.items()
                for table, pieces in data.pieces.items()
                if pieces
            }

    def n_rows_since(self, tenant: str, table: str, since_us: int) -> int:
        """Hot rows of the pieces that were committed, at least in part, since then."""
        with self._lock:
            pieces = self._tenants.get(tenant, _Tenant()).pieces.get(table, [])
            return sum(len(piece.rows) for piece in pieces if piece.last_us >= since_us)

    def tenants(self) -> list[str]:
        """The tenants with any data."""
        with self._lock:
            return sorted(self._tenants)

    def _grow(self, tenant: str, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._bytes_of[tenant] += n_bytes


def _n_to_join(pieces: Sequence[CommittedRows], border_us: int) -> int:
    """How many of the last pieces to join now, 0 for none: pieces are few, and each row is copied only a few times.

    A run of pieces that are not much larger than the last piece is joined once it is long enough.
    """
    n, n_rows, largest = 0, 0, _JOINED_AT_ONCE * len(pieces[-1].rows)
    for piece in reversed(pieces):
        n_rows += len(piece.rows)
        if piece.last_us == border_us or len(piece.rows) >= largest or n_rows > _MAX_PIECE_ROWS:
            break
        n += 1
    return n if n >= _JOINED_AT_ONCE else 0


def _joined(pieces: Sequence[CommittedRows]) -> CommittedRows:
    return CommittedRows(
        pieces[-1].last_us,
        joined([piece.rows for piece in pieces]),
        sum(piece.n_bytes for piece in pieces),
        pieces[0].first_s,
        pieces[-1].last_s,
    )


def _size(rows: pa.Table) -> int:
    """Bytes of the rows; empty columns share their memory (arrow_tables.nulls)."""
    return sum(column.nbytes for column in rows.columns if column.null_count < len(column))
