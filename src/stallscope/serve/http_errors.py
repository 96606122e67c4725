"""Errors over HTTP: the same body for every error, with the status of its class."""

import re

from starlette.responses import JSONResponse

from stallscope.errors import StallscopeError, StorageFailed, TokensUnreadable
from stallscope.serve.plain_text import visible, without_paths

INTERNAL = "internal"
"""The kind of an internal error. The hub's log has the details; the answer does not."""


def kind_of(error: type[StallscopeError]) -> str:
    """The class name in snake case for programs: NotFound is `not_found`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).lower()


def public_message(error: StallscopeError) -> str:
    """The message for clients, without paths and invisible characters. The log has the full message."""
    if isinstance(error, TokensUnreadable):
        return "the hub cannot read its tokens, so it accepts no token; its log has the reason"
    if isinstance(error, StorageFailed):
        return "the hub cannot read or store its data now; its log has the reason"
    return str(visible(without_paths(str(error))))


def error_body(kind: str, message: str) -> dict[str, dict[str, str]]:
    """The body of every answer that is not a success."""
    return {"error": {"kind": kind, "message": message}}


def refused(
    error: StallscopeError, *, retry_after_s: int | None = None, closes: bool = False
) -> JSONResponse:
    """The response to a request that raised this error. retry_after_s: Retry-After; closes: ends the connection."""
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="stallscope"'
    if closes:
        headers["Connection"] = "close"
    return JSONResponse(error_body(kind_of(type(error)), public_message(error)), error.http_status, headers)
