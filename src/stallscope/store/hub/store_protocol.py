"""The store of a hub, as receivers, diagnosis, tools and page use it.

HubStore keeps the data of one process in a folder. The store of several hubs has the same interface.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from stallscope.store.hub import schema
from stallscope.store.hub.batches import Batch, BatchMember, Receipt
from stallscope.store.hub.compactor import CompactorTotals
from stallscope.store.hub.damage import Damage
from stallscope.store.hub.hot import Snapshot
from stallscope.store.hub.job_filter import JobFilter
from stallscope.store.hub.row_bounds import NO_BOUNDS, RowBounds
from stallscope.store.hub.unexamined import Unexamined
from stallscope.store.hub.writer import Counters, Listener


class Store(Protocol):
    """An open store. Thread-safe."""

    @property
    def folder(self) -> Path:
        """The folder of the sealed files; the paths of segments are relative to it."""

    @property
    def damage(self) -> Damage:
        """Known damage of the stored data."""

    @property
    def unexamined(self) -> Unexamined:
        """Rows that the continuous diagnosis did not examine."""

    def append(self, batch: Batch) -> "Future[Receipt]":
        """Store a batch, all or nothing; the future resolves once it is on disk. Raises BadInput, Overloaded."""

    def append_together(self, batch: Batch, members: Sequence[BatchMember]) -> None:
        """Store the rows of several requests, each all or nothing; the future of each resolves once they are on disk.

        Raises the errors of append(); then nothing is stored.
        """

    def announced(self) -> AbstractContextManager[None]:
        """Announces an append() inside the with block."""

    def check_room(self) -> None:
        """Raises Overloaded while the store accepts no more rows."""

    def ask(
        self, question: str, *, tenant: str, params: Mapping[str, object], job: JobFilter | None = None
    ) -> pa.Table:
        """The answer to a named question. Raises NotFound, BadInput, StorageFailed."""

    def snapshot(
        self,
        tenant: str,
        *,
        tables: Collection[str] = schema.TABLES.keys(),
        bounds: Mapping[str, RowBounds] = NO_BOUNDS,
    ) -> Snapshot:
        """The tenant's sealed files and hot rows at one moment: no row within the bounds duplicated or missing."""

    def set_aside_damaged(self, tenant: str) -> int:
        """Set damaged sealed files aside after a failure. Returns their number."""

    def tenants(self) -> list[str]:
        """The tenants with any data."""

    def tail(self, tenant: str, table: str, *, since_us: int) -> pa.Table:
        """Rows of a table committed since then (us since 1970), in commit order."""

    def tail_rows(self, tenant: str, table: str, *, since_us: int) -> int:
        """Upper bound on the number of rows that tail() would return."""

    def subscribe(self, listener: Listener) -> None:
        """Call the listener with each batch that this process commits; it must not block."""

    def queued(self) -> tuple[int, int]:
        """Rows and bytes that wait for a commit."""

    @property
    def hot_bytes(self) -> int:
        """Bytes of unsealed rows in memory."""

    @property
    def counters(self) -> Counters:
        """Totals since the start."""

    @property
    def kept(self) -> CompactorTotals:
        """Totals of the maintenance since the start."""

    def close(self) -> None:
        """Commit the waiting rows and close the store; safe to repeat."""
