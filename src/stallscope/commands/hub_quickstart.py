"""`stallscope hub quickstart`: what a first hub needs, and the commands to go on with."""

from __future__ import annotations

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
    """Make a certificate and two tokens, and say what to type next. Twice does no harm."""
    from stallscope.serve.quickstart import prepared

    chosen = settings_from({"hub_db": db}, settings)
    folder = chosen.hub_db.absolute()
    made = prepared(folder, tuple(name or ()))
    host = made.names[0]
    otlp_port, api_port = chosen.hub_otlp_grpc.rpartition(":")[2], chosen.hub_api.rpartition(":")[2]
    typer.echo(
        f"""\
1. Start the hub (it says "ready"; Ctrl-C ends it):

   stallscope hub --db {folder} --tls-cert {made.tls.cert} --tls-key {made.tls.key}

2. Trace this machine and send to the hub (root, in another terminal):

   sudo stallscope trace --hub localhost:{otlp_port} --token-file {made.ingest} --ca-cert {made.tls.cert}

   On other machines: copy {made.ingest} (mode 600) and {made.tls.cert}
   there, and use --hub {host}:{otlp_port}

3. Ask the hub:

   curl --cacert {made.tls.cert} -H "Authorization: Bearer $(cat {made.read})" \\
     https://localhost:{api_port}/api/v1/health

The certificate is for {", ".join(made.names)}; other names: --name, after removing {made.tls.cert}"""
    )
