"""A tenant's tables as views over sealed Parquet files and hot rows: for named questions, and for the SQL workers.

Each table of schema.TABLES is a view with its name, even if it has no rows. `events` shows every record: its own
rows, and the rows of the tables in _ALSO_EVENTS in the same columns.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from stallscope.store.hub import schema
from stallscope.store.hub.job_filter import JobFilter
from stallscope.store.hub.row_bounds import NO_ROWS, RowBounds

_ALSO_EVENTS: dict[str, dict[str, str]] = {
    "collectives": {"name": "COALESCE(name, op)"},
    "calls": {"name": "'call'", "value_text": "symbol"},
    "offcpu": {"name": "'offcpu'", "op": "category", "value_text": "by_comm"},
    "snapshots": {"name": "'snapshot'", "op": "category"},
    "communicators": {"name": "'communicator'", "rank": "CAST(comm_rank AS INTEGER)"},
    "processes": {"name": "'process'", "value_text": "comm"},
    "spans": {"name": "COALESCE(label, op)"},
    "node_metrics": {},
    "losses": {"name": "'lost'", "value_text": "kind", "value_double": "CAST(n_lost AS DOUBLE)"},
}
"""Tables whose rows `events` also shows, with expressions for columns of another name or without a counterpart."""

STORED_EVENTS = "stored_events"
"""View of the rows of the table `events` alone."""


def named(sql: str) -> frozenset[str]:
    """The tables that a statement may read: tables whose names occur as words in it, and the tables behind them."""
    words = set(re.findall(r"\w+", sql))
    stored = frozenset({"events"}) if STORED_EVENTS in words else frozenset()
    return behind(words & schema.TABLES.keys()) | stored


def behind(tables: Collection[str]) -> frozenset[str]:
    """These tables, and the tables whose rows `events` shows if it is one of them."""
    return frozenset(tables) | (_ALSO_EVENTS.keys() if "events" in tables else frozenset())


def bounds_behind(bounds: Mapping[str, RowBounds]) -> dict[str, RowBounds]:
    """The bounds of these tables, and of the tables whose rows `events` shows if it is one of them."""
    out: dict[str, RowBounds] = {}
    for shown, of_shown in bounds.items():
        for table in behind((shown,)):
            out[table] = out.get(table, NO_ROWS).either(of_shown)
    return out


def statements(
    files: Mapping[str, Sequence[str]],
    hot: Mapping[str, str],
    *,
    is_temporary: bool = True,
    only: Collection[str] = schema.TABLES.keys(),
    called: Mapping[str, str] | None = None,
    job: JobFilter | None = None,
) -> list[str]:
    """CREATE VIEW statements, in order, for an empty DuckDB connection.

    files: paths of sealed files by table. hot: by table, the name of the relation with its hot rows. only: the
    wanted tables, see behind(). called: names of views that differ from their table's name. job: rows of this job only;
    its members are in the relation job_filter.MEMBERS.
    """
    create = "CREATE OR REPLACE TEMP VIEW" if is_temporary else "CREATE OR REPLACE VIEW"
    out, name_of = [], called or {}
    for table in (table for name, table in schema.TABLES.items() if name in only):
        view = STORED_EVENTS if table.name == "events" else name_of.get(table.name, table.name)
        rows = _rows(table, files.get(table.name, ()), hot.get(table.name))
        condition = job.condition(table) if job else None
        rows = f"SELECT r.* FROM ({rows}) r WHERE {condition}" if condition else rows
        out.append(f"{create} {view} AS {rows}")
    if "events" not in only:
        return out
    also = [
        _as_events(name, instead) for name, instead in _ALSO_EVENTS.items() if files.get(name) or name in hot
    ]
    names = ", ".join(column.name for column in schema.EVENT_COLUMNS)
    parts = [f"SELECT {names} FROM {STORED_EVENTS}", *also]
    out.append(f"{create} events AS {' UNION ALL '.join(parts)}")
    return out


def _rows(table: schema.HubTable, files: Sequence[str], hot: str | None) -> str:
    columns = ", ".join(table.names)
    parts = []
    if files:
        parts.append(sealed_rows(table.name, files))
    if hot:
        parts.append(f"SELECT {columns} FROM {hot}")
    if not parts:
        parts.append(_no_rows(table))
    return " UNION ALL ".join(parts)


def sealed_rows(table: str, files: Sequence[str]) -> str:
    """A query for the rows of a table's sealed files; columns that a file lacks are NULL."""
    known = schema.TABLES[table]
    columns = ", ".join(known.names)
    current = [path for path in files if path.endswith(f"-{fingerprint(table)}.parquet")]
    older = [path for path in files if not path.endswith(f"-{fingerprint(table)}.parquet")]
    parts = [f"SELECT {columns} FROM read_parquet([{_listed(current)}])"] if current else []
    if older:  # union_by_name opens every file first, so it is used only for these files
        rows = f"SELECT * FROM read_parquet([{_listed(older)}], union_by_name = true)"
        parts.append(f"SELECT {columns} FROM ({_no_rows(known)} UNION ALL BY NAME {rows})")
    return " UNION ALL ".join(parts)


@cache
def fingerprint(table: str) -> str:
    """Identifies the columns of a file of this table; part of the file's name."""
    names = ",".join(f"{column.name} {column.sql_type}" for column in schema.TABLES[table].columns)
    return hashlib.blake2b(names.encode(), digest_size=4).hexdigest()


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(quoted(path) for path in paths)


def _no_rows(table: schema.HubTable) -> str:
    nulls = ", ".join(f"CAST(NULL AS {column.sql_type}) AS {column.name}" for column in table.columns)
    return f"SELECT {nulls} WHERE false"


def _as_events(name: str, instead: Mapping[str, str]) -> str:
    there = set(schema.TABLES[name].names)
    columns = [_event_column(column, there, instead) for column in schema.EVENT_COLUMNS]
    return f"SELECT {', '.join(columns)} FROM {name}"


def _event_column(column: schema.Column, there: set[str], instead: Mapping[str, str]) -> str:
    if column.name in instead:
        return f"{instead[column.name]} AS {column.name}"
    if column.name not in there:
        return f"CAST(NULL AS {column.sql_type}) AS {column.name}"
    # A separate table may store the same fact in a wider type (nranks); a view has one type for it.
    return (
        f"TRY_CAST({column.name} AS {column.sql_type}) AS {column.name}"
        if column.kind == "int32"
        else column.name
    )


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
