"""The hub store's limits: how much may wait, when rows are sealed, how long files are kept."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Defaults for a machine of a few cores and 16 GB.

    Queue: beyond it senders are told to come back. Sealing: rows leave memory for a Parquet file when a table of a
    tenant has seal_rows, when the oldest is seal_after_s old (those of the last settle_s stay: the other ranks of their
    rounds may be under way), or when all hot rows together exceed max_hot_rows.
    Files: small ones are merged up to merge_rows; max_age_s and max_bytes: what is older, or the oldest beyond, goes.
    """

    max_queue_rows: int = 500_000
    max_queue_bytes: int = 512 << 20
    retry_after_s: float = 1.0
    group_rows: int = 50_000
    seal_rows: int = 200_000
    seal_after_s: float = 300.0
    settle_s: float = 5.0
    max_hot_rows: int = 2_000_000
    merge_rows: int = 1_000_000
    max_age_s: float = 90 * 86_400.0
    max_bytes: int = 200_000_000_000
    batch_ids_s: float = 86_400.0
    grace_s: float = 120.0
    wal_bytes: int = 256 << 20
    quiet_s: float = 1.0
    maintenance_s: float = 1.0
    reader_memory: str = "2GB"
    reader_threads: int = 2
