"""The journal of a store: the content of a commit, and the operations of a journal.

duck_journal.py keeps it in a file of this machine. The journal of a store that several hubs share is in PostgreSQL.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from stallscope.store.hub.packing import unpacked


@dataclass(frozen=True)
class Segment:
    """A sealed Parquet file. path: relative to the hub's folder. Times in ns since 1970, None if no row has a time."""

    tenant: str
    table: str
    path: str
    n_rows: int
    n_bytes: int
    min_ts_ns: int | None
    max_ts_ns: int | None
    sealed_us: int


@dataclass(frozen=True)
class Entry:
    """Rows of one table that were committed together. received_us: us since 1970, unique for each commit.

    ipc: packed(rows), if already computed.
    """

    received_us: int
    tenant: str
    table: str
    rows: pa.Table
    ipc: bytes | memoryview = b""


class AlreadyStored(Exception):
    """Another writer has stored batches with these ids; the commit has stored nothing.

    keys: (tenant, batch id) with the time of their commit.
    """

    def __init__(self, keys: Mapping[tuple[str, str], int]):
        super().__init__(f"{len(keys)} batches are stored already")
        self.keys = dict(keys)


class Journal(Protocol):
    """The journal of one store. Only the writer's thread calls it, after it was opened.

    Every method that changes the journal is one transaction: it stores everything or, if it raises, nothing.
    """

    def close(self) -> None:
        """Release the journal."""

    def commit(
        self,
        received_us: int,
        entries: Sequence[Entry],
        *,
        batch_ids: Iterable[tuple[str, str]],
        kept: Mapping[str, Sequence[pa.Table]] | None = None,
    ) -> None:
        """Store rows together with their (tenant, batch id); kept: rows of schema.KEPT, replaced by key.

        The rows are on disk when this returns. Raises StorageFailed, Overloaded, AlreadyStored.
        """

    def entries(self) -> Iterator[Entry]:
        """The unsealed rows, oldest first."""

    def checked_entries(self) -> Iterator[tuple[str, int, str]]:
        """For each entry its key, its rows, and why it is unreadable; "" if it is readable."""

    def remove_entry(self, key: str) -> None:
        """Remove an entry that checked_entries() named."""

    def batch_ids(self) -> list[tuple[str, str, int]]:
        """(tenant, batch id, received_us) of the batches that the writer must remember, oldest first."""

    def forget_batches(self, before_us: int, tenant: str = "") -> None:
        """Forget ids of batches received before this time. tenant: "" for all tenants."""

    def segments(self) -> list[Segment]:
        """The current sealed files."""

    def seal(self, segment: Segment, until_us: int, *, medians: pa.Table | None) -> None:
        """Replace the rows received up to until_us by a file. medians: of partly sealed rounds, if any."""

    def replace_segments(self, gone: Sequence[Segment], new: Sequence[Segment]) -> None:
        """Replace files by other files."""

    def round_medians(self) -> dict[str, pa.Table]:
        """Medians of partly sealed rounds, by tenant."""

    def kept(self, name: str) -> pa.Table:
        """All rows of a table that the hub maintains itself."""

    def forget_verdicts(self, before_us: int) -> int:
        """Delete verdicts closed before this time, with their chains. Returns their number."""

    def forget_jobs(self, before_us: int) -> int:
        """Delete ended jobs whose rows last changed before this time, with their owners. Returns their number."""

    def forget_owners(self, before_us: int) -> int:
        """Delete the owners of jobs and incidents that were over before this time. Returns the rows changed."""

    def latest_us(self) -> int:
        """The newest received_us, 0 for an empty journal."""

    def wal_bytes(self) -> int:
        """Size of a log that checkpoint() would shorten."""

    def checkpoint(self) -> None:
        """Shorten the log."""


def line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def damage_of(ipc: bytes | memoryview, n_rows: int) -> str:
    """Why the packed rows of an entry are unreadable; "" if all n_rows can be read."""
    try:
        n_found = len(unpacked(ipc))
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"cannot be read ({line(error)})"
    return "" if n_found == n_rows else f"{n_found:,} rows instead of {n_rows:,}"
