"""Text on a terminal: lines end between words, and continue below the value of their row."""

import os
import pty
import subprocess
import sys
import termios

import pytest
from typer.testing import CliRunner

from stallscope import cli
from stallscope.terminal_text import fitted


def on_a_terminal(*words: str, n_columns: int) -> str:
    """The standard output of the command line on a terminal with this many columns."""
    own_end, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, n_columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", "from stallscope.cli import main; main()", *words]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(terminal)
        parts = []
        while part := _read(own_end):
            parts.append(part)
        os.close(own_end)
        _, errors = process.communicate()
    assert process.returncode in (0, 20), errors
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(own_end: int) -> bytes:
    try:
        return os.read(own_end, 65_536)
    except OSError:  # EIO: the last process has closed the terminal
        return b""


def test_a_report_on_a_terminal_has_no_line_that_breaks_inside_a_word():
    printed = on_a_terminal("demo", n_columns=80)
    unlimited = CliRunner().invoke(cli.app, ["demo"]).stdout
    assert max(map(len, unlimited.splitlines())) > 80
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.split() == unlimited.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Rank 2 slows down the job.", "Rank 2 slows down the job."),
        ("Rank 2 slows down the job: 289 ms late.", "Rank 2 slows down the job: 289\nms late."),
        ("  cause       100 % sleep, 21 intervals", "  cause       100 % sleep, 21\n              intervals"),
        (
            "              Remove the sleep at line 7.",
            "              Remove the sleep\n              at line 7.",
        ),
        ("    see /a/very/long/path/that/has/no/end", "    see\n    /a/very/long/path/that/has/no/end"),
        (
            "warn  memory lock  8 MiB is too little",
            "warn  memory lock  8 MiB is\n                   too little",
        ),
    ],
)
def test_a_long_line_continues_below_its_value(line: str, expected: str):
    assert fitted(line, 30) == expected


def test_the_lines_of_a_text_stay_apart():
    assert fitted("one\n\ntwo three four\n", 10) == "one\n\ntwo three\nfour\n"
