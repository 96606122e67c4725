"""`stallscope explain`: the diagnosis of a node trace."""

from __future__ import annotations

from typing import Annotated

import typer

from stallscope.commands.fleet import (
    Asked,
    CaCert,
    ClientCert,
    ClientKey,
    Nodes,
    NoTls,
    TokenFile,
    fleet_trace,
    is_fleet,
)
from stallscope.commands.options import AsJson, Db, Price, SettingsFile, duration_ns, settings_from
from stallscope.commands.report import print_report


def explain(
    db: Db = None,
    since: Annotated[str | None, typer.Option(help="Only the last part of the trace: 30s, 5m, 2h.")] = None,
    as_json: AsJson = False,
    usd_per_gpu_hour: Price = None,
    min_late: Annotated[
        float | None, typer.Option("--min-late", help="Lateness in ms that is never reported.")
    ] = None,
    nodes: Nodes = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for the nodes: 10s, 2m.")] = "30s",
    token_file: TokenFile = None,
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    no_tls: NoTls = False,
    settings: SettingsFile = None,
) -> None:
    """Say which rank drags the job in a trace, since when, why, and what it costs."""
    from stallscope.store import node

    asked = Asked(nodes, token_file, ca_cert, client_cert, client_key, no_tls, timeout)
    flags = {"db": db, "usd_per_gpu_hour": usd_per_gpu_hour, "min_late_ms": min_late, **asked.flags()}
    chosen = settings_from(flags, settings)
    since_ns = None if since is None else duration_ns(since, "--since")
    of_nodes = is_fleet(chosen, asked, db)
    trace = fleet_trace(chosen, asked, since_ns) if of_nodes else node.read(chosen.db, since_ns)
    print_report(trace, as_json, settings=chosen)
