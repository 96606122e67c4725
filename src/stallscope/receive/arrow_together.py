"""Small requests of the Arrow lane that wait at one time, made into batches together.

A table has dozens of columns, and each costs about the same for few rows as for many.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stallscope.errors import BadInput
from stallscope.receive.arrow import Request, in_our_form, with_about
from stallscope.store.hub import schema
from stallscope.store.hub.writer import Batch

SMALL_BYTES = 1 << 18
"""Larger requests are made into batches alone: together they would not be quicker."""


def batches(requests: Sequence[Request], tenant: str) -> list[Batch] | None:
    """The batch of each request; None where each must be looked at by itself."""
    alike: dict[tuple[str, pa.Schema], list[int]] = {}
    for number, request in enumerate(requests):
        for name, raw in request.tables.items():
            alike.setdefault((name, raw.schema), []).append(number)
    parts: list[dict[str, pa.Table]] = [{} for _ in requests]
    try:
        for (name, _), numbers in alike.items():
            for number, rows in zip(
                numbers, _formed(name, [requests[number] for number in numbers]), strict=True
            ):
                parts[number][name] = rows
    except (BadInput, pa.ArrowException):  # who sent what does not fit is found out one by one
        return None
    return [
        Batch(request.batch_id, tenant, with_about(request, tables))
        for request, tables in zip(requests, parts, strict=True)
    ]


def _formed(name: str, requests: Sequence[Request]) -> list[pa.Table]:
    """The rows for one table of each request, as the store wants them; all are sent with the same columns."""
    raws = [request.tables[name] for request in requests]
    rows = in_our_form(pa.concat_tables(raws).combine_chunks(), name)
    lengths = [len(raw) for raw in raws]
    whose = pa.array(np.repeat(np.arange(len(raws)), lengths))
    for column in ("node", "cluster"):
        told = [getattr(request, column) or None for request in requests]
        if f"{column}_id" not in rows.column_names and any(told):
            rows = rows.append_column(f"{column}_id", pa.array(told, pa.string()).take(whose))
    rows = schema.conformed(name, rows)
    ends = np.cumsum(lengths).tolist()
    return [rows.slice(end - n, n) for end, n in zip(ends, lengths, strict=True)]
