"""Every table of the hub, column by column: one place, from which DuckDB, Arrow and the views follow.

Times are ns (or TIMESTAMPTZ, us) since 1970 UTC, as the sender's clock readings say. What is unknown is NULL.
Where a table is one of events/layout.py its columns follow from there: numbers of enumerations become their names,
64-bit hashes become 16 hexadecimal digits, the ledger becomes one column for each category, and the sender's
number of a function becomes the function's name.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from stallscope.errors import BadInput
from stallscope.events import layout, verdict_fields
from stallscope.events.names import CATEGORY_NAMES

_SQL = {
    "text": "VARCHAR",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "double": "DOUBLE",
    "bool": "BOOLEAN",
    "time": "TIMESTAMPTZ",
}


class Column(NamedTuple):
    """One column. kind: text, int32, int64, double, bool or time (us since 1970 UTC)."""

    name: str
    kind: str
    meaning: str

    @property
    def sql_type(self) -> str:
        """The column's type in DuckDB."""
        return _SQL[self.kind]


class HubTable(NamedTuple):
    """One table. key: what makes a row unique where later rows replace earlier ones; empty: rows are only added."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The columns' names in order."""
        return [column.name for column in self.columns]


_WHEN = (
    Column("ts", "time", "when it happened"),
    Column("ts_ns", "int64", "when it happened, ns since 1970"),
    Column("received_at", "time", "when the hub committed it; grows from commit to commit"),
)
_WHERE = (
    Column("tenant", "text", "whose it is: from the token, never from the sender's data"),
    Column("cluster_id", "text", "cluster"),
    Column("node_id", "text", "machine"),
)
_RANK = (
    Column("rank", "int32", "rank in the job"),
    Column("nranks", "int32", "ranks in the communicator, or in the job where there is none"),
    Column("local_rank", "int32", "rank on the machine"),
)
_ATTRS = Column("attrs", "text", "JSON: everything the sender said that has no column of its own")

EVENT_COLUMNS = (
    *_WHEN,
    *_WHERE,
    *_RANK,
    Column("name", "text", "what kind of record: event, metric or span name"),
    Column("op", "text", "operation: all_reduce, copy, ..."),
    Column("comm_hash", "text", "communicator: 16 hexadecimal digits, or the sender's own word for it"),
    Column("seq", "int64", "round: n-th collective on the communicator"),
    Column("step", "int64", "training step"),
    Column("pid", "int64", "process"),
    Column("tid", "int64", "thread"),
    Column("gpu_uuid", "text", "GPU"),
    Column("duration_ns", "int64", "how long it took"),
    Column("count_bytes", "int64", "bytes moved, allocated or reduced"),
    Column("datatype", "text", "element type"),
    Column("reduce_op", "text", "sum, prod, max, min, avg"),
    Column("peer_rank", "int32", "the other side of send and recv; the root of broadcast, reduce, ..."),
    Column("value_double", "double", "the number of a numeric record or metric"),
    Column("value_text", "text", "the text of a record: an OTLP log's body"),
    Column("causal_chain_id", "text", "chain of causes that the record belongs to"),
    _ATTRS,
)
"""Columns of `events`. The view of that name shows the rows of other tables in the same columns, too."""

_HEX = ("comm_hash", "parent_hash")
_NAMED = ("op", "in_call", "category", "datatype", "reduce_op", "symbol")


def _from_layout(table: layout.Table, skipped: Iterable[str] = ()) -> tuple[Column, ...]:
    """The columns that follow from a record type, without its own time and node."""
    out = []
    for field in table.fields:
        if field.name in ("ts_ns", "node", *skipped):
            continue
        if field.format.startswith("("):
            out += [Column(f"{name}_ns", "int64", f"ledger: {name}, running sum") for name in CATEGORY_NAMES]
        elif field.name in (*_HEX, *_NAMED) or field.format.startswith("S"):
            out.append(Column(field.name, "text", field.meaning))
        else:
            out.append(Column(field.name, "int64", field.meaning))
    return tuple(out)


def _of_node(table: layout.Table) -> HubTable:
    return HubTable(table.name, table.meaning, (*_WHEN, *_WHERE, *_from_layout(table), _ATTRS))


EVENTS = HubTable("events", "Records of any kind that have no table of their own.", EVENT_COLUMNS)

COLLECTIVES = HubTable(
    "collectives",
    layout.COLLECTIVES.meaning,
    (
        *EVENT_COLUMNS[:-1],
        *_from_layout(layout.COLLECTIVES, [column.name for column in EVENT_COLUMNS]),
        Column(
            "late_ns",
            "int64",
            "arrival minus the round's median arrival, by the senders' clocks; set where the round is complete",
        ),
        _ATTRS,
    ),
)

NODE_METRICS = HubTable(
    "node_metrics",
    "A point of a metric: one number at one moment.",
    (
        *_WHEN,
        *_WHERE,
        *_RANK,
        Column("gpu_uuid", "text", "GPU"),
        Column("name", "text", "the metric's name"),
        Column("unit", "text", "its unit, as the sender calls it"),
        Column("kind", "text", "gauge, sum, histogram, exponential_histogram or summary"),
        Column("is_cumulative", "bool", "value since start_ns; otherwise since the point before"),
        Column("is_monotonic", "bool", "a counter: only grows, but for resets"),
        Column("start_ns", "int64", "begin of what the value counts"),
        Column("value_double", "double", "the value; a histogram's sum"),
        Column("increase", "double", "cumulative sums: growth since the point before, resets allowed for"),
        Column("is_reset", "bool", "the counter began anew since the point before"),
        Column("n", "int64", "histograms and summaries: number of measurements"),
        Column("causal_chain_id", "text", "chain of causes that the point belongs to"),
        _ATTRS,
    ),
)

STACKS = HubTable(
    "stacks",
    "A call stack, kept once.",
    (
        *_WHEN,
        *_WHERE,
        Column("pid", "int64", "process"),
        Column("stack", "int64", "its number on the machine"),
        Column("frames", "text", "JSON: innermost frame first"),
    ),
)

CLOCKS = HubTable(
    "clocks",
    "A reading of a machine's monotonic clock against its wall clock; ts_ns is the wall clock's.",
    (
        *_WHEN,
        *_WHERE,
        Column("monotonic_ns", "int64", "CLOCK_MONOTONIC at that moment"),
        Column("error_ns", "int64", "half the width of the bracket"),
        Column("is_synchronised", "bool", "the kernel says that NTP holds the clock"),
    ),
)

LOSSES = HubTable(
    "losses",
    "Records that a sender lost before it could send them.",
    (
        *_WHEN,
        *_WHERE,
        Column("kind", "text", "kind of record"),
        Column("n_lost", "int64", "records lost since the last row of this kind"),
    ),
)

_VERDICT_TYPES: dict[verdict_fields.FieldType, str] = {
    "text": "text",
    "number": "double",
    "integer": "int64",
    "boolean": "bool",
    "time": "int64",
    "texts": "text",
    "integers": "text",
}


def _of_verdict(field: verdict_fields.VerdictField) -> Column:
    """The column of a verdict's field; lists are JSON text."""
    prefix = "JSON: " if field.type in ("texts", "integers") else ""
    suffix = ", ns since 1970" if field.type == "time" else ""
    return Column(field.name, _VERDICT_TYPES[field.type], f"{prefix}{field.meaning}{suffix}")


VERDICTS = HubTable(
    "verdicts",
    "What the standing diagnosis found: one row for each incident, replaced while it lasts.",
    (
        Column("tenant", "text", "whose it is"),
        Column("cluster_id", "text", "cluster"),
        Column("verdict_id", "text", "the incident"),
        Column("state", "text", "open or closed"),
        Column("opened_at", "time", "when the hub first said it"),
        Column("updated_at", "time", "when this row was last changed"),
        Column("closed_at", "time", "when the hub found it over"),
        Column("node_id", "text", "machine of the first rank named"),
        Column("rank", "int32", "the first rank named"),
        *(_of_verdict(field) for field in verdict_fields.FIELDS),
        Column("verdict", "text", "JSON: the whole verdict"),
    ),
    ("tenant", "verdict_id"),
)

CAUSAL_CHAINS = HubTable(
    "causal_chains",
    "Verdicts in the shape that other GPU agents give their findings.",
    (
        *_WHEN,
        *_WHERE,
        Column("rank", "int32", "rank in the job"),
        Column("causal_chain_id", "text", "the incident"),
        Column("severity", "text", "CRITICAL, HIGH, MEDIUM or LOW"),
        Column("summary", "text", "one sentence"),
        Column("root_cause", "text", "the cause"),
        Column("explanation", "text", "how it is known"),
        Column("recommendations", "text", "JSON: what to do"),
        Column("timeline", "text", "JSON: what happened in which layer"),
        Column("state", "text", "open or closed"),
    ),
    ("tenant", "causal_chain_id"),
)

NODES = HubTable(
    "nodes",
    "A machine that has sent something.",
    (
        Column("tenant", "text", "whose it is"),
        Column("cluster_id", "text", "cluster"),
        Column("node_id", "text", "machine"),
        Column("first_seen", "time", "when the hub first heard of it"),
        Column("last_seen", "time", "when it last sent something, true to a few seconds"),
        Column("gpu_model", "text", "the driver's name of its GPUs"),
        Column("provider", "text", "cloud provider"),
        Column("n_gpus", "int32", "its GPUs"),
        Column("agent", "text", "the sender's name and version"),
    ),
    ("tenant", "cluster_id", "node_id"),
)

GPU_RATES = HubTable(
    "gpu_rates",
    "What a GPU hour costs.",
    (
        Column("tenant", "text", "whose price it is"),
        Column("provider", "text", "cloud provider, or any"),
        Column("gpu", "text", "GPU model"),
        Column("usd_per_hour", "double", "price"),
    ),
    ("tenant", "provider", "gpu"),
)

_SENT = (
    EVENTS,
    COLLECTIVES,
    *(_of_node(table) for table in layout.TABLES if table is not layout.COLLECTIVES),
    NODE_METRICS,
    STACKS,
    CLOCKS,
    LOSSES,
)
SENT = {table.name: table for table in _SENT}
"""Tables that senders fill: rows are only added, kept hot, sealed and expired."""

KEPT = {table.name: table for table in (VERDICTS, CAUSAL_CHAINS, NODES, GPU_RATES)}
"""Tables that the hub itself keeps: small, rows are replaced by key."""

TABLES = SENT | KEPT

GIVEN_BY_HUB = ("tenant", "received_at")
"""What the store sets itself, whatever a batch says."""


@cache
def arrow_type(column: Column) -> Any:
    """The column's pyarrow type."""
    import pyarrow as pa

    return {
        "text": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "time": pa.timestamp("us", "UTC"),
    }[column.kind]


def arrow_schema(table: HubTable, *, without: Iterable[str] = ()) -> Any:
    """The pyarrow schema of a table's rows."""
    return _arrow_schema(table.name, frozenset(without))


@cache
def _arrow_schema(name: str, left_out: frozenset[str]) -> Any:
    import pyarrow as pa

    return pa.schema([(c.name, arrow_type(c)) for c in TABLES[name].columns if c.name not in left_out])


def conformed(name: str, rows: Any) -> Any:
    """The rows with exactly the columns and types of table `name`, but those the hub gives itself.

    rows: a pyarrow Table; missing columns become NULL, `ts` follows from `ts_ns`. Raises BadInput for a table or a
    column that does not exist, and for values that do not fit.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from stallscope.store.hub.arrow_tables import nulls

    if name not in TABLES:
        raise BadInput(f"there is no table {name!r} in the hub; there are {', '.join(sorted(TABLES))}")
    schema = arrow_schema(TABLES[name], without=GIVEN_BY_HUB)
    if rows.schema.equals(schema):
        return rows
    there = {column: number for number, column in enumerate(rows.column_names)}
    if unknown := there.keys() - {*schema.names, *GIVEN_BY_HUB}:
        raise BadInput(f"table {name} has no column {min(unknown)!r}")
    try:
        arrays = []
        for field in schema:
            if field.name == "ts" and "ts_ns" in there:
                micros = pc.divide(rows.column(there["ts_ns"]).cast(pa.int64()), 1000)
                arrays.append(micros.cast(field.type))
            elif field.name in there:
                values = rows.column(there[field.name])
                arrays.append(values if values.type == field.type else values.cast(field.type))
            else:
                arrays.append(nulls(len(rows), field.type))
        return pa.Table.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise BadInput(f"the rows for table {name} do not fit: {str(error).splitlines()[0][:200]}") from error


def create_statement(table: HubTable) -> str:
    """CREATE TABLE for a table that the hub keeps in DuckDB."""
    columns = ", ".join(f"{column.name} {column.sql_type}" for column in table.columns)
    key = f", PRIMARY KEY ({', '.join(table.key)})" if table.key else ""
    return f"CREATE TABLE IF NOT EXISTS {table.name} ({columns}{key})"
