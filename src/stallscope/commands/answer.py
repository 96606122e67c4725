"""Prints or writes the rows of an answer: table, CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stallscope.commands.options import STDOUT
from stallscope.errors import BadInput, writing
from stallscope.events.counted import counted
from stallscope.store import file_modes

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.query.sql import Answer

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Format(StrEnum):
    """Output format of rows."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def print_answer(
    answer: Answer, form: Format, *, out: Path | None = None, missing: list[dict[str, str]] | None = None
) -> None:
    """Write the rows to a file, or to standard output. Raises BadInput, StorageFailed.

    On a terminal the rows are drawn as a table, elsewhere as aligned plain text. Cut-off rows are reported on stderr.
    missing: the nodes without an answer, which JSON lists next to the rows; None: the answer is not of several nodes.
    """
    if form is Format.PARQUET:
        _write(_parquet(answer), out)
    elif form is Format.CSV:
        _write(_csv(answer).encode(), out)
    elif form is Format.JSON:
        rows = _json(answer)
        if missing is not None:
            rows = f'{{"missing": {json.dumps(missing)},\n"rows": {rows.rstrip()}}}\n'
        _write(rows.encode(), out)
    elif out in (None, STDOUT) and sys.stdout.isatty():
        _draw(answer)
    else:
        _write(plain(answer).encode(), out)
    if answer.is_cut:
        notice = f"output cut off after {len(answer.rows):,} rows; raise --limit for more"
        typer.echo(f"stallscope: {notice}", err=True)


def plain(answer: Answer) -> str:
    """The rows as text in aligned columns, two spaces apart, numbers to the right."""
    lines = [list(answer.columns), *([shown(value) for value in row] for row in answer.rows)]
    width = [max(len(line[i]) for line in lines) for i in range(len(answer.columns))]
    right = _numeric(answer)
    padded = (
        "  ".join(
            text.rjust(size) if is_right else text.ljust(size)
            for text, size, is_right in zip(line, width, right, strict=True)
        ).rstrip()
        for line in lines
    )
    return "".join(f"{line}\n" for line in padded)


def shown(value: object) -> str:
    """A value as text without control characters: process names are untrusted."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value:.6g}" if value % 1 else f"{value:.1f}"
    return _CONTROL.sub("�", str(value))


def _numeric(answer: Answer) -> list[bool]:
    """For each column, whether it contains only numbers."""
    values = ([row[i] for row in answer.rows if row[i] is not None] for i in range(len(answer.columns)))
    return [bool(column) and all(isinstance(value, int | float) for value in column) for column in values]


def _draw(answer: Answer) -> None:
    """Print the rows on a terminal; one value per line if the columns are too wide for it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    right = _numeric(answer)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, is_right in zip(answer.columns, right, strict=True):
        table.add_column(Text(name), justify="right" if is_right else "left", no_wrap=True)
    for row in answer.rows:
        table.add_row(*(Text(shown(value)) for value in row))
    if console.measure(table).maximum <= console.width:
        console.print(table)
    else:
        console.print(Text(_one_below_the_other(answer)), end="", soft_wrap=True)
    n = len(answer.rows)
    console.print(Text(counted(n, "row")), style="dim")


def _one_below_the_other(answer: Answer) -> str:
    width = max(map(len, answer.columns))
    blocks = []
    for number, row in enumerate(answer.rows, 1):
        values = zip(answer.columns, row, strict=True)
        lines = [f"{name.ljust(width)}  {shown(value)}\n" for name, value in values]
        blocks.append(f"-- {number}\n{''.join(lines)}")
    return "".join(blocks)


def _csv(answer: Answer) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows(
        [value.hex() if isinstance(value, bytes) else value for value in row] for row in answer.rows
    )
    return text.getvalue()


def _json(answer: Answer) -> str:
    """A list of objects, one row per line."""
    lines = [
        json.dumps(dict(zip(answer.columns, row, strict=True)), default=lambda value: value.hex())
        for row in answer.rows
    ]
    return "[\n" + ",\n".join(lines) + ("\n]\n" if lines else "]\n")


def _parquet(answer: Answer) -> bytes:
    from stallscope.exporters.tables import parquet_bytes

    columns = [[row[i] for row in answer.rows] for i in range(len(answer.columns))]
    return parquet_bytes(dict(zip(answer.columns, columns, strict=True)))


def _write(data: bytes, out: Path | None) -> None:
    if out is not None and out != STDOUT:
        with writing(out, "choose another path with --out"):
            file_modes.replace(out, data, 0o644)
        return
    if data[:4] == b"PAR1" and sys.stdout.isatty():
        raise BadInput(
            "Parquet cannot be printed on a terminal; give a file with --out, or redirect the output"
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
