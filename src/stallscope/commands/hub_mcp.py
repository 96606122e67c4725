"""`stallscope hub mcp`: the hub's tools for an assistant that starts its MCP servers itself."""

from __future__ import annotations

from typing import Any

from stallscope.commands.ask import DEFAULT_HUB, client_from
from stallscope.commands.options import CaFile, HubUrl, SettingsFile, TokenFile


def mcp(
    hub: HubUrl = DEFAULT_HUB,
    token_file: TokenFile = None,
    ca_cert: CaFile = None,
    settings: SettingsFile = None,
) -> None:
    """Serve a hub's tools over MCP on standard input and output."""
    client = client_from(hub, token_file, ca_cert, settings=settings)
    entries = client.tools()

    import anyio
    import anyio.to_thread

    from stallscope.serve import mcp_prompts
    from stallscope.serve import mcp_transport as served

    async def call(request: Any, name: str, arguments: object) -> dict[str, Any]:
        return await anyio.to_thread.run_sync(client.ask, name, arguments)

    anyio.run(
        served.on_standard_streams,
        served.server(
            "stallscope",
            entries,
            call,
            instructions=mcp_prompts.INSTRUCTIONS,
            texts=mcp_prompts.texts(),
            guides=mcp_prompts.guides(),
        ),
    )
