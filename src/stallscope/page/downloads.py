"""Downloads: a window of a job for Perfetto, and a table as Parquet."""

import io
import json
from typing import TYPE_CHECKING, Any

from stallscope.errors import BadInput
from stallscope.events.trace import Trace
from stallscope.page.tenant_jobs import Job

if TYPE_CHECKING:
    from stallscope.store.hub.store_protocol import Store

_MAX_ROWS = 200_000
_TABLES = ("collectives", "calls", "offcpu")


def perfetto(store: "Store", job: Job, *, from_ns: int, to_ns: int) -> bytes:
    """The timeline of a window of a job. Raises BadInput for more rows than a browser can use."""
    from stallscope.diagnose import diagnose
    from stallscope.exporters.perfetto import perfetto_bytes
    from stallscope.exporters.timeline_builder import build_track_set
    from stallscope.store.hub import traces

    params: dict[str, Any] = {"from_ns": from_ns, "to_ns": to_ns, "max_rows": _MAX_ROWS}
    tables = {
        name: store.ask(f"page_window_{name}", tenant=job.tenant, params=params, job=job.filter)
        for name in _TABLES
    }
    n_rows = sum(map(len, tables.values()))
    if any(len(rows) >= _MAX_ROWS for rows in tables.values()):
        raise BadInput(f"the window has more than {_MAX_ROWS:,} rows; zoom in, and export a shorter window")
    trace = traces.trace(tables) if n_rows else Trace()
    return b"".join(perfetto_bytes(build_track_set(trace, diagnose(trace))))


def parquet(body: bytes) -> bytes:
    """A Parquet file of {"columns": [...], "rows": [[...]]}. Raises BadInput."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = json.loads(body)
        columns, rows = [str(name) for name in table["columns"]], table["rows"]
        by_name = {
            name: [None if row[number] is None else row[number] for row in rows]
            for number, name in enumerate(columns)
        }
        arrays = [_array(values) for values in by_name.values()]
        out = io.BytesIO()
        pq.write_table(pa.table(dict(zip(by_name, arrays, strict=True))), out)
    except (ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as error:
        raise BadInput(f"the table cannot be written as Parquet: {str(error)[:120]}") from error
    return out.getvalue()


def _array(values: list[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values)
    except pa.ArrowException:
        return pa.array([None if value is None else str(value) for value in values])
