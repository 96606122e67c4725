"""A hub's application that listens for real, with tokens, over a store that a test has filled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serve.house import house_in

from stallscope.serve import tools as package
from stallscope.serve.api import routes
from stallscope.serve.app import create_app
from stallscope.serve.client import HubClient
from stallscope.serve.hub_api import mcp_server
from stallscope.serve.mcp_transport import mounted
from stallscope.serve.server import RunningServer, bound
from stallscope.serve.tools.tenant_context import Hub
from stallscope.serve.tools.tool_registry import collected


@dataclass(frozen=True)
class Answering:
    """The address of the hub, and a function that creates tokens."""

    url: str
    token: Callable[..., str]
    folder: Path
    tokens: Any

    def client(self, tenant: str = "a", scopes: tuple[str, ...] = ("read", "sql")) -> HubClient:
        return HubClient(self.url, self.token(scopes, tenant))


@contextmanager
def answering(
    hub: Hub,
    folder: Path,
    *,
    wrap: Callable[[Any], Any] = lambda app: app,
    dress: Callable[[Any], Any] = lambda served: served,
    **changes: Any,
) -> Iterator[Answering]:
    """The application over a hub. wrap: put around it, outside of its layers; dress: given its MCP server."""
    with house_in(folder, **{"requests_per_minute": 1_000_000} | changes) as house:
        tools = collected(package)
        route, lifespan = mounted(dress(mcp_server(hub, tools)))
        app = wrap(create_app([*routes(hub, tools), route], context=house, lifespan=lifespan))
        listener = bound("127.0.0.1:0", "--api")
        server = RunningServer(app, listener, context=None, name="api")
        try:
            yield Answering(f"http://127.0.0.1:{server.port}", house.tokens.create, folder, house.tokens)
        finally:
            server.stop()
            listener.close()
