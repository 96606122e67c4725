"""Writes the man page from the commands: man_page.py OUT. OUT: stallscope.1, in the roff format."""

import sys
from pathlib import Path
from typing import Any

import typer.main

from stallscope import __version__
from stallscope.cli import app


def page() -> str:
    """The text of the page: each command with its purpose and its options."""
    root = typer.main.get_command(app)
    lines = [
        f'.TH STALLSCOPE 1 "" "stallscope {__version__}" "User Commands"',
        ".SH NAME",
        "stallscope \\- report which rank slows down a GPU job, since when, why, and at what cost",
        ".SH SYNOPSIS",
        ".B stallscope",
        "\\fICOMMAND\\fR [\\fIOPTIONS\\fR]",
        ".SH COMMANDS",
    ]
    for words, command in _commands(root, ()):
        lines += [
            ".SS " + _text(" ".join(words)),
            _text((command.help or "").replace("\n\n", " ").replace("\n", " ")),
        ]
        for parameter in command.params:
            if help_text := getattr(parameter, "help", None):
                lines += [".TP", "\\fB" + _text(", ".join(parameter.opts)) + "\\fR", _text(help_text)]
    lines += [
        ".SH FILES",
        ".TP",
        "/etc/stallscope/settings.yaml",
        "Settings; every setting may also be an option or a variable STALLSCOPE_NAME.",
        ".TP",
        "/var/lib/stallscope/trace.db",
        "The trace of this machine.",
        ".SH EXIT STATUS",
        "0: healthy. 20: a fault was found. 21: inconclusive. 22: nodes are missing. Others: an error, one line on "
        "standard error.",
    ]
    return "\n".join(lines) + "\n"


def _commands(command: Any, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Every command below this command, with the words that select it."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, each in getattr(command, "commands", {}).items():
        found += [((*words, name), each), *_commands(each, (*words, name))]
    return found


def _text(text: str) -> str:
    """Roff: a hyphen that can be copied, no macro at the start of a line."""
    return "\\&" + text.replace("\\", "\\e").replace("-", "\\-")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
