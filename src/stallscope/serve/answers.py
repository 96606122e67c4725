"""How an error reads over HTTP: the same body everywhere, with the status that its class carries."""

import re

from starlette.responses import JSONResponse

from stallscope.errors import StallscopeError

INTERNAL = "internal"
"""The kind of an error that is ours: what happened is in the hub's log, not in the answer."""


def kind_of(error: type[StallscopeError]) -> str:
    """The class as one word for programs: NotFound is `not_found`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).lower()


def error_body(kind: str, message: str) -> dict[str, dict[str, str]]:
    """The body of every answer that is not a success."""
    return {"error": {"kind": kind, "message": message}}


def refused(error: StallscopeError, *, retry_after_s: int | None = None) -> JSONResponse:
    """The answer to a request that ended in this error. retry_after_s: when to come again, if that helps."""
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="stallscope"'
    return JSONResponse(error_body(kind_of(type(error)), str(error)), error.http_status, headers)
