"""A tenant's data for its SQL: sealed segments and hot rows of the hub's store, from one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stallscope.diagnose import wall_text
from stallscope.rates import RateTable
from stallscope.serve.sql.workers import Data, Sources

if TYPE_CHECKING:  # importing the store here would load the engine
    import pyarrow as pa

    from stallscope.store.hub.row_bounds import RowBounds
    from stallscope.store.hub.store_protocol import Store


def of_store(store: Store, rates: RateTable, *, max_hot_rows: int) -> Data:
    """The data of a store's tenants, with these GPU rates. max_hot_rows: newest rows per table to include."""

    def data(tenant: str, bounds: Mapping[str, RowBounds], /) -> Sources:
        from stallscope.store.hub import views

        needed = views.bounds_behind(bounds)
        snapshot = store.snapshot(tenant, tables=needed.keys(), bounds=needed)
        hot = {name: rows.slice(max(0, len(rows) - max_hot_rows)) for name, rows in snapshot.hot.items()}
        notes = [
            _left_out(name, rows, hot[name])
            for name, rows in snapshot.hot.items()
            if len(rows) > max_hot_rows
        ]
        if "gpu_rates" in needed:
            hot["gpu_rates"] = rate_rows(rates, tenant)
        sealed = {
            name: [store.folder / segment.path for segment in segments]
            for name, segments in snapshot.segments.items()
            if segments
        }
        folders = {path.parent.parent for paths in sealed.values() for path in paths}
        assert len(folders) <= 1, "segments of one tenant lie in one folder"
        return Sources(next(iter(folders), None), sealed, hot, "; ".join(notes))

    return data


def _left_out(table: str, rows: pa.Table, visible: pa.Table) -> str:
    """Describes the rows that a query does not see: rows are in commit order, and the oldest are left out."""
    missing = rows.slice(0, len(rows) - len(visible))["received_at"]
    first, last = (wall_text(missing[at].cast("int64").as_py() * 1000) for at in (0, -1))
    return (
        f"{table}: this answer omits {len(missing):,} rows that the hub received from {first} to {last} and has not yet"
        " sealed; repeat the query in a minute or two"
    )


def rate_rows(rates: RateTable, tenant: str) -> pa.Table:
    """The table gpu_rates, from the current rates."""
    import pyarrow as pa

    from stallscope.store.hub import schema

    rows = [
        {"tenant": tenant, "provider": rate.provider, "gpu": rate.gpu, "usd_per_hour": rate.usd_per_hour}
        for rate in rates.rates
    ]
    return pa.Table.from_pylist(rows, schema=schema.arrow_schema(schema.GPU_RATES))
