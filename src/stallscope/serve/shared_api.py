"""The state of hubs that share their data over HTTP, for tokens with the scope admin."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from stallscope.serve.tokens import Identity


def routes(status: Callable[[], Mapping[str, Any]]) -> list[BaseRoute]:
    """GET /api/v1/shared: hubs, slots and their owners."""

    async def shared(request: Request) -> Response:
        identity: Identity = request.state.identity
        identity.require("admin")
        return JSONResponse(dict(await run_in_threadpool(status)), headers={"Cache-Control": "no-store"})

    return [Route("/api/v1/shared", shared)]
