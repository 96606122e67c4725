"""Every table of the hub, column by column: the single definition for DuckDB, Arrow and the views.

Times are ns (or TIMESTAMPTZ, us) since 1970 UTC, from the sender's clock readings. Unknown values are NULL. The
columns of tables in events/layout.py follow from there: enumeration numbers become names, 64-bit hashes become
16 hexadecimal digits, the time ledger becomes one column per category, and the sender's number of a function becomes
the function's name.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from stallscope.errors import BadInput
from stallscope.events import layout, verdict_fields
from stallscope.events.names import CATEGORY_NAMES
from stallscope.events.owner import GROUP_LABELS, OWNER_LABELS, column

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
    """One table. key: unique columns if later rows replace earlier rows; empty: rows are only added."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The columns' names in order."""
        return [column.name for column in self.columns]


_WHEN = (
    Column("ts", "time", "time of the event"),
    Column("ts_ns", "int64", "time of the event, ns since 1970"),
    Column("received_at", "time", "time of the hub's commit; increases from commit to commit"),
)
_WHERE = (
    Column("tenant", "text", "owner of the row: from the token, never from the sender's data"),
    Column("cluster_id", "text", "cluster"),
    Column("node_id", "text", "machine"),
)
_RANK = (
    Column("rank", "int32", "rank in the job"),
    Column("nranks", "int32", "ranks in the communicator, or in the job without a communicator"),
    Column("local_rank", "int32", "rank on the machine"),
)
_ATTRS = Column("attrs", "text", "JSON: all attributes from the sender without a column")

EVENT_COLUMNS = (
    *_WHEN,
    *_WHERE,
    *_RANK,
    Column("name", "text", "record name: event, metric or span name"),
    Column("op", "text", "operation: all_reduce, copy, ..."),
    Column("comm_hash", "text", "communicator: 16 hexadecimal digits, or the sender's own identifier"),
    Column("seq", "int64", "round: number of the collective on the communicator"),
    Column("step", "int64", "training step"),
    Column("pid", "int64", "process"),
    Column("tid", "int64", "thread"),
    Column("gpu_uuid", "text", "GPU"),
    Column("duration_ns", "int64", "duration"),
    Column("count_bytes", "int64", "bytes moved, allocated or reduced"),
    Column("datatype", "text", "element type"),
    Column("reduce_op", "text", "sum, prod, max, min, avg"),
    Column("peer_rank", "int32", "peer of send and recv; root of broadcast, reduce, ..."),
    Column("value_double", "double", "numeric value of a record or metric"),
    Column("value_text", "text", "text of a record: an OTLP log's body"),
    Column("causal_chain_id", "text", "causal chain of the record"),
    _ATTRS,
)
"""Columns of `events`. The view `events` also shows the rows of other tables in these columns."""

_HEX = ("comm_hash", "parent_hash")
_NAMED = ("op", "in_call", "category", "datatype", "reduce_op", "symbol")


def _from_layout(table: layout.Table, skipped: Iterable[str] = ()) -> tuple[Column, ...]:
    """The columns that follow from a record type, without its own time and node."""
    out = []
    for field in table.fields:
        if field.name in ("ts_ns", "node", *skipped):
            continue
        if field.format.startswith("("):
            out += [
                Column(f"{name}_ns", "int64", f"time ledger: {name}, running sum") for name in CATEGORY_NAMES
            ]
        elif field.name in (*_HEX, *_NAMED) or field.format.startswith("S"):
            out.append(Column(field.name, "text", field.meaning))
        else:
            out.append(Column(field.name, "int64", field.meaning))
    return tuple(out)


def _of_node(table: layout.Table) -> HubTable:
    return HubTable(table.name, table.meaning, (*_WHEN, *_WHERE, *_from_layout(table), _ATTRS))


EVENTS = HubTable("events", "Records that no other table covers.", EVENT_COLUMNS)

COLLECTIVES = HubTable(
    "collectives",
    layout.COLLECTIVES.meaning,
    (
        *EVENT_COLUMNS[:-1],
        *_from_layout(layout.COLLECTIVES, [column.name for column in EVENT_COLUMNS]),
        Column(
            "late_ns",
            "int64",
            "arrival minus the round's median arrival, by the senders' clocks; set if the round is complete",
        ),
        _ATTRS,
    ),
)

NODE_METRICS = HubTable(
    "node_metrics",
    "A data point of a metric.",
    (
        *_WHEN,
        *_WHERE,
        *_RANK,
        Column("gpu_uuid", "text", "GPU"),
        Column("name", "text", "the metric's name"),
        Column("unit", "text", "unit, as the sender names it"),
        Column("kind", "text", "gauge, sum, histogram, exponential_histogram or summary"),
        Column("is_cumulative", "bool", "value since start_ns; otherwise since the previous point"),
        Column("is_monotonic", "bool", "a counter: only grows, except at resets"),
        Column("start_ns", "int64", "begin of the interval that the value covers"),
        Column("value_double", "double", "the value; a histogram's sum"),
        Column(
            "increase", "double", "cumulative sums: growth since the previous point, corrected for resets"
        ),
        Column("is_reset", "bool", "the counter restarted since the previous point"),
        Column("n", "int64", "histograms and summaries: number of measurements"),
        Column("causal_chain_id", "text", "causal chain of the point"),
        _ATTRS,
    ),
)

STACKS = HubTable(
    "stacks",
    "A call stack, stored once.",
    (
        *_WHEN,
        *_WHERE,
        Column("pid", "int64", "process"),
        Column("stack", "int64", "number of the stack on the machine"),
        Column("frames", "text", "JSON: innermost frame first"),
    ),
)

CLOCKS = HubTable(
    "clocks",
    "A reading of a machine's monotonic clock against its wall clock; ts_ns is the wall clock's.",
    (
        *_WHEN,
        *_WHERE,
        Column("monotonic_ns", "int64", "CLOCK_MONOTONIC at the same moment"),
        Column("error_ns", "int64", "half the width of the bracket"),
        Column("is_synchronised", "bool", "the kernel reports that NTP synchronises the clock"),
    ),
)

LOSSES = HubTable(
    "losses",
    "Records that a sender lost before sending them.",
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
    "Verdicts of the continuous diagnosis: one row per incident, replaced while it lasts.",
    (
        Column("tenant", "text", "owner of the row"),
        Column("cluster_id", "text", "cluster"),
        Column("verdict_id", "text", "the incident"),
        Column("job", "text", "the job, see the table jobs"),
        Column("state", "text", "open or closed"),
        Column("opened_at", "time", "time of the first report"),
        Column("updated_at", "time", "time of the last change of this row"),
        Column("closed_at", "time", "time at which the incident closed"),
        Column("node_id", "text", "machine of the first named rank"),
        Column("rank", "int32", "the first named rank"),
        *(_of_verdict(field) for field in verdict_fields.FIELDS),
        Column("verdict", "text", "JSON: the whole verdict"),
    ),
    ("tenant", "verdict_id"),
)

JOBS = HubTable(
    "jobs",
    "A job of the continuous diagnosis: processes that share communicators. One row per job, replaced while it runs.",
    (
        Column("tenant", "text", "owner of the row"),
        Column("cluster_id", "text", "cluster"),
        Column("job", "text", "its largest communicator, otherwise node and pid of its first process"),
        Column(
            "begin_ns",
            "int64",
            "first collective, ns since 1970; without collectives, start of its process",
        ),
        Column(
            "last_ns", "int64", "last collective, ns since 1970; without collectives, last row of its process"
        ),
        Column("ended_ns", "int64", "end of the job, ns since 1970; NULL while it runs"),
        Column("n_ranks", "int64", "processes"),
        Column("members", "text", "JSON: node, pid and rank of each process"),
        Column("answer", "text", "healthy, found or inconclusive: as of explain"),
        Column("reasons", "text", "JSON: why the answer is inconclusive, with the next action"),
        Column("evidence", "text", "JSON: how complete the examined data is"),
        Column("updated_at", "time", "time of the last change of this row"),
        *(Column(column(label), "text", f"owner: {OWNER_LABELS[label]}") for label in GROUP_LABELS),
    ),
    ("tenant", "cluster_id", "job"),
)

CAUSAL_CHAINS = HubTable(
    "causal_chains",
    "Verdicts in the format that other GPU agents use for their findings.",
    (
        *_WHEN,
        *_WHERE,
        Column("rank", "int32", "rank in the job"),
        Column("causal_chain_id", "text", "the incident"),
        Column("severity", "text", "CRITICAL, HIGH, MEDIUM or LOW"),
        Column("summary", "text", "one sentence"),
        Column("root_cause", "text", "the cause"),
        Column("explanation", "text", "evidence for the cause"),
        Column("recommendations", "text", "JSON: recommended actions"),
        Column("timeline", "text", "JSON: events by layer"),
        Column("state", "text", "open or closed"),
    ),
    ("tenant", "causal_chain_id"),
)

NODES = HubTable(
    "nodes",
    "A machine that has sent data.",
    (
        Column("tenant", "text", "owner of the row"),
        Column("cluster_id", "text", "cluster"),
        Column("node_id", "text", "machine"),
        Column("first_seen", "time", "time of the first data"),
        Column("last_seen", "time", "time of the last data, accurate to a few seconds"),
        Column("gpu_model", "text", "GPU model, as the driver names it"),
        Column("provider", "text", "cloud provider"),
        Column("n_gpus", "int32", "number of GPUs"),
        Column("agent", "text", "the sender's name and version"),
    ),
    ("tenant", "cluster_id", "node_id"),
)

GPU_RATES = HubTable(
    "gpu_rates",
    "Prices of GPU hours.",
    (
        Column("tenant", "text", "owner of the row"),
        Column("provider", "text", "cloud provider, or any"),
        Column("gpu", "text", "GPU model"),
        Column("usd_per_hour", "double", "price"),
    ),
    ("tenant", "provider", "gpu"),
)

_SENT = (
    EVENTS,
    COLLECTIVES,
    *(_of_node(table) for table in layout.HUB_TABLES if table is not layout.COLLECTIVES),
    NODE_METRICS,
    STACKS,
    CLOCKS,
    LOSSES,
)
SENT = {table.name: table for table in _SENT}
"""Tables that senders fill: rows are only added, kept hot, sealed and expired."""

KEPT = {table.name: table for table in (VERDICTS, JOBS, CAUSAL_CHAINS, NODES, GPU_RATES)}
"""Tables that the hub maintains itself: small, rows are replaced by key."""

TABLES = SENT | KEPT

GIVEN_BY_HUB = ("tenant", "received_at")
"""Columns that the store fills, regardless of the batch."""


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
    """The rows with exactly the columns and types of table `name`, without the columns that the hub fills.

    rows: a pyarrow Table; missing columns become NULL, `ts` follows from `ts_ns`. Raises BadInput for an unknown table
    or column, and for values of the wrong type.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from stallscope.store.hub.arrow_tables import constant, nulls

    if name not in TABLES:
        raise BadInput(f"unknown table {name!r}; the hub's tables are {', '.join(sorted(TABLES))}")
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
                micros = pc.divide(rows.column(there["ts_ns"]).cast(pa.int64()), constant(1000))
                arrays.append(micros.cast(field.type))
            elif field.name in there:
                values = rows.column(there[field.name])
                arrays.append(values if values.type == field.type else values.cast(field.type))
            else:
                arrays.append(nulls(len(rows), field.type))
        return pa.Table.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise BadInput(
            f"the rows for table {name} have wrong types: {str(error).splitlines()[0][:200]}"
        ) from error


def create_statement(table: HubTable) -> str:
    """CREATE TABLE for a table that the hub maintains in DuckDB."""
    columns = ", ".join(f"{column.name} {column.sql_type}" for column in table.columns)
    key = f", PRIMARY KEY ({', '.join(table.key)})" if table.key else ""
    return f"CREATE TABLE IF NOT EXISTS {table.name} ({columns}{key})"
