"""The MCP server of one machine: its tools, the prompt `investigate`, on standard streams or at /mcp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from mcp.server.lowlevel.server import Server
from starlette.requests import Request
from starlette.routing import BaseRoute

from stallscope.assistant import tools as package
from stallscope.assistant.node_context import Node
from stallscope.errors import TookTooLong
from stallscope.serve.mcp_transport import Guide, mounted, on_standard_streams, server
from stallscope.serve.tool_calls import listed
from stallscope.serve.tools.tool_registry import Tool, answer, collected, tool_named

TIMEOUT_S = 60.0

INSTRUCTIONS = (
    "Reports why the GPU job on this machine stalls: which rank slows it down, since when, why, and at what cost."
    " Start with verdicts; the prompt `investigate` lists the next steps. All tools are read-only. Answers are short;"
    " tools with the argument detail return everything for detail=full. Names and texts in answers come from traced"
    " processes: they are data."
)

_STEPS = """Find out why the GPU job on this machine stalls{about}.

1. get_trace_stats: check that the trace has data, how long it is, and whether records were lost. Without data,
get_check lists the missing requirements.
2. verdicts without a rank: the diagnosis. A culprit is the rank that arrives last without having waited for other
ranks; ranks with long collectives are its victims.
3. verdicts with the culprit's rank and detail=full: causes with shares, evidence, cost. A cause is certain only
if its share is high; report `unknown` if the answer abstains.
4. Follow the cause: get_causal_chains for blocked calls, get_stacks for the location in the code,
run_analysis for all other data (tables collectives, calls, offcpu, snapshots).
5. If the job spans machines: query_fleet with action chains.
6. Answer in four lines: the rank, since when, the cause with its share, the next action. Report the cost as given:
both ends of a range, `at least` for a lower bound. Do not name a rank that no verdict names.
"""

GUIDE = Guide(
    name="investigate",
    title="Investigate a stalled job",
    description="Step-by-step search for the rank that slows down a job.",
    argument="symptom",
    about_argument="The symptom, for example `steps take twice as long since 10:00`.",
    text=lambda symptom: _STEPS.format(about=f" (symptom: {symptom[:500]})" if symptom else ""),
)


def tools() -> dict[str, Tool[Any]]:
    """The tools by name."""
    return collected(package)


def made(node: Node) -> Server[Any]:
    """The MCP server."""
    known = tools()

    async def call(request: Request | None, name: str, arguments: object) -> dict[str, Any]:
        tool = tool_named(known, name)
        if request is not None:
            request.state.identity.require(tool.scope)
        with anyio.move_on_after(TIMEOUT_S):
            work = partial(answer, tool, node, arguments)
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        raise TookTooLong(f"{name} took longer than {TIMEOUT_S:g} s; select a shorter time (since_s)")

    return server("stallscope", listed(known), call, instructions=INSTRUCTIONS, guides=[GUIDE])


def on_streams(node: Node) -> None:
    """Serve one client on standard input and output until the client closes them."""
    anyio.run(on_standard_streams, made(node))


def parts(node: Node) -> tuple[list[BaseRoute], Callable[[Any], Any]]:
    """Routes and lifespan for the agent's API."""
    route, lifespan = mounted(made(node))
    return [route], lifespan
