"""`stallscope serve`: a node trace for other machines and for assistants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.options import Db, SettingsFile, settings_from


def serve(
    db: Db = None,
    listen: Annotated[
        str, typer.Option(help="Answer at ADDR:PORT; `:8443` is every address of this machine.")
    ] = ":8443",
    node: Annotated[str | None, typer.Option(help="Name of this machine.")] = None,
    files: Annotated[
        Path | None, typer.Option(help="Folder of certificate and token (default: `api` beside the trace).")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option("--tls-client-ca", help="Clients show a certificate of this authority, no token (PEM)."),
    ] = None,
    no_tls: Annotated[
        bool, typer.Option("--no-tls", help="Everything in clear text, the token included.")
    ] = False,
    settings: SettingsFile = None,
) -> None:
    """Answer other machines and assistants from a node trace.

    Those are `query|explain|export --nodes`, and MCP at /mcp. Until Ctrl-C.
    """
    from stallscope.assistant import serving as assistant
    from stallscope.assistant.asking import Node
    from stallscope.errors import BadInput
    from stallscope.serve import node_api as api

    if no_tls and tls_client_ca:
        raise BadInput(
            "--no-tls and --tls-client-ca exclude each other: without TLS nobody shows a certificate"
        )
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
        options, say=lambda text: typer.echo(f"stallscope: {text}", err=True), parts=parts, lifespan=lifespan
    )
