"""`stallscope export`: the files it writes, and its errors."""

import csv
import json
import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pyarrow.parquet as pq
import pytest

from stallscope.commands.export import _replacing
from stallscope.store import node

from ..diagnose.builders import dp_trace


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_timeline_is_named_for_the_trace(run, db, tmp_path):
    code, out, err = run("export", "--db", db)
    assert (code, out) == (0, "")
    assert "trace.pftrace: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["trace.pftrace"]


def test_a_timeline_replaces_an_existing_file(run, db, tmp_path):
    out = tmp_path / "x.json"
    out.write_text("old")
    assert run("export", "--db", db, "--format", "chrome", "-o", out)[0] == 0
    assert json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize(
    "words",
    [
        ("export", "-o"),
        ("export", "--format", "chrome", "-o"),
        ("explain", "--html"),
        ("query", "SELECT 1", "-o"),
    ],
)
@pytest.mark.parametrize("through", ["itself", "link"])
def test_an_output_never_replaces_the_trace(run, db, tmp_path, words, through):
    before = db.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(db)
    code, _, err = run(*words, {"itself": db, "link": link}[through], "--db", db)
    assert code == 2 and "this command reads it" in err
    assert db.read_bytes() == before


def test_a_timeline_is_written_behind_a_link_and_into_a_pipe(run, db, tmp_path):
    (tmp_path / "behind.json").touch()
    (tmp_path / "link").symlink_to("behind.json")
    assert run("export", "--db", db, "--format", "chrome", "-o", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    whole = (tmp_path / "behind.json").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_bytes)
        code, _, err = run("export", "--db", db, "--format", "chrome", "-o", tmp_path / "pipe")
        assert (code, read.result()) == (0, whole)
    assert f"pipe: {len(whole):,} bytes" in err
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_of_another_user_is_replaced_and_not_followed(run, db, tmp_path, monkeypatch):
    (tmp_path / "behind.json").write_text("precious")
    (tmp_path / "link").symlink_to("behind.json")
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "link").lstat().st_uid + 1)
    assert run("export", "--db", db, "--format", "chrome", "-o", tmp_path / "link")[0] == 0
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "behind.json").read_text() == "precious"


def test_an_interrupted_export_leaves_the_file_behind_a_link(tmp_path):
    (tmp_path / "behind.json").write_text("complete")
    (tmp_path / "link").symlink_to("behind.json")
    with pytest.raises(KeyboardInterrupt), _replacing(tmp_path / "link") as new:
        new.write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "behind.json").read_text() == "complete"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_hold_every_row_and_column(run, db, tmp_path, form):
    code, _, err = run("export", "--db", db, "--format", form, "-o", tmp_path / "tables")
    assert code == 0
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as plain:
        names = [name for (name,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert {path.stem for path in (tmp_path / "tables").iterdir()} == set(names)
        for name in names:
            wanted = plain.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall()
            path = tmp_path / "tables" / f"{name}.{form}"
            if form == "parquet":
                got = [tuple(row.values()) for row in pq.read_table(path).to_pylist()]
            else:
                got = [tuple(row) for row in csv.reader(path.read_text().splitlines())][1:]
                wanted = [tuple("" if v is None else str(v) for v in row) for row in wanted]
            assert got == wanted, name
            assert f"{name}.{form}: {len(wanted):,} row" in err


def test_since_limits_the_written_rows(run, db, tmp_path):
    run("export", "--db", db, "--format", "csv", "-o", tmp_path / "part", "--since", "100ms")
    n_rows = len((tmp_path / "part" / "collectives.csv").read_text().splitlines()) - 1
    assert n_rows == len(node.read(db, 100_000_000).collectives)
    assert len((tmp_path / "part" / "processes.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize("form", ["perfetto", "csv"])
def test_a_place_that_cannot_be_written_is_named(run, db, form):
    code, out, err = run("export", "--db", db, "--format", form, "-o", "/proc/none/x")
    assert (code, out) == (4, "")
    assert "/proc/none/x" in err
    assert err.count("\n") == 1


def test_no_half_file_is_left_when_it_fails(run, db, tmp_path, monkeypatch):
    def broken(story):
        yield b"half"
        raise KeyboardInterrupt

    monkeypatch.setattr("stallscope.exporters.perfetto.perfetto_bytes", broken)
    assert run("export", "--db", db)[0] == 130
    assert list(tmp_path.iterdir()) == []


def test_a_trace_without_collectives_can_be_exported(run, tmp_path):
    empty = tmp_path / "empty.db"
    node.write(empty, dp_trace(n_steps=0))
    assert run("export", "--db", empty, "--format", "chrome")[0] == 0


def test_a_dash_is_standard_output_and_no_folder(run, db, tmp_path):
    command = [
        sys.executable,
        "-c",
        "from stallscope.cli import main; main()",
        "export",
        "--db",
        db,
        "--format",
        "chrome",
        "--out",
        "-",
    ]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert json.loads(out)["traceEvents"]
    code, _, err = run("export", "--db", db, "--format", "csv", "--out", "-")
    assert (code, "several files" in err, list(tmp_path.iterdir())) == (2, True, [])
