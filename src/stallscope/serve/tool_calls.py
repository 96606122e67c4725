"""Calls a tool, independent of the interface: checks the token's scope, the arguments and the time limit."""

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from stallscope.errors import StallscopeError, TookTooLong
from stallscope.serve.http_errors import error_body, kind_of, public_message
from stallscope.serve.plain_text import visible
from stallscope.serve.tokens import Identity
from stallscope.serve.tools.tenant_context import Hub, TenantContext
from stallscope.serve.tools.tool_registry import Tools, answer, tool_named

TIMEOUT_S = 30.0
"""Time limit of a tool; SQL has a shorter limit."""


async def called(
    hub: Hub, tools: Tools, name: str, *, arguments: object, identity: Identity, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """The tool's answer. Raises NotFound, NotAllowed, BadInput, TookTooLong, and the tool's own errors."""
    tool = tool_named(tools, name)
    identity.require(tool.scope)
    context = TenantContext(hub, identity.tenant)
    with anyio.move_on_after(timeout_s):
        result = await anyio.to_thread.run_sync(answer, tool, context, arguments, abandon_on_cancel=True)
        cluster = arguments.get("cluster") if isinstance(arguments, Mapping) else None
        if "summary" in result and (caveat := context.caveat(cluster)):
            result["summary"] += f" {caveat}"
        return {key: visible(value) for key, value in result.items()}
    raise TookTooLong(f"{name} took longer than {timeout_s:g} s; select a shorter time, or one cluster")


def listed(tools: Tools) -> list[dict[str, Any]]:
    """The tools as a list for people and programs."""
    return [
        {
            "name": tool.name,
            "title": tool.title,
            "description": tool.description,
            "scope": tool.scope,
            "former_names": list(tool.aliases),
            "input_schema": tool.input_schema,
            "output_schema": tool.output_schema,
        }
        for tool in tools.values()
    ]


def error_of(error: StallscopeError) -> Mapping[str, Mapping[str, str]]:
    """The error as every interface reports it."""
    return error_body(kind_of(type(error)), public_message(error))
