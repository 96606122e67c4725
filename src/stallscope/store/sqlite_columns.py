"""Converts between record types and SQL columns: one row of an array is one row of a table.

Unknown (-1) is NULL. SQLite has no unsigned 64-bit integers: such columns hold the same 64 bits, signed.
"""

import sqlite3
from collections.abc import Collection, Iterable
from functools import cache

import numpy as np

from stallscope.events.layout import UNKNOWN, Array, Field, Table, dtype
from stallscope.events.names import CATEGORY_NAMES

_MIN_GROUPED_ROWS = 100
"""The number of rows above which a separate statement is worth its compilation, about 0.1 ms."""

_MIN_MULTI_ROW, _ROWS_PER_STATEMENT = 400, 4
"""The number of rows in a statement that inserts many rows."""


def column_names(table: Table) -> list[str]:
    """Columns in order; a ledger becomes one column per category, named for it."""
    return [name for field in table.fields for name in _names(field)]


def create_statement(table: Table) -> str:
    """CREATE TABLE for a record type."""
    columns = [f"{name} {_sql_type(field)}" for field in table.fields for name in _names(field)]
    return f"CREATE TABLE {table.name} (id INTEGER PRIMARY KEY, {', '.join(columns)})"


@cache
def insert_statement(table: Table) -> str:
    """INSERT of one row; unknown values become NULL."""
    return f"{_insert_into(table)} ({', '.join(_placeholders(table))})"


def insertions(table: Table, rows: Array) -> list[tuple[str, Iterable[tuple[object, ...]]]]:
    """Statements and their values, to add rows to a table.

    Numbers that are equal in many rows become literals of the statement. Half of a collective's numbers are equal, and
    passing a value costs more than storing it. Some rows share a statement, because each execution has a
    cost.
    """
    flat = np.ascontiguousarray(rows).view(_flat(table))
    if len(flat) < _MIN_GROUPED_ROWS:
        return [(insert_statement(table), values(table, rows))]
    literals, parameters = [], []
    for name, placeholder in zip(flat.dtype.names or (), _placeholders(table), strict=True):
        column = flat[name]
        if column.dtype.kind in "iu" and column[0] == column[-1] and (column == column[0]).all():
            is_unknown = column[0] == UNKNOWN and placeholder != "?"
            literals.append("NULL" if is_unknown else str(column[0]))
        else:
            has_unknown = placeholder != "?" and (column.dtype.kind == "S" or (column == UNKNOWN).any())
            literals.append(placeholder if has_unknown else "?")
            parameters.append(
                list(map(_decoded, column.tolist())) if column.dtype.kind == "S" else column.tolist()
            )
    if not parameters:
        return [(insert_statement(table), values(table, rows))]
    row = f"({', '.join(literals)})"
    n_together = _ROWS_PER_STATEMENT if len(flat) >= _MIN_MULTI_ROW else 1
    n_in_groups = len(flat) // n_together * n_together
    grouped = [column[i:n_in_groups:n_together] for i in range(n_together) for column in parameters]
    remaining = [column[n_in_groups:] for column in parameters]
    return [
        (f"{_insert_into(table)} {', '.join([row] * n_together)}", zip(*grouped, strict=True)),
        (f"{_insert_into(table)} {row}", zip(*remaining, strict=True)),
    ]


def select_list(table: Table, existing: Collection[str]) -> str:
    """The columns as rows() expects them. existing: of the file; a missing column is unknown, or 0 or empty."""
    return ", ".join(
        _select_expression(field, name) if name in existing else f"{_missing_value(field)} AS {name}"
        for field in table.fields
        for name in _names(field)
    )


def existing_columns(db: sqlite3.Connection, table: Table) -> frozenset[str]:
    """The columns of a table of a file, which may be from an earlier version."""
    return frozenset(row[1] for row in db.execute(f"PRAGMA main.table_info({table.name})"))


def add_statements(table: Table, existing: Collection[str]) -> list[str]:
    """ALTER TABLE for each column that a file from an earlier version lacks; older rows have the missing value."""
    return [
        f"ALTER TABLE {table.name} ADD COLUMN {name} {_sql_type(field)}{_default(field)}"
        for field in table.fields
        for name in _names(field)
        if name not in existing
    ]


def values(table: Table, rows: Array) -> Iterable[tuple[object, ...]]:
    """The rows of an array as tuples for insert_statement()."""
    flat = np.ascontiguousarray(rows).view(_flat(table))
    if not any(field.format.startswith("S") for field in table.fields):
        tuples: list[tuple[object, ...]] = flat.tolist()
        return tuples
    columns = (flat[name].tolist() for name in flat.dtype.names or ())
    return zip(*(map(_decoded, column) for column in columns), strict=True)


def _decoded(value: object) -> object:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def rows(table: Table, tuples: Iterable[tuple[object, ...]]) -> Array:
    """The array from the tuples of a query over select_list()."""
    return np.fromiter(tuples, _flat(table)).view(dtype(table))


def flat_rows(table: Table, n: int) -> Array:
    """n rows to be filled, one field per SQL column; structured() makes them rows of the table."""
    return np.empty(n, _flat(table))


def structured(table: Table, flat: Array) -> Array:
    """Rows of the table from flat rows."""
    return flat.view(dtype(table))


def nullable_names(table: Table) -> frozenset[str]:
    """The columns that contain NULL where a value is unknown."""
    return frozenset(field.name for field in table.fields if field.may_be_unknown)


@cache
def _insert_into(table: Table) -> str:
    return f"INSERT INTO {table.name} ({', '.join(column_names(table))}) VALUES"


@cache
def _placeholders(table: Table) -> tuple[str, ...]:
    return tuple(
        f"NULLIF(?, {UNKNOWN})" if field.may_be_unknown else "?"
        for field in table.fields
        for _ in _names(field)
    )


def _names(field: Field) -> list[str]:
    return [f"{name}_ns" for name in CATEGORY_NAMES] if field.format.startswith("(") else [field.name]


def _sql_type(field: Field) -> str:
    return "TEXT" if field.format.startswith("S") else "INTEGER"


def _missing_value(field: Field) -> str:
    if field.format.startswith("S"):
        return "x''"
    return str(UNKNOWN if field.may_be_unknown else 0)


def _default(field: Field) -> str:
    """The default of an added column. NULL is unknown; in other columns NULL is damage."""
    if field.may_be_unknown:
        return ""
    return " DEFAULT ''" if field.format.startswith("S") else f" DEFAULT {_missing_value(field)}"


def _select_expression(field: Field, name: str) -> str:
    if field.format.startswith("S"):
        return f"CAST({name} AS BLOB)"
    return f"COALESCE({name}, {UNKNOWN})" if field.may_be_unknown else name


@cache
def _flat(table: Table) -> np.dtype[np.void]:
    """The dtype with the ledger as separate columns and signed 64-bit integers: same bytes."""
    return np.dtype(
        [
            (name, "i8" if field.format in ("u8",) or field.format.startswith("(") else field.format)
            for field in table.fields
            for name in _names(field)
        ]
    )
