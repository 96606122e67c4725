"""Rows and batches for tests of the hub's store."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from stallscope.store.hub import views
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.row_bounds import NO_BOUNDS, RowBounds
from stallscope.store.hub.store import Batch, HubStore

STILL = Limits(maintenance_s=3600, settle_s=0)
"""No housekeeping unless a test requests it."""
NOW_NS = 1_795_000_000 * 10**9


def collectives(
    seqs: Sequence[int], *, rank: int = 0, nranks: int = 2, late_ns: int = 0, gap_ns: int = 10**9
) -> pa.Table:
    """One rank's arrivals in rounds."""
    n = len(seqs)
    return pa.table(
        {
            "ts_ns": [NOW_NS + seq * gap_ns + late_ns for seq in seqs],
            "cluster_id": ["c1"] * n,
            "node_id": [f"n{rank // 8}"] * n,
            "rank": [rank] * n,
            "nranks": [nranks] * n,
            "comm_hash": ["00000000000000aa"] * n,
            "op": ["all_reduce"] * n,
            "seq": list(seqs),
        }
    )


def events(names: Sequence[str], ts_ns: int = NOW_NS) -> pa.Table:
    """Events of one machine."""
    return pa.table(
        {"ts_ns": [ts_ns + i for i in range(len(names))], "node_id": ["n0"] * len(names), "name": names}
    )


def appended(store: HubStore, tenant: str = "a", batch_id: str = "", **tables: pa.Table) -> None:
    """Store rows and wait for the commit."""
    store.append(Batch(batch_id, tenant, tables)).result(30)


def sql(
    store: HubStore, text: str, tenant: str = "a", bounds: Mapping[str, RowBounds] = NO_BOUNDS
) -> list[tuple[object, ...]]:
    """Rows of a query over the sealed and hot rows of a tenant, within the bounds of their table."""
    snapshot = store.snapshot(tenant, bounds=bounds)
    files = {name: [str(store.folder / s.path) for s in result] for name, result in snapshot.segments.items()}
    with duckdb.connect() as db:
        for name, rows in snapshot.hot.items():
            db.register(f"hot_{name}", rows)
        for statement in views.statements(files, {name: f"hot_{name}" for name in snapshot.hot}):
            db.execute(statement)
        return db.execute(text).fetchall()


def files(store: HubStore, tenant: str = "a") -> list[Path]:
    """The tenant's sealed files; the folder a file is in is named for its table."""
    segments = store.snapshot(tenant).segments
    return [store.folder / segment.path for of_table in segments.values() for segment in of_table]


def maintained(store: HubStore) -> None:
    """Run the due maintenance now: seal, merge, expire, checkpoint."""
    store._compactor.round()


@contextmanager
def without_commits(store: HubStore) -> Iterator[None]:
    """Block commits inside the with block: a full hub."""
    begun, ended = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        ended.wait()

    store._writer.call(wait)
    begun.wait()
    try:
        yield
    finally:
        ended.set()
