"""The alerts of a hub over HTTP: list, acknowledge, silence. Every token with the scope read may use them."""

import time
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from stallscope.alerts.config import Match, Seconds, first_complaint
from stallscope.alerts.state import AlertState, Silence
from stallscope.errors import BadInput
from stallscope.events.clock_text import iso_utc
from stallscope.serve.tokens import Identity

_MAX_SILENCE_S = 30 * 86_400
_NO_STORE = {"Cache-Control": "no-store"}


class _Silencing(BaseModel):
    """The body of a new silence. match: at least one condition. duration: 30m, 2h, 7d."""

    model_config = ConfigDict(extra="forbid")
    match: Match
    duration: Annotated[Seconds, Field(gt=0, le=_MAX_SILENCE_S)]
    comment: Annotated[str, BeforeValidator(str), Field(max_length=500)] = ""


def routes(state: AlertState, *, has_receivers: bool) -> list[BaseRoute]:
    """The routes over a state file. A tenant sees and changes only its own alerts and silences.

    A request with the cookie of a session passes the same check of its origin as all requests of the page. A share
    link lacks the scope read. has_receivers: whether the hub sends alerts.
    """

    async def listed(request: Request) -> Response:
        identity = _reader(request)
        is_open = request.query_params.get("state") == "open"
        incident = request.query_params.get("incident")
        alerts = state.listed(identity.tenant, is_open=is_open, incident=incident)
        silences = state.silences(time.time_ns(), identity.tenant, covering=incident)
        answer = {
            "has_receivers": has_receivers,
            "alerts": [_with_times(alert) for alert in alerts],
            "silences": [_silence(silence) for silence in silences],
        }
        return JSONResponse(answer, headers=_NO_STORE)

    async def acknowledge(request: Request) -> Response:
        identity, key = _reader(request), request.path_params["key"]
        if request.method == "DELETE":
            state.end_acknowledgement(key, identity.tenant)
            return Response(status_code=204)
        user = f"token {identity.token_id}"
        state.acknowledge(key, user, time.time_ns(), identity.tenant)
        return JSONResponse({"key": key, "acknowledged_by": user})

    async def silence(request: Request) -> Response:
        identity = _reader(request)
        wanted = _parsed(_Silencing, await request.body())
        silence = state.silence(
            wanted.match,
            until_ns=time.time_ns() + round(wanted.duration * 1e9),
            user=f"token {identity.token_id}",
            comment=wanted.comment,
            tenant=identity.tenant,
        )
        return JSONResponse(_silence(silence), 201)

    async def end_silence(request: Request) -> Response:
        state.end_silence(request.path_params["silence_id"], _reader(request).tenant)
        return Response(status_code=204)

    return [
        Route("/api/v1/alerts", listed, methods=["GET"]),
        Route("/api/v1/alerts/silences", silence, methods=["POST"]),
        Route("/api/v1/alerts/silences/{silence_id}", end_silence, methods=["DELETE"]),
        Route("/api/v1/alerts/{key}/acknowledge", acknowledge, methods=["POST", "DELETE"]),
    ]


def _reader(request: Request) -> Identity:
    identity: Identity = request.state.identity
    identity.require("read")
    return identity


def _with_times(alert: dict[str, Any]) -> dict[str, Any]:
    """Times as ISO 8601."""
    raised_ns, over_ns = alert.pop("raised_ns"), alert.pop("over_ns")
    return alert | {"raised": iso_utc(raised_ns), "over": None if over_ns is None else iso_utc(over_ns)}


def _silence(silence: Silence) -> dict[str, Any]:
    return {
        "silence_id": silence.silence_id,
        "match": silence.match,
        "until": iso_utc(silence.until_ns),
        "made_by": silence.made_by,
        "comment": silence.comment,
    }


_Body = TypeVar("_Body", bound=BaseModel)


def _parsed(model: type[_Body], body: bytes) -> _Body:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        location, message = first_complaint(error)
        path = ".".join(location)
        raise BadInput(f"{path + ': ' if path else ''}{message}") from None
