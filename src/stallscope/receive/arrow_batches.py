"""Combines small waiting requests of the Arrow endpoint into batches.

A table has dozens of columns, and the cost of a column hardly depends on the number of rows.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stallscope.errors import BadInput
from stallscope.receive.arrow import Request, in_our_form, with_about
from stallscope.store.hub import schema
from stallscope.store.hub.arrow_tables import parted
from stallscope.store.hub.batches import Batch


def batches(requests: Sequence[Request], tenant: str) -> list[Batch] | None:
    """The batch of each request; None if each request must be decoded alone."""
    groups: dict[tuple[str, pa.Schema], list[int]] = {}
    for number, request in enumerate(requests):
        for name, raw in request.tables.items():
            groups.setdefault((name, raw.schema), []).append(number)
    parts: list[dict[str, pa.Table]] = [{} for _ in requests]
    n_bytes = [0] * len(requests)
    try:
        for (name, _), numbers in groups.items():
            formed = _formed(name, [requests[number] for number in numbers])
            for number, (rows, n) in zip(numbers, formed, strict=True):
                parts[number][name] = rows
                n_bytes[number] += n
    except (BadInput, pa.ArrowException):  # decoding each request alone finds the invalid request
        return None
    return [
        Batch(request.batch_id, tenant, with_about(request, tables), n)
        for request, tables, n in zip(requests, parts, n_bytes, strict=True)
    ]


def _formed(name: str, requests: Sequence[Request]) -> list[tuple[pa.Table, int]]:
    """The rows for one table of each request, in the store's format, and their approximate size in bytes.

    All requests have the same columns.
    """
    raws = [request.tables[name] for request in requests]
    rows = in_our_form(pa.concat_tables(raws).combine_chunks(), name)
    lengths = [len(raw) for raw in raws]
    owner = pa.array(np.repeat(np.arange(len(raws)), lengths))
    for column in ("node", "cluster"):
        defaults = [getattr(request, column) or None for request in requests]
        if f"{column}_id" not in rows.column_names and any(defaults):
            rows = rows.append_column(f"{column}_id", pa.array(defaults, pa.string()).take(owner))
    return parted(schema.conformed(name, rows), lengths)
