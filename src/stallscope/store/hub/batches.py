"""Batches from senders, and their forms in the store: entries of the journal, and rows for queries."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa

from stallscope.store.hub import schema
from stallscope.store.hub.arrow_tables import joined, nulls, repeated
from stallscope.store.hub.journal import Entry
from stallscope.store.hub.packing import packed

_PACKED_EARLY = 2_000
"""Larger tables are packed by the thread that delivers them; smaller tables are first combined with others."""


@dataclass(frozen=True)
class Batch:
    """Rows to store, all or nothing. batch_id: empty if a retry cannot be recognised.

    tables: rows by table name, with columns of store/hub/schema.py; missing columns become NULL.
    n_bytes: approximate size of the rows, if known; computing it costs as much as storing a few rows.
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
    """A batch is on disk. is_duplicate: it was stored before, and nothing was added."""

    n_rows: int
    is_duplicate: bool
    received_us: int


@dataclass(frozen=True)
class BatchMember:
    """A request whose rows are in a batch together with the rows of other requests.

    n_rows: its rows by table; in each table they follow the rows of the previous members. stored: resolves once they
    are on disk.
    """

    batch_id: str
    n_rows: Mapping[str, int]
    stored: "Future[Receipt]" = field(default_factory=Future)

    @property
    def n_all_rows(self) -> int:
        """Rows in all tables."""
        return sum(self.n_rows.values())


def sole_member(batch: Batch) -> BatchMember:
    """The batch of one request."""
    return BatchMember(batch.batch_id, {name: len(rows) for name, rows in batch.tables.items()})


def separated(batch: Batch, members: Sequence[BatchMember]) -> list[tuple[Batch, BatchMember]]:
    """A batch for each member."""
    begins = dict.fromkeys(batch.tables, 0)
    a_row = None if batch.n_bytes is None else batch.n_bytes / max(batch.n_rows, 1)
    out = []
    for member in members:
        tables = {}
        for name, n_rows in member.n_rows.items():
            tables[name] = batch.tables[name].slice(begins[name], n_rows)
            begins[name] += n_rows
        n_bytes = None if a_row is None else int(a_row * member.n_all_rows)
        out.append((Batch(member.batch_id, batch.tenant, tables, n_bytes), member))
    return out


def packed_early(batch: Batch) -> dict[str, memoryview]:
    """The rows of its large tables, packed for the journal."""
    return {
        name: packed(rows)
        for name, rows in batch.tables.items()
        if name in schema.SENT and len(rows) >= _PACKED_EARLY
    }


def completed(table: str, rows: pa.Table, tenant: str, *, received_us: int) -> pa.Table:
    """The rows with all columns of the table, including the columns that the hub fills."""
    wanted = schema.arrow_schema(schema.TABLES[table])
    set_by_hub = {
        "tenant": repeated(tenant, len(rows)),
        "received_at": pa.repeat(pa.scalar(received_us, pa.int64()), len(rows)).cast(
            pa.timestamp("us", "UTC")
        ),
    }
    there = set(rows.column_names)
    arrays = [
        set_by_hub[f.name]
        if f.name in set_by_hub
        else rows.column(f.name)
        if f.name in there
        else nulls(len(rows), f.type)
        for f in wanted
    ]
    return pa.Table.from_arrays(arrays, schema=wanted)


def entries_of(fresh: list[tuple[Batch, Mapping[str, memoryview]]], received_us: int) -> list[Entry]:
    """The journal entries of the rows: a large table alone, small tables combined by tenant and table.

    fresh: batches, each with its result of packed_early().
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
    """Complete rows for the tables that the hub maintains itself, in order of arrival."""
    tables: dict[str, list[pa.Table]] = {}
    for batch in batches:
        for name, rows in batch.tables.items():
            if name in schema.KEPT and name != "nodes":
                full = completed(name, rows, batch.tenant, received_us=time.time_ns() // 1000)
                tables.setdefault(name, []).append(full)
    return tables
