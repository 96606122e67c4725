"""Fits text to the width of a terminal: lines break between words and continue below their value.

A pipe or a file gets each line unchanged, so that programs such as grep find a whole statement in one line.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

import typer

_LABELS = re.compile(r" *(?:\S{1,12}(?: \S{1,12})* {2,})*")
"""The indentation of a line, with the labels of a row: "  cause       "."""

_MAX_INDENT = 24
_DEFAULT_COLUMNS = 80
"""Of a terminal that does not report its size, such as a serial console."""


def echo_text(text: str, *, err: bool = False, newline: bool = True) -> None:
    """Print a text on standard output, or on standard error; fitted if that is a terminal."""
    if width := terminal_width(err=err):
        text = fitted(text, width)
    typer.echo(text, err=err, nl=newline)


def terminal_width(*, err: bool = False) -> int | None:
    """The columns of standard output (or standard error); None if that is not a terminal."""
    return columns_of(sys.stderr if err else sys.stdout)


def columns_of(stream: TextIO) -> int | None:
    """The columns of the terminal that a stream writes to; None if that is not a terminal."""
    if not stream.isatty():
        return None
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS


def fitted(text: str, width: int) -> str:
    """The text with lines of at most `width` columns. A longer word, such as a path, stays whole."""
    return "\n".join(_fitted_line(line, width) for line in text.split("\n"))


def _fitted_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = _LABELS.match(line)
    indent = label.end() if label and label.end() <= _MAX_INDENT else len(line) - len(line.lstrip())
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
