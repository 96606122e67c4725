"""What senders want stored, and what becomes of it: entries of the journal, and rows as questions see them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from stallscope.store.hub import schema
from stallscope.store.hub.arrow_tables import joined, nulls, repeated
from stallscope.store.hub.journal import Entry
from stallscope.store.hub.packing import packed

_PACKED_EARLY = 2_000
"""Rows of a table that are packed by the thread that brings them; fewer are put together with others first."""


@dataclass(frozen=True)
class Batch:
    """What a sender wants stored, all or nothing. batch_id: empty where a retry cannot be recognised.

    tables: rows by table name, with columns of store/hub/schema.py; what is missing becomes NULL.
    n_bytes: about what the rows take, where that is known; counting takes as long as storing few rows.
    """

    batch_id: str
    tenant: str
    tables: Mapping[str, pa.Table]
    n_bytes: int | None = None

    @property
    def n_rows(self) -> int:
        """Rows in all tables."""
        return sum(len(rows) for rows in self.tables.values())


@dataclass(frozen=True)
class Receipt:
    """A batch is on disk. is_duplicate: it was there already, and nothing was added."""

    n_rows: int
    is_duplicate: bool
    received_us: int


def packed_early(batch: Batch) -> dict[str, memoryview]:
    """The rows of its large tables, packed for the journal."""
    return {
        name: packed(rows)
        for name, rows in batch.tables.items()
        if name in schema.SENT and len(rows) >= _PACKED_EARLY
    }


def completed(table: str, rows: pa.Table, tenant: str, *, received_us: int) -> pa.Table:
    """The rows with all columns of the table: those the hub gives itself, too."""
    wanted = schema.arrow_schema(schema.TABLES[table])
    given = {
        "tenant": repeated(tenant, len(rows)),
        "received_at": pa.repeat(pa.scalar(received_us, pa.int64()), len(rows)).cast(
            pa.timestamp("us", "UTC")
        ),
    }
    there = set(rows.column_names)
    arrays = [
        given[f.name]
        if f.name in given
        else rows.column(f.name)
        if f.name in there
        else nulls(len(rows), f.type)
        for f in wanted
    ]
    return pa.Table.from_arrays(arrays, schema=wanted)


def entries_of(fresh: list[tuple[Batch, Mapping[str, memoryview]]], received_us: int) -> list[Entry]:
    """The rows that senders fill: many rows of one table by themselves, few by tenant and table together.

    fresh: batches, each with what packed_early() gave for it.
    """
    out: list[Entry] = []
    few: dict[tuple[str, str], list[pa.Table]] = {}
    for batch, early in fresh:
        for name, rows in batch.tables.items():
            if name in early:
                out.append(Entry(received_us, batch.tenant, name, rows, early[name]))
            elif name in schema.SENT:
                few.setdefault((batch.tenant, name), []).append(rows)
    return out + [Entry(received_us, tenant, name, joined(rows)) for (tenant, name), rows in few.items()]


def kept_rows(batches: list[Batch]) -> dict[str, list[pa.Table]]:
    """Rows for the tables that the hub keeps itself, complete, in the order they came."""
    found: dict[str, list[pa.Table]] = {}
    for batch in batches:
        for name, rows in batch.tables.items():
            if name in schema.KEPT and name != "nodes":
                full = completed(name, rows, batch.tenant, received_us=time.time_ns() // 1000)
                found.setdefault(name, []).append(full)
    return found
