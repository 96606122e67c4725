"""The hub's interfaces: tools, SQL and MCP as routes for the application, over one store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from typing import TYPE_CHECKING, Any

from mcp.server.lowlevel.server import Server
from starlette.routing import BaseRoute

from stallscope.rates import RateTable
from stallscope.serve import api, mcp_prompts, mcp_transport, tools
from stallscope.serve.sql.sources import of_store
from stallscope.serve.sql.workers import QueryLimits, Workers
from stallscope.serve.tool_calls import called, listed
from stallscope.serve.tools.tenant_context import Hub
from stallscope.serve.tools.tool_registry import Tools, collected

if TYPE_CHECKING:  # importing the store here would load the engine
    from stallscope.store.hub.store_protocol import Store

Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]


@contextmanager
def front(
    store: Store, rates: RateTable, *, limits: QueryLimits | None = None, n_workers: int = 2
) -> Iterator[tuple[list[BaseRoute], Lifespan]]:
    """The routes, and the lifespan that must run while they are served. The SQL processes end with the with block."""
    limits = limits or QueryLimits()
    data = of_store(store, rates, max_hot_rows=limits.max_hot_rows)
    with closing(Workers(data, n=n_workers, limits=limits, on_unreadable=store.set_aside_damaged)) as workers:
        yield parts(Hub(store, rates, workers), collected(tools))


def parts(hub: Hub, tools: Tools) -> tuple[list[BaseRoute], Lifespan]:
    """The routes of these tools over a hub, and the lifespan that they need."""
    route, lifespan = mcp_transport.mounted(mcp_server(hub, tools))
    return [*api.routes(hub, tools), route], lifespan


def mcp_server(hub: Hub, tools: Tools) -> Server[Any]:
    """The MCP server of these tools over a hub. The HTTP layers determine the tenant of a request."""

    async def call(request: Any, name: str, arguments: object) -> dict[str, Any]:
        request.state.noted["tool"] = name[:80]
        return await called(hub, tools, name, arguments=arguments, identity=request.state.identity)

    return mcp_transport.server(
        "stallscope",
        listed(tools),
        call,
        instructions=mcp_prompts.INSTRUCTIONS,
        texts=mcp_prompts.texts(),
        guides=mcp_prompts.guides(),
    )
