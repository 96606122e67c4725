"""`stallscope stress`: a load test for your own hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stallscope.commands.options import AsJson, CaFile, check_grpc_address, duration_ns
from stallscope.errors import BadInput


def stress(
    endpoint: Annotated[str, typer.Option(help="The hub's OTLP/gRPC address: HOST:PORT.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="File with a token of the scope ingest.")],
    node_id: Annotated[str, typer.Option("--node-id", help="Machine name in the rows.")] = ("stress-0"),
    events: Annotated[int, typer.Option(help="Number of rows to send.", min=1)] = 100_000,
    rate: Annotated[
        float, typer.Option(help="Rows per second; 0: as fast as the hub accepts them.", min=0)
    ] = 0,
    straggler: Annotated[int | None, typer.Option(help="Make this rank late in each round.", min=0)] = None,
    late_ms: Annotated[
        float, typer.Option("--late-ms", help="Lateness of the straggler in ms.", min=0.1)
    ] = 20.0,
    ranks: Annotated[int, typer.Option(help="Number of ranks on this machine.", min=1, max=1024)] = 8,
    first_rank: Annotated[int, typer.Option("--first-rank", help="First rank on this machine.", min=0)] = 0,
    world: Annotated[
        int | None,
        typer.Option(help="Ranks of the job on all machines (default: the ranks of this machine).", min=1),
    ] = None,
    job: Annotated[
        str, typer.Option(help="Job name; machines with the same job send matching rounds.")
    ] = "stress",
    cluster: Annotated[str, typer.Option(help="Name of the cluster.")] = "stress",
    batch: Annotated[int, typer.Option(help="Rows per request.", min=1, max=50_000)] = 500,
    at_once: Annotated[int, typer.Option("--at-once", help="Concurrent requests.", min=1, max=256)] = 4,
    protocol: Annotated[str, typer.Option(help="Protocol: arrow, or otlp (logs).")] = "arrow",
    lane: Annotated[
        str | None, typer.Option("--lane", hidden=True, help="Former name of --protocol.")
    ] = None,
    patience: Annotated[
        str, typer.Option(help="Give up after this time without an acknowledgement: 30s, 2m.")
    ] = "30s",
    ca_cert: CaFile = None,
    hub_insecure: Annotated[
        bool, typer.Option("--hub-insecure", help="Send in clear text, the token included.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send synthetic rounds to a hub, and report its throughput."""
    import json

    from stallscope.exporters.hub_channel import HubChannel, Target
    from stallscope.serve.tokens import token_in
    from stallscope.stress.load import Job
    from stallscope.stress.run import Plan, run

    check_grpc_address(endpoint, "--endpoint")
    patience_ns = duration_ns(patience, "--patience")
    protocol = lane or protocol
    if protocol not in ("arrow", "otlp"):
        raise BadInput(f"--protocol: unknown protocol {protocol!r}; give arrow or otlp")
    n_world = world or first_rank + ranks
    if n_world < first_rank + ranks:
        raise BadInput(
            f"--world {n_world} has no rank {first_rank + ranks - 1}; give at least {first_rank + ranks}"
        )
    if straggler is not None and straggler >= n_world:
        raise BadInput(f"--straggler {straggler}: not a rank of the job; give 0 to {n_world - 1}")
    interval_ns = int(ranks / rate * 1e9) if rate else max(50_000_000, int(late_ms * 3e6))
    if straggler is not None and late_ms * 1e6 > interval_ns / 2:
        raise BadInput(
            f"--late-ms {late_ms:g} exceeds half of the time of a round ({interval_ns / 1e6:.3g} ms for {ranks} ranks "
            f"at --rate {rate:g}); give --rate {int(ranks / late_ms * 500)} or less, or a lower --late-ms"
        )
    token_in(token_file)
    target = Target(
        address=endpoint,
        node=node_id,
        cluster=cluster,
        token=lambda: token_in(token_file),
        ca_file=ca_cert,
        insecure=hub_insecure,
        about={"agent": "stallscope stress"},
    )
    channel = HubChannel(target, only_logs=protocol == "otlp")
    try:
        result = run(
            Plan(
                job=Job(
                    name=job,
                    ranks=ranks,
                    first_rank=first_rank,
                    world=n_world,
                    interval_ns=interval_ns,
                    straggler=straggler,
                    late_ns=int(late_ms * 1e6),
                ),
                events=events,
                rate=rate,
                batch=batch,
                at_once=at_once,
                patience_s=patience_ns / 1e9,
            ),
            channel,
        )
    finally:
        channel.close()
    numbers = result.numbers()
    if as_json:
        typer.echo(json.dumps(numbers))
    else:
        for name, value in numbers.items():
            typer.echo(f"{name.replace('_', ' '):20} {value:,}")
    if result.n_acknowledged < result.n_sent:
        raise BadInput(f"the hub refused {result.n_refused:,} rows: {result.reason}")
