"""The command line: its output, its failures, and no traceback."""

import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import jsonschema
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from stallscope import __version__
from stallscope.cli import app
from stallscope.commands.options import duration_ns
from stallscope.diagnose.report.verdict import Answer
from stallscope.errors import BadInput, StallscopeError, remedy_for_extra
from stallscope.store import node

from .diagnose.builders import MS, dp_trace, every
from .diagnose.reports import SCHEMA
from .importers.recordings import two_ranks

RECORDED = Path(__file__).parent / "data" / "recorded"


def clean() -> dict[str, str]:
    """The environment without settings of this machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STALLSCOPE_")}


def command(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from stallscope.cli import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        env=clean() | environment,
        timeout=60,
    )


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "trace.db"
    node.write(path, dp_trace(every(2, 7, 50 * MS)))
    return path


def assert_one_line(expected: tuple[int, str, str], code: int, *words: str) -> None:
    assert expected[0] == code
    assert expected[1] == ""
    assert expected[2].startswith("stallscope: ")
    assert expected[2].count("\n") == 1
    for word in words:
        assert word in expected[2]


def test_help_lists_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    for word in ("explain", "import", "demo", "trace", "version", "Which rank slows down a GPU job"):
        assert word in out


@pytest.mark.parametrize("word", ["explain", "import", "demo", "trace", "version"])
def test_every_command_has_help(run, word):
    code, out, _ = run(word, "--help")
    assert code == 0
    assert "Usage" in out


def test_version(run):
    assert run("version") == (0, f"stallscope {__version__}\n", "")


def test_explain_prints_the_verdict_as_text(run, db):
    code, out, err = run("explain", "--db", db)
    assert (code, err) == (Answer.FOUND.exit_code, "")
    assert "slows down the job: 50.0 ms late every 7 steps, asleep in nanosleep." in out


def test_explain_json_matches_the_schema(run, db):
    code, out, err = run("explain", "--db", db, "--json", "--usd-per-gpu-hour", "2.5")
    assert (code, err) == (Answer.FOUND.exit_code, "")
    data = json.loads(out)
    jsonschema.validate(data, SCHEMA)
    verdict = data["verdicts"][0]
    assert (verdict["ranks"], verdict["period_steps"]) == ([2], 7)
    assert verdict["cost"]["usd"] == pytest.approx(verdict["cost"]["gpu_seconds"] / 3600 * 2.5, abs=1e-4)


def test_explain_does_not_change_the_trace(run, db):
    before = db.read_bytes(), db.stat().st_mtime_ns
    run("explain", "--db", db)
    assert (db.read_bytes(), db.stat().st_mtime_ns) == before


def test_explain_of_the_last_part(run, db):
    _, whole, _ = run("explain", "--db", db, "--json")
    _, part, _ = run("explain", "--db", db, "--json", "--since", "100ms")
    assert json.loads(part)["examined"]["n_rounds"] < json.loads(whole)["examined"]["n_rounds"]


def test_min_late_is_a_limit(run, db):
    assert json.loads(run("explain", "--db", db, "--json", "--min-late", "60")[1])["healthy"] is True


def test_import_then_explain(run, tmp_path):
    db = tmp_path / "new.db"
    code, out, err = run("import", RECORDED, "--db", db)
    assert (code, err) == (0, "")
    assert f"stallscope explain --db {db}" in out
    data = json.loads(run("explain", "--db", db, "--json")[1])
    assert [verdict["ranks"] for verdict in data["verdicts"]] == [[2]]


def test_the_demo_explains_a_real_recording(run):
    code, out, _ = run("demo")
    assert code == 0
    assert out.startswith("Events: recorded kernel events of a real job")
    assert "Rank 2 (host recorded-host, pid" in out
    assert "every 14 steps" in out
    jsonschema.validate(json.loads(run("demo", "--json")[1]), SCHEMA)


@pytest.mark.parametrize(
    ("given", "wanted_ns"),
    [
        ("30s", 30 * 10**9),
        ("5m", 300 * 10**9),
        ("2h", 7200 * 10**9),
        ("1d", 86_400 * 10**9),
        ("250ms", 250 * 10**6),
        ("1.5s", 1_500_000_000),
        ("90", 90 * 10**9),
        (" 7 s ", 7 * 10**9),
    ],
)
def test_durations(given, wanted_ns):
    assert duration_ns(given, "--since") == wanted_ns


@pytest.mark.parametrize(
    "given", ["", "0", "0s", "-5s", "5x", "s", "5 m 3", "1e3", "nan", "inf", "five", "5m\n5m"]
)
def test_durations_that_are_none(given):
    with pytest.raises(BadInput, match="--since"):
        duration_ns(given, "--since")


def test_an_invalid_since_duration_is_refused(run, db):
    assert_one_line(run("explain", "--db", db, "--since", "soon"), 2, "--since", "'soon'", "5m")


def test_no_such_trace(run, tmp_path):
    assert_one_line(run("explain", "--db", tmp_path / "none.db"), 3, "none.db")


def test_no_such_recording(run, tmp_path):
    assert_one_line(run("import", tmp_path / "none", "--db", tmp_path / "x.db"), 3, "none")
    assert list(tmp_path.iterdir()) == []


def test_importing_a_folder_without_a_recording_is_refused(run, tmp_path):
    assert_one_line(run("import", tmp_path, "--db", tmp_path / "x.db"), 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_explaining_a_recording_advises_to_import_it(run):
    assert_one_line(run("explain", "--db", RECORDED), 2, "stallscope import")


def test_an_existing_trace_is_not_overwritten(run, db):
    before = db.read_bytes()
    assert_one_line(run("import", RECORDED, "--db", db), 4, "exists already")
    assert db.read_bytes() == before


def test_a_target_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("x")
    assert_one_line(run("import", RECORDED, "--db", tmp_path / "file" / "x.db"), 4, "cannot write")


def test_a_trace_of_a_newer_schema(run, db, tmp_path):
    newer = tmp_path / "newer.db"
    shutil.copy(db, newer)
    with closing(sqlite3.connect(newer)) as plain, plain:
        plain.execute("INSERT INTO schema_version VALUES (99, 0)")
    assert_one_line(run("explain", "--db", newer), 2, "newer stallscope", "99")


def test_a_trace_without_collectives(run, tmp_path):
    empty = tmp_path / "empty.db"
    node.write(empty, dp_trace(n_steps=0))
    assert_one_line(run("explain", "--db", empty), 3, "no NCCL collectives")


def test_unknown_commands_and_flags_are_errors(run, db):
    for words in (
        ("explian",),
        ("explain", "--db", db, "--jsn"),
        ("import",),
        ("explain", "--min-late", "x"),
    ):
        code, out, err = run(*words)
        assert code == 2
        assert out == ""
        assert "Traceback" not in err


def test_an_unknown_setting_in_the_environment_is_an_error(run, db, monkeypatch):
    monkeypatch.setenv("STALLSCOPE_MIN_LATE", "5")
    done = run("explain", "--db", db)
    assert_one_line(done, 2, "STALLSCOPE_MIN_LATE")


def test_an_unknown_setting_in_a_file_is_an_error(run, db, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("min_lat_ms: 5\n")
    assert_one_line(run("explain", "--db", db, "--settings", path), 2, "min_lat_ms")


def test_settings_come_from_the_environment(run, db, monkeypatch):
    monkeypatch.setenv("STALLSCOPE_DB", str(db))
    monkeypatch.setenv("STALLSCOPE_MIN_LATE_MS", "60")
    assert json.loads(run("explain", "--json")[1])["healthy"] is True


def test_the_installed_command_fails_with_one_line(tmp_path):
    folder = two_ranks().write(tmp_path / "recording")
    (folder / "events.parquet").write_bytes(b"PAR1")
    for words, code in (
        (("import", folder, "--db", tmp_path / "x.db"), 2),
        (("explain", "--db", tmp_path / "none.db"), 3),
        (("explain", "--db", folder / "events.parquet"), 2),
    ):
        done = command(*words)
        assert_one_line((done.returncode, done.stdout, done.stderr), code)
    assert not (tmp_path / "x.db").exists()


def test_a_closed_output_pipe_prints_no_error(db):
    code = "from stallscope.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "explain", "--db", db], stdout=-1, stderr=-1, env=clean()
    ) as explaining:
        explaining.stdout.close()
        errors = explaining.stderr.read()
    assert explaining.returncode == 141
    assert errors == b""


def test_a_full_output_is_one_error(db):
    for words in ("version",), ("query", "SELECT * FROM collectives", "--db", db):
        with Path("/dev/full").open("w") as full:
            program = "from stallscope.cli import main; main()"
            done = subprocess.run(
                [sys.executable, "-c", program, *words], stdout=full, stderr=-1, text=True, env=clean()
            )
        assert (done.returncode, done.stderr) == (
            4,
            "stallscope: standard output: No space left on device\n",
        )


def test_a_full_disk_that_no_error_names_is_not_standard_output(run, monkeypatch):
    def full(*_: object) -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"row")

    monkeypatch.setattr("stallscope.commands.export._export", full)
    code, _, err = run("export", "--db", "x.db")
    assert (code, err) == (4, "stallscope: No space left on device\n")


def test_closed_standard_streams_are_no_error(db):
    program = "from stallscope.cli import main; main()"
    line = f"exec {shlex.quote(sys.executable)} -c '{program}' \"$@\" <&- >&-"
    for words, code in (("explain", "--db", db), 20), (("query", "--db", db), 2):
        done = subprocess.run(["sh", "-c", line, "sh", *words], stderr=-1, text=True, env=clean())
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_a_trace_may_have_a_name_that_is_not_utf_8(run, db, tmp_path):
    other = tmp_path / os.fsdecode(b"caf\xe9.db")
    shutil.copy(db, other)
    assert run("explain", other)[0] == 20


def test_a_name_with_control_characters_is_one_line_of_error(run):
    code, _, err = run("explain", "a\nb\x1b[2J.db")
    assert code == 3 and err.startswith("stallscope: no trace at a\\nb\\x1b[2J.db: ") and err.count("\n") == 1


def test_every_error_has_an_exit_code_and_a_status():
    def leaves(kind):
        yield kind
        for below in kind.__subclasses__():
            yield from leaves(below)

    for kind in leaves(StallscopeError):
        assert 1 <= kind.exit_code < 126
        assert 400 <= kind.http_status < 600


def test_the_commands_can_be_called_from_python(db, monkeypatch):
    for name in list(os.environ):
        if name.startswith("STALLSCOPE_"):
            monkeypatch.delenv(name)
    done = CliRunner().invoke(app, ["explain", "--db", str(db)])
    assert done.exit_code == Answer.FOUND.exit_code


def groups(group, words=()):
    """Every command that has commands, with the words that lead to it."""
    yield words, group
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from groups(each, (*words, name))


@pytest.mark.parametrize("words", [words for words, _ in groups(get_command(app))])
def test_no_line_of_a_list_of_commands_is_cut_on_a_narrow_terminal(words):
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    lines = done.output.split("\nCommands:\n")[1].splitlines()
    assert lines
    assert not [line for line in lines if line.endswith("...") or len(line) > 80]
    # One line a command: nothing is wrapped either.
    assert not [line for line in lines if line.startswith("   ")]


@pytest.mark.parametrize(("words", "package"), [(["serve", "--db"], "anyio"), (["hub", "--db"], "grpc")])
def test_a_package_that_is_not_installed_is_named(db, words, package):
    program = f"import sys; sys.modules[{package!r}] = None; from stallscope.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *words, db], capture_output=True, text=True)
    wanted = f"stallscope: this command needs the package {package}: {remedy_for_extra('all')}\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_a_bundled_program_does_not_advise_pip(db):
    program = (
        "import sys, types; sys.modules |= {'anyio': None, '_bootstrap': types.ModuleType('_bootstrap')};"
        "from stallscope.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", "--db", db], capture_output=True, text=True
    )
    assert done.returncode == 2 and "anyio" in done.stderr and "does not contain it" in done.stderr


def test_serving_a_missing_trace_is_an_error_and_leaves_no_files(tmp_path):
    done = command("serve", "--db", tmp_path / "missing.db", "--listen", "127.0.0.1:0")
    assert_one_line((done.returncode, done.stdout, done.stderr), 3, "no trace at", "missing.db")
    assert not list(tmp_path.iterdir())
