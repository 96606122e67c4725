"""The incidents of a hub: rows of its table `verdicts` that changed since the last call."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from stallscope.alerts.incident import Incident, from_hub

if TYPE_CHECKING:  # importing the store here would load the engine
    from stallscope.store.hub.store import HubStore

TABLE = "verdicts"


def changed(store: "HubStore", since_ns: int, *, with_open: bool) -> list[Incident]:
    """Incidents of all tenants updated since then. with_open: also open incidents without a recent update."""
    since = pa.scalar(datetime.fromtimestamp(since_ns / 1e9, UTC), pa.timestamp("us", "UTC"))
    incidents = []
    for tenant in store.tenants():
        rows = store.snapshot(tenant, tables=(TABLE,)).hot.get(TABLE)
        if rows is None or not len(rows):
            continue
        is_recent = pc.greater_equal(rows["updated_at"], since)
        wanted = pc.or_(is_recent, pc.equal(rows["state"], "open")) if with_open else is_recent
        incidents += from_hub(rows.filter(wanted).to_pylist())
    return incidents
