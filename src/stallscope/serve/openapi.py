"""The OpenAPI 3.1 document of the HTTP interface: each tool with its own path and schemas."""

from typing import Any

from stallscope import __version__
from stallscope.serve.tools.tool_registry import Tool, Tools

_ERRORS = {
    "400": "The arguments do not match the schema, or the SQL is invalid.",
    "401": "The token is missing, unknown, expired or revoked.",
    "403": "The token lacks the scope, or the policy refuses the SQL.",
    "404": "The requested item does not exist.",
    "413": "The request is too large.",
    "429": "More requests than the token may send.",
    "503": "All workers are busy: retry in a moment.",
    "504": "The query exceeded its time or memory limit.",
}
_JSON = "application/json"
LATENCY_TOOL = "fleet.cluster.latency"
"""The tool behind POST /api/v1/inference."""


def document(tools: Tools, *, sql_tool: str) -> dict[str, Any]:
    """The document. sql_tool: the tool behind POST /api/v1/sql."""
    paths = {f"/api/v1/tools/{tool.name}": {"post": _operation(tool, tool.name)} for tool in tools.values()}
    if sql_tool in tools:
        paths["/api/v1/sql"] = {"post": _operation(tools[sql_tool], "sql")}
    if LATENCY_TOOL in tools:
        paths["/api/v1/inference"] = {"post": _operation(tools[LATENCY_TOOL], "inference")}
    paths["/api/v1/tools/list"] = {"get": _listing()}
    paths["/api/versions"] = {
        "get": _open("versions", "Supported API versions.", ["versions", "capabilities"])
    }
    paths["/api/v1/health"] = {
        "get": _open("health", "Whether the hub is alive; more details with a token.", ["alive"])
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stallscope hub",
            "version": __version__,
            "summary": "Which rank slows down a GPU job, since when, why, and at what cost?",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _error()},
            "responses": {status: _refusal(text) for status, text in _ERRORS.items()},
        },
    }


def _operation(tool: Tool[Any], name: str) -> dict[str, Any]:
    needs_body = bool(tool.input_schema.get("required"))
    return {
        "operationId": name.replace(".", "_"),
        "summary": tool.title,
        "description": f"{tool.description} The token needs the scope {tool.scope!r}.",
        "requestBody": {"required": needs_body, "content": {_JSON: {"schema": tool.input_schema}}},
        "responses": {
            "200": {"description": "The answer.", "content": {_JSON: {"schema": tool.output_schema}}},
            **_refusals(_ERRORS),
        },
    }


def _listing() -> dict[str, Any]:
    entry = {
        "type": "object",
        "required": ["name", "title", "description", "scope", "input_schema", "output_schema"],
        "properties": {name: {"type": "string"} for name in ("name", "title", "description", "scope")},
    }
    answer = {
        "type": "object",
        "required": ["tools"],
        "properties": {"tools": {"type": "array", "items": entry}},
    }
    return {
        "operationId": "tools_list",
        "summary": "The tools and their schemas.",
        "responses": {
            "200": {"description": "All tools.", "content": {_JSON: {"schema": answer}}},
            **_refusals(("401", "429")),
        },
    }


def _open(name: str, text: str, keys: list[str]) -> dict[str, Any]:
    """An operation that needs no token; a token sent to it must be valid."""
    schema = {"type": "object", "required": keys}
    return {
        "operationId": name,
        "summary": text,
        "security": [{}, {"token": []}],
        "responses": {
            "200": {"description": text, "content": {_JSON: {"schema": schema}}},
            **_refusals(("401", "429")),
        },
    }


def _refusals(statuses: Any) -> dict[str, Any]:
    return {status: {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _refusal(text: str) -> dict[str, Any]:
    return {"description": text, "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _error() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["kind", "message"],
                "properties": {"kind": {"type": "string"}, "message": {"type": "string"}},
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    }
