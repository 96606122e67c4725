"""`stallscope hub`: the service of a cluster, and its subcommands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.hub_mcp import mcp
from stallscope.commands.hub_publish import publish
from stallscope.commands.hub_quickstart import quickstart
from stallscope.commands.hub_status import status
from stallscope.commands.hub_token import token_app
from stallscope.commands.hub_upkeep import backup, check, restore
from stallscope.commands.options import Alerts, HubDb, Rates, SettingsFile, check_grpc_address, settings_from
from stallscope.errors import BadInput

hub_app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, invoke_without_command=True)
hub_app.command()(quickstart)
hub_app.command()(mcp)
hub_app.command()(check)
hub_app.command()(backup)
hub_app.command()(publish)
hub_app.command()(status)
hub_app.command()(restore)
hub_app.add_typer(token_app, name="token")


@hub_app.callback()
def hub(
    context: typer.Context,
    db: HubDb = None,
    otlp_grpc: Annotated[
        str | None, typer.Option("--otlp-grpc", help="Receive OTLP over gRPC at ADDR:PORT (default :4317).")
    ] = None,
    otlp_http: Annotated[
        str | None, typer.Option("--otlp-http", help="Receive OTLP over HTTP at ADDR:PORT (default :4318).")
    ] = None,
    api: Annotated[str | None, typer.Option(help="Serve the API at ADDR:PORT (default :8081).")] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Certificate with its chain (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Key of the certificate (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca", help="Require client certificates of this authority from senders (PEM)."
        ),
    ] = None,
    insecure_no_tls: Annotated[
        bool, typer.Option("--insecure-no-tls", help="Serve in clear text, tokens included.")
    ] = False,
    shared: Annotated[
        str | None,
        typer.Option(
            "--shared", help="PostgreSQL that several hubs share: postgresql://USER@HOST:PORT/DATABASE."
        ),
    ] = None,
    bucket: Annotated[
        str | None,
        typer.Option("--bucket", help="Bucket of the sealed files of --shared: s3://BUCKET/PREFIX."),
    ] = None,
    peer: Annotated[
        str | None, typer.Option("--peer", help="Accept other hubs at ADDR:PORT (default :4319).")
    ] = None,
    peer_host: Annotated[
        str | None, typer.Option("--peer-host", help="Name of this machine for other hubs.")
    ] = None,
    direct: Annotated[
        str | None, typer.Option("--direct", help="Direct agents of this hub's clusters to HOST:PORT.")
    ] = None,
    rates: Rates = None,
    alerts: Alerts = None,
    settings: SettingsFile = None,
) -> None:
    """Receive data from all nodes, diagnose jobs, answer queries.

    Received data is stored. Runs until Ctrl-C.
    """
    if context.invoked_subcommand:
        return
    from stallscope import hub as wiring
    from stallscope.serve.tls import Files

    flags = {
        "hub_db": db,
        "hub_otlp_grpc": otlp_grpc,
        "hub_otlp_http": otlp_http,
        "hub_api": api,
        "hub_shared": shared,
        "hub_bucket": bucket,
        "hub_peer": peer,
        "hub_peer_host": peer_host,
        "hub_direct": direct,
        "hub_tls_cert": tls_cert,
        "hub_tls_key": tls_key,
        "hub_tls_client_ca": tls_client_ca,
        "rates": rates,
        "alerts": alerts,
    }
    chosen = settings_from(flags, settings)
    if chosen.hub_direct:
        check_grpc_address(chosen.hub_direct, "--direct")
    cert, key = chosen.hub_tls_cert, chosen.hub_tls_key
    if insecure_no_tls and (cert or key or chosen.hub_tls_client_ca):
        raise BadInput("--insecure-no-tls and a certificate exclude each other; give only one")
    if not insecure_no_tls and (cert is None or key is None):
        raise BadInput(
            "a hub needs --tls-cert and --tls-key (stallscope hub quickstart creates them), or --insecure-no-tls"
        )
    wiring.run(
        wiring.Options(
            db=chosen.hub_db,
            otlp_grpc=chosen.hub_otlp_grpc,
            otlp_http=chosen.hub_otlp_http,
            api=chosen.hub_api,
            tls=Files(cert, key, chosen.hub_tls_client_ca) if cert and key else None,
            settings=chosen,
        )
    )
