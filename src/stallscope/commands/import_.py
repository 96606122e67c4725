"""`stallscope import`: a node trace from the files of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.explain_files import is_node_trace
from stallscope.commands.file_kinds import as_help
from stallscope.commands.progress import reading_progress
from stallscope.errors import BadInput

HELP = f"""Create a node trace from the files of other tools.

Files are recognised by content, in nested folders and compressed too. Several
kinds together give one answer. Your files, their possible answers, and the
command:

\b
{as_help()}"""


def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Files, or folders with one file per rank; their kind is recognised by content."),
    ],
    db: Annotated[Path, typer.Option("--db", help="The node trace to write; must not exist yet.")],
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace host names, user names and the folders of paths.")
    ] = False,
) -> None:
    from stallscope.importers.reading import read_files
    from stallscope.importers.redaction import redacted
    from stallscope.store import node

    for path in paths:
        if is_node_trace(path):
            raise BadInput(
                f"{path} is a node trace already: read it with `stallscope explain {path}`, or combine several "
                "with `stallscope merge`"
            )
    with reading_progress(paths):
        reading = read_files(paths)
    for line in reading.unread_lines():
        typer.echo(f"stallscope: not read: {line}", err=True)
    if len(reading.traces) > 1:
        kinds = ", ".join(reading.used)
        raise BadInput(
            f"the files are of {len(reading.traces)} kinds with incompatible measurements ({kinds}); import each kind"
            " into a separate trace, or run `stallscope explain` on all files"
        )
    trace = redacted(reading.traces[0]) if redact else reading.traces[0]
    node.write(db, trace)
    n_rows = {name: len(getattr(trace, name)) for name in ("collectives", "calls", "offcpu")}
    counts = ", ".join(f"{n:,} {name}" for name, n in n_rows.items())
    typer.echo(f"{', '.join(reading.used)}: {counts} -> {db}")
    typer.echo(f"next: stallscope explain --db {db}")


import_.__doc__ = HELP
