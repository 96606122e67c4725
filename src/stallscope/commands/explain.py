"""`stallscope explain`: the diagnosis of a node trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.details import Details
from stallscope.commands.explain_files import are_foreign, explain_files
from stallscope.commands.fleet import (
    NODES_TIMEOUT,
    CaCert,
    ClientCert,
    ClientKey,
    FleetOptions,
    Nodes,
    NodesTimeout,
    NoTls,
    TokenFile,
    fleet_trace,
    is_fleet,
    missing_data,
    refuse_partial,
)
from stallscope.commands.options import (
    AsJson,
    Db,
    Price,
    Rates,
    SettingsFile,
    check_output,
    price_flags,
    settings_from,
)
from stallscope.commands.part import From, Last, Phase, Since, Step, To, check_no_part, only_since, part_from
from stallscope.commands.report import print_report
from stallscope.errors import BadInput


def explain(
    file: Annotated[
        list[Path] | None,
        typer.Argument(help="A node trace (same as --db), or files of other tools: see import --help."),
    ] = None,
    db: Db = None,
    since: Since = None,
    begin: From = None,
    end: To = None,
    step: Step = None,
    phase: Phase = None,
    last: Last = None,
    as_json: AsJson = False,
    usd_per_gpu_hour: Price = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Compute the cost with the list price of this GPU.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option("--provider", help="Use this provider's price: aws, gcp.")
    ] = None,
    rates: Rates = None,
    per_process: Annotated[
        bool, typer.Option("--per-process", help="Add a table of processes with their time ledgers.")
    ] = False,
    per_container: Annotated[
        bool, typer.Option("--per-container", help="Add the same table by container.")
    ] = False,
    chains: Annotated[
        bool,
        typer.Option("--chains", help="Add the calls that took far longer than typical, with their causes."),
    ] = False,
    min_late: Annotated[
        float | None, typer.Option("--min-late", help="Lateness in ms below which nothing is reported.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Also write the report as one HTML file, for a ticket or an email."),
    ] = None,
    nodes: Nodes = None,
    timeout: NodesTimeout = NODES_TIMEOUT,
    token_file: TokenFile = None,
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    no_tls: NoTls = False,
    settings: SettingsFile = None,
) -> None:
    """Report the rank that slows down a job, and why.

    Exit codes: 0 healthy, 20 a fault was found, 21 inconclusive, 22 nodes are missing; others: an error.
    """
    from stallscope.store import node

    prices = price_flags(usd_per_gpu_hour, gpu, provider, rates)
    traces = list(dict.fromkeys([*(file or []), *([db] if db else [])]))
    check_output(html, traces)
    fleet = FleetOptions(nodes, token_file, ca_cert, client_cert, client_key, no_tls, timeout)
    if not db and are_foreign(traces):
        fleet.check_unused()
        given = {"--nodes": nodes, "--since": since, "--from": begin, "--to": end, "--step": step}
        check_no_part(traces[0], given | {"--phase": phase, "--last": last})
        details = Details(by_process=per_process, by_container=per_container, chains=chains)
        chosen = settings_from(prices | {"min_late_ms": min_late}, settings)
        answer = explain_files(traces, as_json, settings=chosen, details=details, html=html)
        raise typer.Exit(answer.exit_code)
    if len(traces) > 1:
        names = " ".join(map(str, traces))
        raise BadInput(
            f"explain reads one trace, not {len(traces)}; first run `stallscope merge {names} -o ALL.db`"
        )
    db = traces[0] if traces else None
    flags = {"db": db, "min_late_ms": min_late} | prices | fleet.flags()
    chosen = settings_from(flags, settings)
    check_output(html, [chosen.db])
    part = part_from(since, begin, end, step=step, phase=phase, last=last)
    of_nodes = is_fleet(chosen, fleet, db)
    details = Details(by_process=per_process, by_container=per_container, chains=chains)
    if of_nodes:
        trace, failures = fleet_trace(chosen, fleet, only_since(part))
        missing = missing_data(failures)
        answer = print_report(trace, as_json, settings=chosen, details=details, missing=missing, html=html)
        refuse_partial(failures, chosen.nodes.count(",") + 1)
    else:
        trace = node.read(chosen.db, part=part)
        answer = print_report(trace, as_json, settings=chosen, details=details, html=html)
    raise typer.Exit(answer.exit_code)
