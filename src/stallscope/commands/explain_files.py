"""`stallscope explain` for files of other tools: one diagnosis and one report for all files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stallscope.commands.progress import reading_progress
from stallscope.commands.report import print_reports
from stallscope.errors import BadInput

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.commands.details import Details
    from stallscope.diagnose import Answer
    from stallscope.settings import Settings


def is_node_trace(path: Path) -> bool:
    """Whether a path is a node trace or a damaged SQLite file: the trace reader then reports the damage."""
    from stallscope.events import layout
    from stallscope.store.node import check_no_pipe

    check_no_pipe(path)
    try:
        with path.open("rb") as stream:
            head = stream.read(72)
    except OSError:
        return False
    return layout.is_node_trace(head)


def are_foreign(paths: Sequence[Path]) -> bool:
    """Whether the paths are files of other tools. Raises BadInput if node traces are among them."""
    foreign = [path for path in paths if path.exists() and not is_node_trace(path)]
    if foreign and len(foreign) < len(paths):
        raise BadInput(f"{foreign[0]} is not a node trace; give one node trace, or files of other tools")
    return bool(foreign)


def explain_files(
    paths: Sequence[Path],
    as_json: bool,
    *,
    settings: Settings,
    details: Details,
    html: Path | None = None,
) -> Answer:
    """Print one report on these files. Returns its answer. Raises NotFound, BadTrace.

    html: also write the report to this file.
    """
    from stallscope.importers.reading import read_files

    with reading_progress(paths):
        reading = read_files(paths)
    for line in reading.unread_lines():
        typer.echo(f"stallscope: not read: {line}", err=True)
    return print_reports(reading.traces, as_json, settings=settings, details=details, html=html)
