"""The capability flags of GET /api/versions match the served routes, at the hub and at a node."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.routing import BaseRoute, Match

from stallscope.assistant import mcp_server
from stallscope.assistant.node_context import Node
from stallscope.serve import hub_api, node_api, tools
from stallscope.serve.capabilities import SURFACES, capabilities
from stallscope.serve.tools.tool_registry import collected
from stallscope.settings import Settings

WITHOUT_A_FLAG = {"/api/v1/openapi.json", "/api/v1/node/clock"}
"""Descriptions of other surfaces."""


def hub_routes(folder: Path) -> list[BaseRoute]:
    return hub_api.parts(SimpleNamespace(), collected(tools))[0]  # type: ignore[arg-type]


def node_routes(folder: Path) -> list[BaseRoute]:
    options = node_api.Options(db=folder / "trace.db", listen=":0", node="here", files=folder)
    return [*node_api.routes(options), *mcp_server.parts(Node(Settings(db=options.db)))[0]]


def is_served(routes: list[BaseRoute], path: str) -> bool:
    scope = {"type": "http", "path": path, "method": "GET", "headers": []}
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)


@pytest.mark.parametrize(
    ("routes_of", "served"),
    [(hub_routes, {"tools", "sql", "mcp"}), (node_routes, {"node_query", "node_trace", "mcp"})],
    ids=["hub", "node"],
)
def test_the_flags_are_those_of_the_served_routes(routes_of, served, tmp_path):
    routes = routes_of(tmp_path)
    flags = capabilities(routes)
    assert flags == {name: is_served(routes, path) for name, path in SURFACES.items()}
    assert {name for name, is_there in flags.items() if is_there} >= served


@pytest.mark.parametrize("routes_of", [hub_routes, node_routes], ids=["hub", "node"])
def test_every_route_belongs_to_a_surface(routes_of, tmp_path):
    groups = {path.removesuffix("/list") for path in SURFACES.values()}
    paths = {route.path for route in routes_of(tmp_path)} - WITHOUT_A_FLAG
    assert {path for path in paths if not any(path.startswith(group) for group in groups)} == set()


def test_hub_and_node_use_one_name_for_one_question():
    """A question that both answer has one name and takes arguments of the same names."""
    of_hub = {name.rsplit(".", 1)[-1]: tool for name, tool in collected(tools).items()}
    of_node = mcp_server.tools()
    former = {name for tool in of_node.values() for name in tool.aliases}
    assert not former & of_node.keys()
    shared = of_hub.keys() & of_node.keys()
    assert {"verdicts", "run_analysis"} <= shared
    for name in shared:
        own, other = (set(tool.input_schema["properties"]) for tool in (of_node[name], of_hub[name]))
        assert own & other, name
    rows = {
        name: set(tool["verdicts"].output_schema["properties"]["rows"]["items"]["properties"])
        for name, tool in (("hub", of_hub), ("node", of_node))
    }
    assert rows["node"] - {"full"} <= rows["hub"]
