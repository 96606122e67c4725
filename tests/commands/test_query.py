"""`stallscope query`: how an answer is written, and where the SQL comes from."""

import csv
import io
import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from stallscope.commands.answer import plain
from stallscope.query.sql import Answer

SQL = "SELECT rank, comm FROM processes ORDER BY rank"
ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT count(*) FROM r"


def test_a_pipe_gets_plain_text_in_columns(run, db):
    code, out, err = run("query", "--db", db, SQL)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == ["rank", "comm"]
    assert out.splitlines()[1].startswith("   0")
    assert len(out.splitlines()) == 5


def test_sql_comes_from_standard_input(run, db, monkeypatch):
    for words in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("SELECT 1 AS one"))
        assert run("query", "--db", db, *words)[1].split() == ["one", "1"]


def test_sql_of_few_characters_and_many_bytes_is_no_file_name(run, db):
    text = "\N{CJK UNIFIED IDEOGRAPH-65E5}" * 100
    code, out, err = run("query", "--db", db, f"SELECT '{text}' AS x")
    assert (code, out.split(), err) == (0, ["x", text], "")


def test_a_missing_query_on_a_terminal_is_an_error(run, db, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    code, out, err = run("query", "--db", db)
    assert (code, out) == (2, "")
    assert "--schema" in err


def test_json_is_a_list_of_objects(run, db):
    data = json.loads(run("query", "--db", db, "--json", SQL)[1])
    assert [row["rank"] for row in data] == [0, 1, 2, 3]
    assert json.loads(run("query", "--db", db, "--json", f"SELECT * FROM ({SQL}) WHERE 0")[1]) == []


def test_csv_is_read_back_by_a_csv_reader(run, db):
    out = run("query", "--db", db, "--format", "csv", "SELECT 'a,\"b\"' AS x, NULL AS y, 1.5 AS z")[1]
    assert list(csv.reader(io.StringIO(out))) == [["x", "y", "z"], ['a,"b"', "", "1.5"]]


def test_parquet_is_read_back_by_a_parquet_reader(run, db, tmp_path):
    out = tmp_path / "answer.parquet"
    statement = "SELECT 1 AS a, 1.5 AS b, 'x' AS c, NULL AS d UNION ALL SELECT NULL, 2, 'y', NULL"
    assert run("query", "--db", db, "--format", "parquet", "-o", out, statement)[0] == 0
    assert pq.read_table(out).to_pylist() == [
        {"a": 1, "b": 1.5, "c": "x", "d": None},
        {"a": None, "b": 2.0, "c": "y", "d": None},
    ]


def test_a_truncated_result_is_reported(run, db):
    code, out, err = run("query", "--db", db, "--limit", 2, "SELECT id FROM collectives")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "--limit" in err


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("DELETE FROM nodes",), 11, "DELETE"),
        (("SELECT 1", "--timeout", "soon"), 2, "--timeout"),
        (("SELECT 1", "--since", "soon"), 2, "--since"),
        ((ENDLESS, "--timeout", "0.2s"), 10, "--timeout"),
        (("SELECT 1", "-o", "/proc/none/x.csv"), 4, "--out"),
    ],
)
def test_a_query_error_is_one_line(run, db, words, code, expected):
    got = run("query", "--db", db, *words)
    assert got[:2] == (code, "")
    assert got[2].count("\n") == 1
    assert expected in got[2]


def test_the_schema_lists_tables_columns_and_functions(run, db):
    out = run("query", "--db", db, "--schema")[1]
    assert out.startswith("schema_version: ")
    assert "\ncollectives: A rank enters a collective" in out
    assert "quantile_cont(x, q)" in out
    rows = json.loads(run("query", "--db", db, "--schema", "--json")[1])
    assert {"table": "collectives", "column": "seq", "type": "INTEGER"}.items() <= rows[0].keys() | next(
        row for row in rows if (row["table"], row["column"]) == ("collectives", "seq")
    ).items()


def test_names_that_processes_gave_themselves_cannot_steer_the_terminal():
    assert "\x1b" not in plain(Answer(("comm",), [("\x1b[2Jevil\n",)]))


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_ends_it_without_noise(db, unbuffered):
    code = "from stallscope.cli import main; main()"
    many = "SELECT a.*, b.* FROM collectives a, collectives b LIMIT 3000"
    words = ["query", "--db", str(db), "--limit", "3000", many]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=-1, stderr=-1, env=environment
    ) as asking:
        asking.stdout.read(10)
        asking.stdout.close()
        errors = asking.stderr.read()
    assert (asking.returncode, errors) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_long_output_reaches_a_slow_reader_whole(db, unbuffered):
    code = "from stallscope.cli import main; main()"
    many = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 60000) SELECT x FROM r"
    done = subprocess.run(
        [sys.executable, "-c", code, "query", "--db", db, "--limit", "60000", "--format", "csv", many],
        stdout=-1,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=True,
    )
    assert done.stdout.split()[-1] == b"60000"
