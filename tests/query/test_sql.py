"""A user's SQL: allowed statements, refused statements, and an unchanged trace."""

import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadInput, BadTrace, NotFound, RefusedQuery, TookTooLong
from stallscope.events import layout
from stallscope.query.sql import Limits, ask
from stallscope.query.sql_functions import quantile
from stallscope.query.trace_schema import columns
from stallscope.store import node

from ..diagnose.builders import MS, dp_trace, every


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "trace.db"
    node.write(path, dp_trace(every(2, 7, 50 * MS)))
    return path


def value(db: Path, expression: str, source: str = "") -> object:
    return ask(db, f"SELECT {expression} {source}").rows[0][0]


def test_rows_and_columns_come_back(db):
    answer = ask(db, "SELECT node, name FROM nodes")
    assert answer.columns == ("node", "name")
    assert answer.rows == [(1, "host-a")]
    assert not answer.is_cut


def test_a_result_cut_by_the_row_limit_is_marked(db):
    answer = ask(db, "SELECT id FROM collectives ORDER BY id", limits=Limits(max_rows=3))
    assert [row[0] for row in answer.rows] == [1, 2, 3]
    assert answer.is_cut
    exact = ask(db, "SELECT id FROM collectives LIMIT 3", limits=Limits(max_rows=3))
    assert not exact.is_cut


def test_duplicate_column_names_are_made_unique(db):
    answer = ask(db, "SELECT a.node, b.node, 1 AS node_2 FROM nodes a, nodes b")
    assert len(set(answer.columns)) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM collectives",
        "INSERT INTO nodes VALUES (9, 'x')",
        "UPDATE nodes SET name = 'x'",
        "DROP TABLE nodes",
        "CREATE TABLE x (y)",
        "CREATE TEMP TABLE x AS SELECT 1",
        "CREATE TEMP TRIGGER t AFTER INSERT ON nodes BEGIN SELECT 1; END",
        "ALTER TABLE nodes ADD COLUMN x",
        "ATTACH '/tmp/x' AS x",
        "DETACH main",
        "BEGIN",
        "SAVEPOINT x",
        "VACUUM",
        "VACUUM INTO '/tmp/x'",
        "REINDEX",
        "ANALYZE",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA writable_schema = 1",
        "PRAGMA query_only = 0",
        "WITH x AS (SELECT 1) DELETE FROM nodes",
        "EXPLAIN DELETE FROM nodes",
        "SELECT load_extension('x')",
        "SELECT * FROM pragma_database_list",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE nodes",
        "",
        "  -- nothing",
        "SELEC 1",
    ],
)
def test_statements_other_than_a_single_select_are_refused(db, statement):
    before = db.read_bytes()
    with pytest.raises((RefusedQuery, BadInput)) as refused:
        ask(db, statement)
    assert "\n" not in str(refused.value)
    assert db.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 'delete; drop table update'",
        'SELECT 1 AS "update"',
        "WITH x AS (SELECT 1 AS insert_) SELECT * FROM x",
        "VALUES (1), (2)",
        "EXPLAIN QUERY PLAN SELECT * FROM collectives",
        "SELECT replace('update', 'u', 'U'), count(*) FROM collectives",
        "SELECT row_number() OVER (ORDER BY ts_ns) FROM collectives;",
        "SELECT name FROM sqlite_master",
        "PRAGMA table_info(collectives)",
        "SELECT json_extract(facts, '$.x') FROM sessions",
        "SELECT 1 -- ; DELETE FROM nodes",
    ],
)
def test_honest_questions_are_answered(db, statement):
    assert ask(db, statement).rows


def test_a_statement_that_never_ends_is_given_up(db):
    endless = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r"
    with pytest.raises(TookTooLong, match=r"0\.2 s"):
        ask(db, endless, limits=Limits(timeout_s=0.2))


@pytest.mark.parametrize("expression", ["zeroblob(900000000)", "hex(randomblob(9000000))"])
def test_values_that_would_fill_the_memory_are_refused(db, expression):
    with pytest.raises(BadInput, match="bytes"):
        ask(db, f"SELECT {expression}")


def test_the_error_for_an_unknown_name_suggests_the_closest_name(db):
    with pytest.raises(BadInput, match="did you mean collectives"):
        ask(db, "SELECT * FROM colectives")
    with pytest.raises(BadInput, match="did you mean count_bytes"):
        ask(db, "SELECT count_byts FROM collectives")


def test_since_shortens_every_table_of_events(db):
    newest = value(db, "max(ts_ns)", "FROM collectives")
    part = ask(db, "SELECT min(ts_ns), count(*) FROM collectives", since_ns=100 * MS).rows[0]
    whole = value(db, "count(*)", "FROM collectives")
    assert newest - 100 * MS <= part[0]
    assert 0 < part[1] < whole
    assert ask(db, "SELECT count(*) FROM processes", since_ns=100 * MS).rows == [(4,)]


def test_numbers_have_names(db):
    rows = ask(db, "SELECT DISTINCT op_name(op), datatype_name(datatype) FROM collectives").rows
    assert rows == [("all_reduce", "float32")]
    assert value(db, "category_name(12)") == "io"
    assert value(db, "op_name(250)") == "250"
    assert value(db, "op_name(NULL)") is None


def test_hashes_read_as_explain_writes_them(db):
    assert value(db, "hash_text(-1)") == "f" * 16
    stored, text = ask(db, "SELECT comm_hash, hash_text(comm_hash) FROM collectives LIMIT 1").rows[0]
    assert int(text, 16) == stored % (1 << 64)


def test_wall_times_are_those_of_the_clock_readings(db):
    with closing(sqlite3.connect(db)) as plain:
        at, wall = plain.execute("SELECT monotonic_ns, wall_ns FROM clocks ORDER BY monotonic_ns").fetchone()
    output = value(db, f"wall_time(1, {at + 5_000_000})")
    wanted = np.datetime64((wall + 5_000_000) // 1000, "us")
    assert output == f"{wanted}Z"
    assert value(db, "wall_time(77, 5)") is None


def test_rank_of_returns_the_rank_of_a_process(db):
    pid = value(db, "pid", "FROM processes WHERE rank = 2")
    assert value(db, f"rank_of(1, {pid})") == 2
    assert value(db, "rank_of(1, 999999)") is None


@settings(max_examples=50)
@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=200),
    st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.99, 1.0]),
)
def test_quantiles_are_numpys(values, q):
    assert quantile(sorted(map(float, values)), q) == pytest.approx(float(np.quantile(values, q)))


def test_quantiles_in_sql_are_those_of_known_values(db):
    source = (
        "FROM (WITH RECURSIVE r(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM r LIMIT 101) SELECT x FROM r)"
    )
    assert value(db, "quantile_cont(x, 0.95)", source) == 95
    assert value(db, "median(x)", source) == 50
    assert value(db, "median(NULL)") is None
    with pytest.raises(BadInput):
        ask(db, f"SELECT quantile_cont(x, 95) {source}")


def test_every_column_is_listed_with_its_meaning(db):
    result = columns(db)
    assert {column.table for column in result} >= {table.name for table in layout.TABLES} | {"annotations"}
    meaning = {(column.table, column.name): column.meaning for column in result}
    assert "arrival" in meaning["collectives", "ts_ns"]
    assert "io" in meaning["collectives", "io_ns"]
    without = [name for (table, name), output in meaning.items() if table == "collectives" and not output]
    assert without == ["id"]


def test_hand_overs_are_wakeups_between_processes_of_one_engine(tmp_path):
    servers = layout.empty(layout.SERVERS, 6)
    servers["pid"], servers["group_pid"] = (10, 11, 20, 5, 10, 11), (10, 11, 20, 5, 5, 5)
    servers["ts_ns"] = (1, 1, 1, 2, 2, 2)  # the parent of 10 and 11 was recognised later
    waits = layout.empty(layout.OFFCPU, 4)
    waits["ts_ns"], waits["duration_ns"] = (1 * MS, 2 * MS, 3 * MS, 4 * MS), 5 * MS
    waits["pid"], waits["tid"], waits["runnable_ns"] = 10, 10, 2 * MS
    waits["waker_pid"], waits["waker_tid"] = (11, 10, 20, 99), (12, 10, 20, 99)
    path = tmp_path / "engine.db"
    node.write(path, replace(dp_trace(n_steps=2), servers=servers, offcpu=waits))
    answer = ask(path, "SELECT * FROM hand_overs")
    names = ("node", "ts_ns", "from_pid", "from_tid", "pid", "tid", "waited_ns", "pickup_ns")
    assert answer.columns == names
    assert answer.rows == [(1, 4 * MS, 11, 12, 10, 10, 3 * MS, 2 * MS)]
    assert names == tuple(column.name for column in columns(path) if column.table == "hand_overs")


def test_a_trace_that_is_being_written_is_read(tmp_path):
    path = tmp_path / "live.db"
    store = node.NodeTrace(path)
    node.add(store, dp_trace(n_steps=10))
    first = value(path, "count(*)", "FROM collectives")
    node.add(store, dp_trace(n_steps=10))
    assert value(path, "count(*)", "FROM collectives") == 2 * first
    store.close()


def test_a_copy_in_a_read_only_folder_is_read(db, tmp_path):
    folder = tmp_path / "rest"
    folder.mkdir()
    copy = folder / "copy.db"
    copy.write_bytes(db.read_bytes())
    folder.chmod(0o555)
    copy.chmod(0o444)
    assert value(copy, "count(*)", "FROM nodes") == 1
    assert copy.read_bytes() == db.read_bytes()
    folder.chmod(0o755)


def test_a_missing_trace_and_an_invalid_database_raise_different_errors(tmp_path):
    with pytest.raises(NotFound):
        ask(tmp_path / "none.db", "SELECT 1")
    (tmp_path / "text.db").write_text("text" * 1000)
    with pytest.raises(BadTrace):
        ask(tmp_path / "text.db", "SELECT 1")


def test_questions_from_several_threads_do_not_meet(db):
    output: list[object] = []
    threads = [
        threading.Thread(target=lambda: output.append(value(db, "count(*)", "FROM collectives")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(output) == 4
    assert len(set(output)) == 1


def test_json_columns_can_be_queried_with_json_each(tmp_path):
    db = tmp_path / "counted.db"
    with closing(node.NodeTrace(db)) as store:
        rows = layout.empty(layout.OPERATIONS, 2)
        rows["node"], rows["histogram"] = store.node("here"), [b'{"256":3,"512":1}', b'{"256":2}']
        store.append(layout.OPERATIONS, rows)
    result = ask(db, "SELECT key, SUM(value) FROM operations, json_each(histogram) GROUP BY key ORDER BY key")
    assert result.rows == [("256", 5), ("512", 1)]
