"""`stallscope mcp`: the tools of this machine for an assistant."""

from __future__ import annotations

from stallscope.commands.fleet import (
    CaCert,
    ClientCert,
    ClientKey,
    FleetOptions,
    Nodes,
    NoTls,
    TokenFile,
    access,
)
from stallscope.commands.options import Db, Price, SettingsFile, settings_from


def mcp(
    db: Db = None,
    usd_per_gpu_hour: Price = None,
    nodes: Nodes = None,
    token_file: TokenFile = None,
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    no_tls: NoTls = False,
    settings: SettingsFile = None,
) -> None:
    """Let an assistant query this machine (MCP).

    Serves MCP on standard input and output. For MCP over the network: `stallscope serve`, path /mcp.
    """
    from stallscope.assistant import mcp_server
    from stallscope.assistant.node_context import Node
    from stallscope.query.remote_nodes import addresses

    fleet = FleetOptions(nodes, token_file, ca_cert, client_cert, client_key, no_tls, is_timeout_local=True)
    chosen = settings_from({"db": db, "usd_per_gpu_hour": usd_per_gpu_hour, **fleet.flags()}, settings)
    others = addresses(chosen.nodes) if chosen.nodes else []
    if not others:
        fleet.check_unused()
    mcp_server.on_streams(Node(chosen, others, access(chosen, fleet) if others else None))
