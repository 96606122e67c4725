"""Slots: the unit that a hub owns. Each (tenant, cluster) belongs to one slot; its rows are never in another slot."""

import zlib
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from stallscope.store.hub.batches import Batch

N_SLOTS = 64
"""Never changes: the rows of a cluster would be in two slots."""

_PART = "\x1f"


def slot_of(tenant: str, cluster: str) -> int:
    """The slot of a cluster. Stable: part of the format of the stored data."""
    return zlib.crc32(f"{tenant}\0{cluster}".encode()) % N_SLOTS


def by_slot(batch: Batch) -> dict[int, Batch]:
    """The rows of a batch by slot. The parts of a batch for several slots have ids of their own."""
    tables: dict[int, dict[str, pa.Table]] = {}
    for name, rows in batch.tables.items():
        for slot, part in _rows_by_slot(batch.tenant, rows).items():
            tables.setdefault(slot, {})[name] = part
    if len(tables) == 1:
        return dict.fromkeys(tables, batch)
    n_rows = max(1, batch.n_rows)
    return {
        slot: Batch(_part_id(batch.batch_id, slot), batch.tenant, parts, _share(batch.n_bytes, parts, n_rows))
        for slot, parts in tables.items()
    }


def _rows_by_slot(tenant: str, rows: pa.Table) -> dict[int, pa.Table]:
    if "cluster_id" not in rows.column_names or rows["cluster_id"].null_count == len(rows):
        return {slot_of(tenant, ""): rows}
    clusters = pc.fill_null(rows["cluster_id"], "")
    names: dict[int, list[str]] = {}
    for cluster in pc.unique(clusters).to_pylist():
        names.setdefault(slot_of(tenant, cluster), []).append(cluster)
    if len(names) == 1:
        return dict.fromkeys(names, rows)
    return {
        slot: rows.filter(pc.is_in(clusters, pa.array(of_slot, pa.string())))
        for slot, of_slot in names.items()
    }


def _part_id(batch_id: str, slot: int) -> str:
    return f"{batch_id}{_PART}{slot}" if batch_id else ""


def _share(n_bytes: int | None, parts: Mapping[str, pa.Table], n_rows: int) -> int | None:
    return None if n_bytes is None else n_bytes * sum(map(len, parts.values())) // n_rows
