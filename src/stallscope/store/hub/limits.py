"""The hub store's limits: sizes of queues, times of sealing, and retention of files."""

from dataclasses import dataclass

_BATCH_ID_BYTES = 400
"""Memory of a remembered batch id, by measurement 316 bytes with ids of agents."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Defaults for a machine of a few cores and 16 GB; within() derives them from the memory a hub may use.

    Queue: beyond its limit, or if the wait for the commit would exceed max_queue_s at the current rate of commits,
    senders are asked to retry. Sealing: rows move from memory to a Parquet file when a table of a tenant has seal_rows,
    when the oldest is seal_after_s old (the rows of the last settle_s stay: the other ranks of their rounds may still
    arrive), or when all hot rows together exceed max_hot_rows or half of max_hot_bytes. Beyond max_hot_bytes senders
    are refused until files have been written, and beyond three quarters of it for one tenant. max_memory_bytes:
    senders are refused while the process and its children have more resident memory; None: not checked.
    Files: small files are merged up to merge_rows; files older than max_age_s, and the oldest files beyond max_bytes,
    are removed. Closed verdicts and ended jobs are removed after max_age_s. Owners: removed after owner_max_age_s,
    whether or not their jobs stay; None: with the other rows.
    The journal keeps the rows since its last checkpoint in memory, about wal_bytes. Beyond journal_memory_bytes commits
    fail until the next checkpoint, so that limit is several times as large.
    Ids of batches are in memory. They are forgotten after batch_ids_s, and beyond max_batch_ids the oldest ids of the
    tenant with most ids.
    """

    max_queue_rows: int = 500_000
    max_queue_bytes: int = 512 << 20
    max_queue_s: float = 0.8
    retry_after_s: float = 1.0
    group_rows: int = 50_000
    seal_rows: int = 200_000
    seal_after_s: float = 300.0
    settle_s: float = 5.0
    max_hot_rows: int = 2_000_000
    max_hot_bytes: int = 1 << 30
    max_memory_bytes: int | None = None
    merge_rows: int = 1_000_000
    max_age_s: float = 90 * 86_400.0
    owner_max_age_s: float | None = None
    max_bytes: int = 200_000_000_000
    batch_ids_s: float = 86_400.0
    max_batch_ids: int = 1_000_000
    grace_s: float = 120.0
    wal_bytes: int = 256 << 20
    quiet_s: float = 1.0
    maintenance_s: float = 1.0
    journal_memory_bytes: int = 1 << 30
    sealer_memory_bytes: int = 1 << 30
    reader_memory_bytes: int = 2 << 30
    reader_threads: int = 2

    @classmethod
    def within(
        cls, memory_bytes: int, *, max_age_s: float = max_age_s, owner_max_age_s: float | None = None
    ) -> "Limits":
        """The limits of a hub whose processes together have this memory limit."""
        eighth = memory_bytes // 8
        return cls(
            max_queue_bytes=min(cls.max_queue_bytes, eighth // 2),
            max_hot_bytes=min(4 << 30, 2 * eighth),
            max_memory_bytes=memory_bytes * 4 // 5,
            max_batch_ids=min(cls.max_batch_ids, eighth // _BATCH_ID_BYTES),
            max_age_s=max_age_s,
            owner_max_age_s=owner_max_age_s,
            wal_bytes=min(cls.wal_bytes, eighth // 2),
            journal_memory_bytes=min(cls.journal_memory_bytes, 4 * eighth),
            sealer_memory_bytes=min(cls.sealer_memory_bytes, eighth),
            reader_memory_bytes=min(cls.reader_memory_bytes, eighth),
        )
