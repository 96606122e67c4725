"""`stallscope merge`: its output and its refusals."""

import json
from dataclasses import replace

import pytest

from stallscope.store import node

from ..diagnose.builders import dp_trace


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.db"
    node.write(path, replace(dp_trace(n_steps=10), nodes=("host-z",)))
    return path


def test_rows_are_counted_by_source_and_table(run, db, other, tmp_path):
    code, out, err = run("merge", db, other, "-o", tmp_path / "all.db")
    assert (code, err) == (0, "")
    assert f"{other} (host-z): collectives 120, " in out
    assert f"next: stallscope explain --db {tmp_path / 'all.db'}" in out


def test_json_has_the_same_counts(run, db, other, tmp_path):
    data = json.loads(run("merge", db, other, "-o", tmp_path / "all.db", "--json")[1])
    assert [entry["nodes"] for entry in data] == [["host-a"], ["host-z"]]
    assert data[1]["rows"]["collectives"] == 120


def test_a_merge_error_is_one_line(run, db, other, tmp_path):
    for words, code, output in (
        ((db, db, "-o", tmp_path / "x.db"), 2, "--force-node"),
        ((db, "-o", tmp_path / "x.db"), 2, "two traces"),
        ((db, tmp_path / "none.db", "-o", tmp_path / "x.db"), 3, "none.db"),
        ((db, other, "-o", other), 4, "exists already"),
    ):
        got = run("merge", *words)
        assert got[:2] == (code, "")
        assert output in got[2]
        assert got[2].count("\n") == 1
    assert not (tmp_path / "x.db").exists()
