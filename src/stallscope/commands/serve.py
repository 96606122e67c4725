"""`stallscope serve`: serves a node trace to other machines and to assistants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.options import Db, SettingsFile, settings_from


def serve(
    db: Db = None,
    listen: Annotated[
        str, typer.Option(help="Listen at ADDR:PORT; `:8443` listens on every address of this machine.")
    ] = ":8443",
    node: Annotated[str | None, typer.Option(help="Name of this machine.")] = None,
    files: Annotated[
        Path | None, typer.Option(help="Folder of certificate and token (default: `api` next to the trace).")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca", help="Require client certificates of this authority, not a token (PEM)."
        ),
    ] = None,
    no_tls: Annotated[
        bool, typer.Option("--no-tls", help="Serve in clear text, the token included.")
    ] = False,
    settings: SettingsFile = None,
) -> None:
    """Serve a node trace to other machines and to assistants.

    Clients are `query|explain|export --nodes`, and MCP at /mcp. Runs until Ctrl-C.
    """
    from stallscope.assistant import mcp_server as assistant
    from stallscope.assistant.node_context import Node
    from stallscope.errors import BadInput
    from stallscope.serve import node_api as api

    if no_tls and tls_client_ca:
        raise BadInput("--no-tls and --tls-client-ca exclude each other: client certificates need TLS")
    chosen = settings_from({"db": db, "node": node}, settings)
    options = api.Options(
        db=chosen.db,
        listen=listen,
        node=chosen.node,
        files=files or chosen.db.parent / "api",
        client_ca=tls_client_ca,
        has_tls=not no_tls,
    )
    parts, lifespan = assistant.parts(Node(chosen))
    api.serve(
        options,
        announce=lambda text: typer.echo(f"stallscope: {text}", err=True),
        parts=parts,
        lifespan=lifespan,
    )
