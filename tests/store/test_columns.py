"""Rows of arrays are rows of tables, value by value."""

import sqlite3

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.events import layout
from stallscope.events.layout import TABLES, UNKNOWN
from stallscope.events.names import CATEGORY_NAMES
from stallscope.store import sqlite_columns

BY_NAME = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


def stored(table, rows):
    """The rows after a way through SQLite, and the values that SQL sees."""
    db = sqlite3.connect(":memory:")
    db.execute(sqlite_columns.create_statement(table))
    db.executemany(sqlite_columns.insert_statement(table), sqlite_columns.values(table, rows))
    observed = db.execute(f"SELECT * FROM {table.name} ORDER BY id").fetchall()
    columns = sqlite_columns.select_list(table, sqlite_columns.existing_columns(db, table))
    back = sqlite_columns.rows(table, db.execute(f"SELECT {columns} FROM {table.name} ORDER BY id"))
    db.close()
    return back, observed


def extremes(table):
    """Two rows: the smallest and the largest value of every field."""
    rows = layout.empty(table, 2)
    for field in table.fields:
        dtype = rows[field.name].dtype
        if dtype.kind == "S":
            rows[field.name] = [b"", b"x" * dtype.itemsize]
        else:
            info = np.iinfo(dtype)
            rows[field.name][0], rows[field.name][1] = max(info.min, -(2**62)), info.max
    return rows


@BY_NAME
def test_extreme_values_come_back(table):
    rows = extremes(table)
    back, _ = stored(table, rows)
    np.testing.assert_array_equal(back, rows)
    assert back.dtype == layout.dtype(table)


@BY_NAME
@settings(max_examples=20)
@given(data=st.data())
def test_any_bits_come_back(table, data):
    dtype = layout.dtype(table)
    raw = data.draw(st.binary(min_size=3 * dtype.itemsize, max_size=3 * dtype.itemsize))
    rows = np.frombuffer(raw, dtype).copy()
    for field in table.fields:
        if field.format.startswith("S"):
            rows[field.name] = [bytes(b & 0x7F for b in text) for text in rows[field.name].tolist()]
    back, _ = stored(table, rows)
    np.testing.assert_array_equal(back, rows)


@BY_NAME
def test_only_unknown_values_are_stored_as_null(table):
    rows = layout.empty(table, 1)
    _, observed = stored(table, rows)
    nulls = {
        name
        for name, value in zip(["id", *sqlite_columns.column_names(table)], observed[0], strict=True)
        if value is None
    }
    assert nulls == {field.name for field in table.fields if field.may_be_unknown}


def test_large_hashes_keep_their_bits():
    rows = layout.empty(layout.COLLECTIVES, 3)
    rows["comm_hash"] = [0, 2**63, 2**64 - 1]
    back, _ = stored(layout.COLLECTIVES, rows)
    assert back["comm_hash"].tolist() == [0, 2**63, 2**64 - 1]


def test_a_ledger_has_one_column_for_each_category():
    names = sqlite_columns.column_names(layout.COLLECTIVES)
    assert names[-len(CATEGORY_NAMES) :] == [f"{name}_ns" for name in CATEGORY_NAMES]
    rows = layout.empty(layout.COLLECTIVES, 1)
    rows["ledger_ns"] = np.arange(1, len(CATEGORY_NAMES) + 1)
    _, observed = stored(layout.COLLECTIVES, rows)
    output = dict(zip(["id", *names], observed[0], strict=True))
    assert [output[f"{name}_ns"] for name in CATEGORY_NAMES] == list(range(1, len(CATEGORY_NAMES) + 1))


def test_names_that_are_not_utf8_are_stored_all_the_same():
    rows = layout.empty(layout.PROCESSES, 1)
    rows["comm"] = b"py\xff\xfe"
    back, observed = stored(layout.PROCESSES, rows)
    assert back["comm"][0].startswith(b"py")
    assert any(isinstance(value, str) and value.startswith("py") for value in observed[0])


def test_no_rows_come_back_as_no_rows():
    back, observed = stored(layout.CALLS, layout.empty(layout.CALLS))
    assert (len(back), observed, back.dtype) == (0, [], layout.dtype(layout.CALLS))


@BY_NAME
def test_only_optional_fields_default_to_unknown(table):
    rows = layout.empty(table, 1)
    for field in table.fields:
        if not field.format.startswith(("S", "(")):
            assert (rows[field.name][0] == UNKNOWN) is np.bool_(field.may_be_unknown)


@pytest.mark.parametrize("n_rows", [1, 150, 300, 301])
@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("table", (*layout.TABLES, *layout.NODE_TABLES), ids=lambda table: table.name)
def test_numbers_that_are_the_same_in_all_rows_are_stored_like_others(table, n_rows, is_constant):
    rows = np.concatenate([extremes(table)] * n_rows)[n_rows > 1 :]
    if is_constant:
        rows[:] = rows[0]
    else:
        for i, field in enumerate(table.fields):
            if rows[field.name].dtype.kind != "S":
                rows[field.name] = (
                    UNKNOWN if field.may_be_unknown and i % 2 else rows[field.name][int(i % 3 == 0)]
                )
    tables = []
    for insertions in (
        sqlite_columns.insertions(table, rows),
        [(sqlite_columns.insert_statement(table), sqlite_columns.values(table, rows))],
    ):
        db = sqlite3.connect(":memory:")
        db.execute(sqlite_columns.create_statement(table))
        for statement, values in insertions:
            db.executemany(statement, values)
        tables.append(db.execute(f"SELECT * FROM {table.name} ORDER BY id").fetchall())
        db.close()
    assert len(tables[0]) == len(rows)
    assert tables[0] == tables[1]
