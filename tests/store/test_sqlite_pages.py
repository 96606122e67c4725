"""Rows read from the pages of a file equal the rows that SQLite returns, and other pages are left to SQLite."""

import sqlite3
from contextlib import closing
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadTrace
from stallscope.events.layout import CALLS, COLLECTIVES, OFFCPU, SNAPSHOTS, SPANS, UNKNOWN, empty
from stallscope.store import node, sqlite_columns, sqlite_pages
from stallscope.store.node import NodeTrace

N_ROWS = 1_500


def random_rows(table, n, seed=0):
    """Rows whose values take 0 to 8 bytes, with unknown values where a column allows them."""
    rng = np.random.default_rng(seed)
    rows = empty(table, n)
    for field in table.fields:
        column = rows[field.name]
        if column.dtype.kind == "S":
            column[:] = [b"x" * length for length in rng.integers(0, 1 + min(column.itemsize, 57), n)]
            continue
        info = np.iinfo(column.dtype)
        magnitude = rng.integers(0, info.bits, column.shape)
        column[...] = rng.integers(info.min, info.max, column.shape, dtype=column.dtype) >> magnitude.astype(
            column.dtype
        )
        if field.may_be_unknown:
            column[rng.random(column.shape) < 0.2] = UNKNOWN
    rows["node"] = 1
    return rows


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "t.db"
    store = NodeTrace(path)
    store.node("a")
    for table in (COLLECTIVES, CALLS, OFFCPU, SPANS):
        store.append(table, random_rows(table, N_ROWS))
    store.close()
    return path


def by_sqlite(db, table):
    columns = sqlite_columns.select_list(table, sqlite_columns.existing_columns(db, table))
    return sqlite_columns.rows(table, db.execute(f"SELECT {columns} FROM {table.name} ORDER BY id"))


def by_pages(db, table):
    return sqlite_pages.copy_of(db).rows(db, table)


@pytest.mark.parametrize("table", [COLLECTIVES, CALLS, OFFCPU, SPANS], ids=lambda table: table.name)
def test_values_of_all_sizes_equal_those_of_sqlite(path, table):
    with closing(sqlite3.connect(path)) as db:
        np.testing.assert_array_equal(by_pages(db, table), by_sqlite(db, table))


@settings(max_examples=10)
@given(page_bytes=st.sampled_from([512, 4096, 65536]), n=st.integers(0, 400), seed=st.integers(0, 99))
def test_any_page_size_is_read(page_bytes, n, seed):
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(f"PRAGMA page_size={page_bytes}")
        db.execute(sqlite_columns.create_statement(SNAPSHOTS))
        rows = random_rows(SNAPSHOTS, n, seed)
        db.executemany(sqlite_columns.insert_statement(SNAPSHOTS), sqlite_columns.values(SNAPSHOTS, rows))
        np.testing.assert_array_equal(by_pages(db, SNAPSHOTS), by_sqlite(db, SNAPSHOTS))


def test_rows_of_another_connections_open_transaction_are_not_read(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as reader, closing(NodeTrace(path)) as writer:
        reader.execute("BEGIN")
        assert len(by_sqlite(reader, COLLECTIVES)) == N_ROWS
        writer.append(COLLECTIVES, random_rows(COLLECTIVES, 500, seed=1))
        writer.commit()
        assert len(by_pages(reader, COLLECTIVES)) == N_ROWS
        reader.execute("COMMIT")
        np.testing.assert_array_equal(by_pages(reader, COLLECTIVES), by_sqlite(reader, COLLECTIVES))
        assert len(by_pages(reader, COLLECTIVES)) == N_ROWS + 500


def test_rows_after_deletions_are_read_in_order(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DELETE FROM collectives WHERE id % 3 = 0 OR id < 500")
        np.testing.assert_array_equal(by_pages(db, COLLECTIVES), by_sqlite(db, COLLECTIVES))


@pytest.mark.parametrize(
    "value",
    ["'text'", "2.5", "x'00'", "NULL", "-3", str(2**40), f"'{'long ' * 3000}'"],
    ids=lambda text: text[:8],
)
def test_a_value_that_the_column_cannot_hold_is_left_to_sqlite(path, value):
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"UPDATE collectives SET pid = {value} WHERE id = {N_ROWS // 2}")
        assert by_pages(db, COLLECTIVES) is None
    if value != "2.5":
        with pytest.raises(BadTrace):
            node.read(path)


def test_a_long_or_missing_text_is_left_to_sqlite(path):
    for value in (f"'{'x' * 60}'", "NULL"):
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute(f"UPDATE spans SET label = {value} WHERE id = 7")
            assert by_pages(db, SPANS) is None


def test_rows_written_before_a_column_was_added_are_left_to_sqlite(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("ALTER TABLE collectives DROP COLUMN n_launches")
        assert by_pages(db, COLLECTIVES) is None
        db.execute("ALTER TABLE collectives ADD COLUMN n_launches INTEGER NOT NULL DEFAULT 7")
        assert by_pages(db, COLLECTIVES) is None
    assert set(node.read(path).collectives["n_launches"].tolist()) == {7}


def test_a_whole_trace_is_read_in_order_of_time(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        expected = by_sqlite(db, COLLECTIVES)
    expected["node"] = 0
    got = node.read(path).collectives
    np.testing.assert_array_equal(got, expected[np.argsort(expected["ts_ns"], kind="stable")])


@settings(max_examples=30)
@given(data=st.data())
def test_damaged_pages_never_stop_the_reader(data):
    whole = _whole()
    at = data.draw(st.lists(st.tuples(st.integers(100, len(whole) - 1), st.integers(0, 255)), max_size=8))
    image = np.frombuffer(whole, np.uint8).copy()
    for offset, value in at:
        image[offset // 4096 * 4096 + offset % 16] = value  # the heads of the pages hold the structure
    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(whole)
        rows = sqlite_pages.Pages(image).rows(db, SNAPSHOTS)
    assert rows is None or len(rows) <= len(whole) // 8


@cache
def _whole():
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(sqlite_columns.create_statement(SNAPSHOTS))
        rows = random_rows(SNAPSHOTS, 2_000)
        db.executemany(sqlite_columns.insert_statement(SNAPSHOTS), sqlite_columns.values(SNAPSHOTS, rows))
        db.commit()
        return db.serialize()
