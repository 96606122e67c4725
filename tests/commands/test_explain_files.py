"""`stallscope explain` and `import` on files of other tools, through the command line."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ..importers.launcher_job import Log, chatter, exception, interleaved, torchrun


def written(file: Path, shape, culprit: int = 3) -> Path:
    log = Log()
    shape(log, culprit) if shape is not chatter else chatter(log)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(interleaved(log, torchrun, 1))
    return file


def test_a_log_in_a_folder_is_explained_and_other_files_are_listed(run, tmp_path: Path):
    written(tmp_path / "logs" / "a" / "job.log", exception)
    (tmp_path / "logs" / "report.nsys-rep").write_bytes(b"NVIDIA")
    code, out, err = run("explain", "--json", tmp_path / "logs")
    report = json.loads(out)
    assert (code, report["answer"]) == (20, "found")
    assert report["verdicts"][0]["ranks"] == [3]
    assert "nsys export --type sqlite" in err


def test_a_folder_of_node_traces_is_named_with_the_command_that_merges_them(run, tmp_path: Path, db: Path):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "a.db").write_bytes(db.read_bytes())
    code, out, err = run("explain", folder)
    assert (code, out) == (2, "") and f"contains node traces: `stallscope merge {folder}/*.db" in err
    written(folder / "job.log", exception)
    code, out, err = run("explain", folder)
    assert code == 20 and "a.db is a node trace" in err


def test_a_log_without_a_failure_is_inconclusive(run, tmp_path: Path):
    code, out, _ = run("explain", written(tmp_path / "job.log", chatter))
    assert code == 21
    assert "Healthy" not in out


@pytest.mark.shared
def test_no_file_of_another_format_is_called_healthy(run, shared: Path):
    for file in sorted((shared / "cases" / "other-formats").iterdir()):
        code, out, err = run("explain", file)
        assert code in (20, 21), (file.name, code, err)
        assert "Healthy" not in out, file.name


def test_a_redacted_trace_holds_no_host_and_no_folder(run, tmp_path: Path):
    log = written(tmp_path / "job.log", exception)
    log.write_text(log.read_text().replace("node0", "secret-host-17"))
    db = tmp_path / "trace.db"
    assert run("import", log, "--db", db, "--redact")[0] == 0
    with closing(sqlite3.connect(db)) as connection:
        text = "\n".join(connection.iterdump())
    assert "secret-host-17" not in text
    assert "/opt/job" not in text
    code, out, _ = run("explain", "--db", db)
    assert code == 20
    assert "data.py:41 load" in out
