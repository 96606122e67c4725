"""`stallscope import`: a node trace from what others recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    path: Annotated[
        Path,
        typer.Argument(help="A file, or a folder with one file per rank; its kind is seen from its content."),
    ],
    db: Annotated[Path, typer.Option("--db", help="The node trace to write; must not exist yet.")],
) -> None:
    """Make a node trace from what others recorded."""
    from stallscope.importers import importer_for
    from stallscope.store import node

    importer = importer_for(path)
    trace = importer.read(path)
    node.write(db, trace)
    n_rows = {name: len(getattr(trace, name)) for name in ("collectives", "calls", "offcpu")}
    told = ", ".join(f"{n:,} {name}" for name, n in n_rows.items())
    typer.echo(f"{importer.name} {path}: {told} -> {db}")
    typer.echo(f"next: stallscope explain --db {db}")
