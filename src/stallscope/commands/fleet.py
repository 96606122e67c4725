"""Querying the agents of several machines: shared options of query, explain and export, and warnings on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from stallscope.commands.options import check_pair, duration_ns
from stallscope.errors import BadInput, Partial
from stallscope.events.counted import counted

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.events.trace import Trace
    from stallscope.query.remote_nodes import Access, Failure, Reply
    from stallscope.settings import Settings

Nodes = Annotated[
    str | None,
    typer.Option("--nodes", help="Query the agents of these machines, HOST:PORT,HOST:PORT (trace --serve)."),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the token for the agents.")]
CaCert = Annotated[
    Path | None,
    typer.Option("--ca-cert", help="Authorities of the agents' certificates (PEM, may contain several)."),
]
ClientCert = Annotated[
    Path | None, typer.Option("--client-cert", help="Client certificate, for agents that require it.")
]
ClientKey = Annotated[Path | None, typer.Option("--client-key", help="The key of that certificate.")]
NoTls = Annotated[bool, typer.Option("--no-tls", help="Query the agents in clear text, the token included.")]
NodesTimeout = Annotated[str, typer.Option("--timeout", help="Time limit for the nodes' answers: 10s, 2m.")]
NODES_TIMEOUT = "30s"

WARN_AHEAD_NS = 10_000_000
WARN_ERROR_NS = 5_000_000
"""A larger clock offset or uncertainty is reported."""


class FleetOptions(NamedTuple):
    """The fleet options of one command. timeout: for all nodes together.

    is_timeout_local: the command has the same option without nodes.
    """

    nodes: str | None
    token_file: Path | None
    ca_cert: Path | None
    client_cert: Path | None
    client_key: Path | None
    no_tls: bool
    timeout: str = "10s"
    is_timeout_local: bool = False

    def flags(self) -> dict[str, object]:
        """By setting name."""
        return {
            "nodes": self.nodes,
            "nodes_token_file": self.token_file,
            "nodes_ca_file": self.ca_cert,
            "nodes_client_cert": self.client_cert,
            "nodes_client_key": self.client_key,
        }

    def check_unused(self) -> None:
        """To be called where no node is queried. Raises BadInput for an option that only nodes need."""
        given = {
            "--token-file": self.token_file,
            "--ca-cert": self.ca_cert,
            "--client-cert": self.client_cert,
            "--client-key": self.client_key,
            "--no-tls": self.no_tls,
            "--timeout": not self.is_timeout_local and self.timeout != NODES_TIMEOUT,
        }
        for option, value in given.items():
            if value:
                raise BadInput(f"{option} has no effect without --nodes; give --nodes HOST:PORT, or omit it")


def is_fleet(chosen: Settings, options: FleetOptions, db: Path | None) -> bool:
    """Whether to query the nodes instead of a local trace. Raises BadInput if both are given.

    Raises BadInput for options of nodes without nodes.
    """
    if options.nodes and db:
        raise BadInput("--nodes and --db exclude each other; give only one")
    if chosen.nodes and db is None:
        return True
    options.check_unused()
    return False


def access(chosen: Settings, options: FleetOptions) -> Access:
    """Addresses and credentials of the nodes. Raises BadInput, NotFound."""
    from stallscope.query.remote_nodes import Access
    from stallscope.serve.tokens import token_in

    check_pair(chosen.nodes_client_cert, chosen.nodes_client_key)
    return Access(
        token=token_in(chosen.nodes_token_file) if chosen.nodes_token_file else "",
        ca=chosen.nodes_ca_file,
        cert=chosen.nodes_client_cert,
        key=chosen.nodes_client_key,
        is_tls=not options.no_tls,
        timeout_s=duration_ns(options.timeout, "--timeout") / 1e9,
    )


def fleet_trace(chosen: Settings, options: FleetOptions, since_ns: int | None) -> tuple[Trace, list[Failure]]:
    """One trace of all nodes that answer, and the missing nodes. Wrong clocks are reported. Raises Unreachable."""
    from stallscope.query.fleet_trace import asked_of
    from stallscope.query.remote_nodes import addresses

    replies = asked_of(addresses(chosen.nodes), access(chosen, options), since_ns=since_ns)
    tell(replies.failures, replies.replies)
    return replies.trace, replies.failures


def missing_data(failures: list[Failure]) -> list[dict[str, str]]:
    """The missing nodes, for --json."""
    return [{"address": failure.address, "reason": failure.reason} for failure in failures]


def refuse_partial(failures: list[Failure], n_nodes: int) -> None:
    """To be called after the answer was printed. Raises Partial if nodes are missing."""
    if failures:
        raise Partial(f"the answer lacks {len(failures)} of {counted(n_nodes, 'node')}")


def tell(failures: list[Failure], replies: list[Reply[Any]]) -> None:
    """Report missing nodes and wrong clocks on stderr."""
    for failure in failures:
        typer.echo(f"stallscope: {failure.address} is missing: {failure.reason}", err=True)
    for reply in replies:
        ahead_ms, error_ms = reply.clock.ahead_ns / 1e6, reply.clock.error_ns / 1e6
        way = "ahead of" if ahead_ms > 0 else "behind"
        if abs(reply.clock.ahead_ns) > WARN_AHEAD_NS + reply.clock.error_ns:
            typer.echo(
                f"stallscope: the clock of {reply.name} ({reply.address}) is {abs(ahead_ms):.1f} ms {way} this "
                f"machine's (± {error_ms:.1f} ms)",
                err=True,
            )
        if reply.clock.error_ns > WARN_ERROR_NS:
            typer.echo(
                f"stallscope: the clock of {reply.name} ({reply.address}) is known only within "
                f"± {error_ms:.1f} ms: the network is slow, or the machine is busy",
                err=True,
            )
