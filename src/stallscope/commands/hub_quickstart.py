"""`stallscope hub quickstart`: the files of a first hub, and the commands to run next."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from stallscope.commands.options import HubDb, SettingsFile, settings_from


def quickstart(
    db: HubDb = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address by which agents reach this machine; may be repeated."),
    ] = None,
    settings: SettingsFile = None,
) -> None:
    """Create a certificate and two tokens; print the next commands.

    Safe to repeat.
    """
    from stallscope.serve.quickstart import prepared

    chosen = settings_from({"hub_db": db}, settings)
    folder = chosen.hub_db.absolute()
    made = prepared(folder, tuple(name or ()))
    host = made.names[0]
    otlp_port, api_port = chosen.hub_otlp_grpc.rpartition(":")[2], chosen.hub_api.rpartition(":")[2]
    db_path, cert, key, ingest, read = (
        quote(str(path)) for path in (folder, made.tls.cert, made.tls.key, made.ingest, made.read)
    )
    typer.echo(
        f"""\
1. Start the hub (it prints "ready"; Ctrl-C ends it):

   stallscope hub --db {db_path} --tls-cert {cert} --tls-key {key}

2. Trace this machine and send to the hub (root, in another terminal):

   sudo stallscope trace --hub localhost:{otlp_port} --token-file {ingest} --ca-cert {cert}

   On other machines: copy {made.ingest} (mode 600) and {made.tls.cert}
   there, and use --hub {host}:{otlp_port}

3. Query the hub:

   stallscope ask summary --hub https://localhost:{api_port} --token-file {read} --ca-cert {cert}

   In a browser: https://localhost:{api_port}/ (sign in with the token in {made.read})

The certificate covers {", ".join(made.names)}; for other names remove {made.tls.cert} and use --name"""
    )
