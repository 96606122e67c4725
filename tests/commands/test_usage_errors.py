"""A wrong option, argument or command: one line with the complaint, the given value and the command for help."""

import os
import subprocess
import sys
from shlex import quote

import pytest


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    """The installed command in a process of its own."""
    code = "from stallscope.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("expain",), ("'expain'", "explain", "stallscope --help")),
        (("hub", "nosuch"), ("hub: ", "'nosuch'", "stallscope hub --help")),
        (("explain", "--lst", "5"), ("explain: ", "--lst", "stallscope explain --help")),
        (("explain", "--last", "many"), ("--last", "'many'")),
        (("explain", "--last", "9" * 25), ("--last", "'" + "9" * 25 + "'")),
        (("explain", "--last"), ("explain: ", "--last", "stallscope explain --help")),
        (("export", "trace.db"), ("export: Got unexpected extra argument (trace.db)", "--db PATH")),
        (("gate", "--db", "trace.db"), ("No such option: --db", "without an option: stallscope gate PATH")),
        (("hub", "check", "--db", "hub"), ("without an option: stallscope hub check PATH",)),
        (("report", "job", "x", "--db", "trace.db"), ("--trace PATH",)),
        (("export", "--format", "nope"), ("'--format': 'nope' is not one of 'perfetto'",)),
        (("trace", "--pid", "1e9"), ("trace: ", "--pid", "'1e9'")),
    ],
)
def test_a_wrong_word_is_one_line(words: tuple[str, ...], named: tuple[str, ...]):
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stallscope: ") and done.stderr.count("\n") == 1, done.stderr
    for text in named:
        assert text in done.stderr


def test_a_group_without_a_command_prints_its_help():
    done = command("hub", "token")
    assert (done.returncode, done.stderr) == (0, "")
    assert "create" in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("explain", "--last", "0"), ("--last", "'0'")),
        (("explain", "--last", "5m", "--since", "5m"), ("--last 5m", "--since 5m")),
        (("explain", "--usd-per-gpu-hour", "2", "--provider", "aws"), ("--usd-per-gpu-hour", "--provider")),
        (("explain", "--usd-per-gpu-hour", "2", "--rates", "x.yaml"), ("--usd-per-gpu-hour", "--rates")),
        (("explain", "--usd-per-gpu-hour", "1e308"), ("--usd-per-gpu-hour", "1e+308", "or less")),
        (("report", "goodput", "--by", "nonsense"), ("--by nonsense", "job, user")),
        (("report", "cost", "--since", "soon"), ("--since", "'soon'")),
        (("trace", "--max-age", "999999999999d"), ("--max-age", "'999999999999d'", "100 years")),
        (("trace", "--max-age", "9" * 40), ("--max-age", "100 years")),
        (("trace", "--max-db", "9999999999999T"), ("--max-db", "'9999999999999T'")),
        (("trace", "--max-db", "1e400"), ("--max-db", "'1e400'", "500M")),
        (("trace", "--hub", "https://hub.example:8081"), ("--hub", "HOST:PORT", "hub.example:4317")),
        (("trace", "--hub", "https://[::1"), ("--hub", "HOST:PORT", "hub.example:4317")),
        (("ask", "--hub", "https://[::1", "--token-file", __file__), ("--hub", "https://[::1")),
        (("ask", "verdicts", "--hub", "localhost:8081"), ("--hub", "http(s)://HOST:PORT")),
        (
            ("gate", "--hub", "localhost:8081", "--job", "x", "--max-lost", "1"),
            ("--hub", "http(s)://HOST:PORT"),
        ),
        (("query", __file__), ("is a file, not SQL", f"--db {quote(__file__)}")),
        (("hub", "publish", "--shared", "x", "--bucket", "s3://b"), ("--shared", "postgresql://")),
        (("hub", "publish", "--shared", "dbname=x", "--bucket", "b"), ("--bucket", "s3://BUCKET/PREFIX")),
        (("stress", "--endpoint", "x", "--token-file", "t"), ("--endpoint", "'x'", "HOST:PORT")),
        (("stress", "--endpoint", "a:1", "--token-file", "t", "--patience", "x"), ("--patience", "'x'")),
        (("trace", "--hub", "hub.example:99999"), ("--hub", "hub.example:99999", "HOST:PORT")),
        (("explain", "--last", "9" * 30), ("--last", "too large")),
        (("explain", "--last", "9" * 12 + "d"), ("--last", "100 years")),
        (("explain", "--step", "9" * 30 + ".."), ("--step", "too large")),
        (("explain", "--timeout", "5s"), ("--timeout", "--nodes")),
        (("query", "--no-tls", "SELECT 1"), ("--no-tls", "--nodes")),
        (("export", "--token-file", __file__), ("--token-file", "--nodes")),
        (("stacks", "--client-cert", __file__), ("--client-cert", "--nodes")),
        (("explain", __file__, "--last", "5"), ("--last", __file__, "stallscope import")),
        (("compare", "a", "b", "--ca-cert", __file__), ("--ca-cert", "--hub")),
        (("compare", "a", "b", "--max-growth", "inf"), ("--max-growth", "inf")),
        (("gate", "a", "--max-lost", "1", "--token-file", __file__), ("--token-file", "--job")),
        (("gate", "a", "--max-lost", "inf"), ("--max-lost", "inf")),
        (
            ("query", "--nodes", "a:1", "--client-cert", "/nope", "--client-key", "/nope", "SELECT 1"),
            ("--client-cert", "/nope"),
        ),
        (("query", "--nodes", "a:1", "--ca-cert", __file__, "SELECT 1"), ("--ca-cert", __file__, "PEM")),
    ],
)
def test_an_unusable_value_is_one_line(run, words: tuple[str, ...], named: tuple[str, ...]):
    code, out, err = run(*words)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    for text in named:
        assert text in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("explain", ""), "the argument file is empty"),
        (("explain", "--db", ""), "the value of --db is empty"),
        (("explain", "--db="), "the value of --db is empty"),
        (("explain", "--nodes", ""), "the value of --nodes is empty"),
        (("merge", "a.db", "", "-o", "b.db"), "the argument sources is empty"),
        (("report", "cost", "--job", ""), "the value of --job is empty"),
        (("hub", "--db", ""), "the value of --db is empty"),
        (("hub", "check", ""), "the argument folder is empty"),
        (("trace", "--db", "-"), "the value of --db is -"),
        (("merge", "a.db", "b.db", "-o", "-"), "the value of --out is -"),
        (("import", "a.json", "--db", "-"), "the value of --db is -"),
        (("explain", "a.db", "--html", "-"), "the value of --html is -"),
        (("check", "--bundle", "-"), "the value of --bundle is -"),
    ],
)
def test_an_empty_value_and_a_stream_as_a_file_are_refused(run, monkeypatch, tmp_path, words, named):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert (code, out) == (2, "") and err.startswith(f"stallscope: {named}") and err.count("\n") == 1, err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "PIPE"),
        ("merge", "PIPE", "x.db", "-o", "y.db"),
        ("import", "PIPE", "--db", "y.db"),
        ("compare", "PIPE", "x.db"),
        ("query", "SELECT 1", "--db", "PIPE"),
    ],
)
def test_a_pipe_is_refused_instead_of_waiting_for_its_writer(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("PIPE")
    code, _, err = run(*words)
    assert (code, "PIPE is a pipe; write its content to a file" in err) == (2, True)


def test_words_of_a_job_are_not_checked(run):
    assert "the command was not found" in run("trace", "--", "no-such-program", "", "-")[2]


@pytest.mark.parametrize(
    "words", [("query", "SELECT 1 AS x", "--db"), ("report", "job", "--trace"), ("export", "--db")]
)
def test_a_minus_is_standard_output(db, tmp_path, words):
    done = subprocess.run(
        [sys.executable, "-c", "from stallscope.cli import main; main()", *words, db, "-o", "-"],
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and done.stdout and not list(tmp_path.iterdir()), done.stderr
