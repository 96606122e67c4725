"""Descriptions of the tables, views and columns of a node trace."""

from dataclasses import dataclass
from pathlib import Path

from stallscope.events.layout import EVENT_TABLES, Field
from stallscope.events.names import CATEGORY_NAMES
from stallscope.query.trace_views import VIEWS, add_views
from stallscope.store.node import reading

OTHERS = {
    "schema_version": "The version of the table layout.",
    "nodes": "The names of the machines, by number.",
    "symbols": "The names of exported functions, by number.",
    "clocks": "Readings of each node's monotonic clock against wall time, about one a second.",
    "losses": "Records that were lost, by kind and CPU.",
    "sessions": "The writers of the trace, with their start and end and the source of the events.",
    "stacks": "Call stacks, by number.",
    "verdicts": "A change of an incident, as JSON: the verdict with `incident`, `change` and `state`.",
    "annotations": "Labels that the job set: steps, epochs, phases.",
}


@dataclass(frozen=True)
class Column:
    """One column of a table; meaning is empty if its name is sufficient."""

    table: str
    name: str
    type: str
    meaning: str


def columns(path: Path) -> list[Column]:
    """The columns of every table and view of a trace, in order. Raises as store.node.reading()."""
    with reading(path) as db:
        add_views(db)
        tables = [
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
            )
        ]
        tables += [name for (name,) in db.execute("SELECT name FROM sqlite_temp_master WHERE type = 'view'")]
        table_columns = {table: db.execute(f"PRAGMA table_info({table})").fetchall() for table in tables}
    return [
        Column(table, row[1], row[2] or "INTEGER", _meanings(table).get(row[1], ""))
        for table in tables
        for row in table_columns[table]
    ]


def about(table: str) -> str:
    """The meaning of a row of the table or view."""
    meanings = {table_type.name: table_type.meaning for table_type in EVENT_TABLES} | OTHERS
    meanings |= {view.name: view.meaning for view in VIEWS}
    return meanings.get(table, "")


def _meanings(table: str) -> dict[str, str]:
    for view in VIEWS:
        if view.name == table:
            return view.columns
    fields = {
        field.name: field
        for table_type in EVENT_TABLES
        if table_type.name == table
        for field in table_type.fields
    }
    meanings = {name: field.meaning for name, field in fields.items() if name != "ledger_ns"}
    if "ledger_ns" in fields:
        meanings |= {f"{name}_ns": _ledger_meaning(name, fields["ledger_ns"]) for name in CATEGORY_NAMES}
    return meanings


def _ledger_meaning(category: str, field: Field) -> str:
    return field.meaning.replace("in each category", f"in {category}").replace("sums", "sum")
