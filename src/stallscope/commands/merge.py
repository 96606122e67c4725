"""`stallscope merge`: several traces as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.options import AsJson
from stallscope.errors import BadInput


def merge(
    sources: Annotated[list[Path], typer.Argument(help="Traces, or any importable files.")],
    trace: Annotated[Path, typer.Option("--out", "-o", help="The trace to write; must not exist yet.")],
    force_node: Annotated[
        bool, typer.Option("--force-node", help="Rename a node whose name occurs in two sources.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Combine several traces into one; no row is lost.

    Identifiers that several nodes share (a process id, a cgroup) stay separate.
    """
    from stallscope.query.trace_merge import merge as merged

    if len(sources) < 2:
        raise BadInput("merge needs at least two traces; list them one after the other")
    done = merged(sources, trace, force_node=force_node)
    if as_json:
        summaries = [
            {"source": str(source.source), "nodes": source.nodes, "rows": dict(source.n_rows)}
            for source in done
        ]
        typer.echo(json.dumps(summaries, indent=2))
        return
    for source in done:
        rows = ", ".join(f"{name} {n:,}" for name, n in source.n_rows.items())
        typer.echo(f"{source.source} ({', '.join(source.nodes)}): {rows or 'no rows'}")
    typer.echo(f"next: stallscope explain --db {trace}")
