"""Combines small waiting requests of the Arrow endpoint into batches.

A table has dozens of columns, and the cost of a column hardly depends on the number of rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from stallscope.receive.arrow import Request, about_rows, in_our_form
from stallscope.store.hub import schema
from stallscope.store.hub.batches import Batch

_Signature = tuple[tuple[str, pa.Schema], ...]


def alike(requests: Sequence[Request]) -> list[list[int]]:
    """The numbers of requests that have the same tables with the same columns, as requests of one program have."""
    groups: dict[_Signature, list[int]] = {}
    for number, request in enumerate(requests):
        signature = tuple((name, raw.schema) for name, raw in sorted(request.tables.items()))
        groups.setdefault(signature, []).append(number)
    return list(groups.values())


def together(requests: Sequence[Request], tenant: str) -> tuple[Batch, list[Mapping[str, int]]]:
    """The batch of several requests, and the rows of each request by table, in order. Raises BadInput.

    All requests have the same tables with the same columns. The batch has no id.
    """
    tables = {name: _formed(name, requests) for name in requests[0].tables}
    n_rows = [{name: len(raw) for name, raw in request.tables.items()} for request in requests]
    about = [(number, request.about) for number, request in enumerate(requests) if request.about]
    if about:
        tables["nodes"] = about_rows([row for _, row in about])
        for number, _ in about:
            n_rows[number]["nodes"] = 1
    return Batch("", tenant, tables, sum(request.n_bytes for request in requests)), list(n_rows)


def _formed(name: str, requests: Sequence[Request]) -> pa.Table:
    """The rows for one table of all requests, in the store's format."""
    raws = [request.tables[name] for request in requests]
    rows = in_our_form(pa.concat_tables(raws).combine_chunks(), name)
    owner = pa.array(np.repeat(np.arange(len(raws)), [len(raw) for raw in raws]))
    for column in ("node", "cluster"):
        defaults = [getattr(request, column) or None for request in requests]
        if f"{column}_id" not in rows.column_names and any(defaults):
            rows = rows.append_column(f"{column}_id", pa.array(defaults, pa.string()).take(owner))
    return schema.conformed(name, rows)
