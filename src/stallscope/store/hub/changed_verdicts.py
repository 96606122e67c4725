"""Rows of the table `verdicts` that changed, over all tenants."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stallscope.store.hub.store_protocol import Store

_TABLE = "verdicts"


def changed_verdicts(store: Store, since_ns: int, *, with_open: bool) -> list[dict[str, Any]]:
    """Rows updated since then (ns since 1970). with_open: also rows of open incidents without a recent update."""
    since = pa.scalar(datetime.fromtimestamp(since_ns / 1e9, UTC), pa.timestamp("us", "UTC"))
    changed: list[dict[str, Any]] = []
    for tenant in store.tenants():
        rows = store.snapshot(tenant, tables=(_TABLE,)).hot.get(_TABLE)
        if rows is None or not len(rows):
            continue
        is_wanted = pc.greater_equal(rows["updated_at"], since)
        if with_open:
            is_wanted = pc.or_(is_wanted, pc.equal(rows["state"], "open"))
        changed += rows.filter(is_wanted).to_pylist()
    return changed
