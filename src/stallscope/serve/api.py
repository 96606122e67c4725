"""The tools over HTTP and JSON: one path per tool, a path for SQL, the list of tools, and the OpenAPI document."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from stallscope.errors import BadInput
from stallscope.serve.openapi import LATENCY_TOOL, document
from stallscope.serve.tool_calls import called, listed
from stallscope.serve.tools.tenant_context import Hub
from stallscope.serve.tools.tool_registry import Tools

SQL_TOOL = "fleet.cluster.run_analysis"
"""The tool behind POST /api/v1/sql."""

Endpoint = Callable[[Request], Awaitable[Response]]


def routes(hub: Hub, tools: Tools) -> list[BaseRoute]:
    """The routes to add to those that the application always serves."""
    return [
        Route("/api/v1/tools/list", _list(tools), methods=["GET"]),
        Route("/api/v1/tools/{name}", _tool(hub, tools), methods=["POST"]),
        Route("/api/v1/sql", _fixed(hub, tools, SQL_TOOL), methods=["POST"]),
        Route("/api/v1/inference", _fixed(hub, tools, LATENCY_TOOL), methods=["POST"]),
        Route("/api/v1/openapi.json", _openapi(tools), methods=["GET"]),
    ]


def _list(tools: Tools) -> Endpoint:
    async def tools_list(request: Request) -> Response:
        return JSONResponse({"tools": listed(tools)})

    return tools_list


def _openapi(tools: Tools) -> Endpoint:
    async def openapi(request: Request) -> Response:
        return JSONResponse(document(tools, sql_tool=SQL_TOOL))

    return openapi


def _tool(hub: Hub, tools: Tools) -> Endpoint:
    async def tool(request: Request) -> Response:
        if request.path_params["name"] == "list":
            raise HTTPException(405, headers={"Allow": "GET"})
        return await _answered(hub, tools, request.path_params["name"], request)

    return tool


def _fixed(hub: Hub, tools: Tools, name: str) -> Endpoint:
    """The endpoint of one tool under its own path."""

    async def tool(request: Request) -> Response:
        return await _answered(hub, tools, name, request)

    return tool


async def _answered(hub: Hub, tools: Tools, name: str, request: Request) -> Response:
    """The tool's answer as a response. Errors propagate to the application's error handlers."""
    request.state.noted["tool"] = name[:80]
    arguments = _arguments(await request.body())
    identity = request.state.identity
    return JSONResponse(await called(hub, tools, name, arguments=arguments, identity=identity))


def _arguments(body: bytes) -> Any:
    """The body parsed as JSON. An empty body means no arguments."""
    if not body.strip():
        return {}
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the request body is not valid JSON: {str(error)[:120]}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON does not allow the number {name}")
