"""The interfaces that a server has, as flags of GET /api/versions, derived from its routes."""

from collections.abc import Iterable, Mapping

from starlette.routing import BaseRoute, Mount, Route

SURFACES: Mapping[str, str] = {
    "tools": "/api/v1/tools/list",
    "sql": "/api/v1/sql",
    "mcp": "/mcp",
    "node_query": "/api/v1/node/query",
    "node_trace": "/api/v1/node/trace",
    "page": "/ui",
    "alerts": "/api/v1/alerts",
    "owner": "/api/v1/owner",
    "inference": "/api/v1/inference",
    "shared": "/api/v1/shared",
}
"""The path prefix of each interface. No version serves an interface that is missing here."""


def capabilities(routes: Iterable[BaseRoute]) -> dict[str, bool]:
    """By interface: whether any of the routes serves it."""
    paths = {route.path.rstrip("/") for route in routes if isinstance(route, Route | Mount)}
    return {name: any(_is_at(path, first) for path in paths) for name, first in SURFACES.items()}


def _is_at(path: str, first: str) -> bool:
    return path == first or path.startswith(f"{first}/")
