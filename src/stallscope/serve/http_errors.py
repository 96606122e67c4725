"""How an error reads over HTTP: the same body everywhere, with the status that its class carries."""

import re

from starlette.responses import JSONResponse

from stallscope.errors import StallscopeError, StorageFailed, TokensUnreadable
from stallscope.serve.plain_text import visible, without_paths

INTERNAL = "internal"
"""The kind of an error that is ours: what happened is in the hub's log, not in the answer."""


def kind_of(error: type[StallscopeError]) -> str:
    """The class as one word for programs: NotFound is `not_found`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).lower()


def public_message(error: StallscopeError) -> str:
    """The message as clients get it: without paths and invisible characters; the log has the rest."""
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
    """The answer to a request that ended in this error. retry_after_s: when to come again; closes: the connection."""
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="stallscope"'
    if closes:
        headers["Connection"] = "close"
    return JSONResponse(error_body(kind_of(type(error)), public_message(error)), error.http_status, headers)
