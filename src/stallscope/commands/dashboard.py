"""`stallscope dashboard`: the page over a node trace of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from stallscope.commands.options import Db, SettingsFile, settings_from


def dashboard(
    db: Db = None,
    listen: Annotated[
        str, typer.Option(help="Listen at ADDR:PORT of this machine; port 0 chooses a free port.")
    ] = "127.0.0.1:0",
    settings: SettingsFile = None,
) -> None:
    """Show a node trace in the browser: verdict, map, rounds, SQL.

    Prints a link that signs in one browser. Runs until Ctrl-C.
    """
    from stallscope.commands.report import diagnosed, listed_price
    from stallscope.dashboard.local_server import Options, serve

    chosen = settings_from({"db": db}, settings)

    def announce(link: str) -> None:
        typer.echo(link)
        typer.echo("stallscope: open this link once, on this machine; Ctrl-C ends the dashboard", err=True)

    serve(
        Options(db=chosen.db, listen=listen, settings=chosen),
        lambda trace: diagnosed(trace, chosen, listed_price(trace, chosen)),
        announce=announce,
    )
