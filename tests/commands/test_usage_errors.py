"""A wrong option, argument or command: one line with the complaint, the given value and the command for help."""

import subprocess
import sys

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
        (("explain", "--last"), ("--last",)),
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
