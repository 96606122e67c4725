"""HTTP POST for receivers, with errors that state whether and when to retry."""

import http.client
import json
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from stallscope import __version__
from stallscope.credentials import header_value

TIMEOUT_S = 10.0
_MAX_BYTES = 10_000


@dataclass
class DeliveryFailed(Exception):
    """A failed delivery.

    reason: without secrets, for the log. retry_after_s: as the receiver asked. is_permanent: the request is wrong.
    """

    reason: str
    retry_after_s: float | None = None
    is_permanent: bool = False

    def __str__(self) -> str:
        return self.reason


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the secret to another address."""

    def redirect_request(self, *args: object, **named: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def post(
    url: str, body: object, headers: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S
) -> str:
    """POST JSON, or bytes as they are; returns the beginning of the answer. Raises DeliveryFailed.

    The URL may be a secret (Slack), so that no message contains more than its host.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    every = {"Content-Type": "application/json", "User-Agent": f"stallscope/{__version__}", **(headers or {})}
    try:
        for name, value in every.items():
            header_value(value, f"the secret for the header {name}")
    except ValueError as error:
        raise DeliveryFailed(str(error), is_permanent=True) from None
    try:
        if not url.isprintable() or " " in url:
            raise ValueError
        request = urllib.request.Request(url, data=data, headers=every, method="POST")
        user, at, host = request.host.rpartition("@")
        if request.type not in ("http", "https"):
            raise ValueError
        if at:  # urllib would look it up as a part of the host's name
            request.host = host
            request.add_unredirected_header("Authorization", _basic(user))
    except ValueError:
        raise DeliveryFailed("the URL is not an http(s) address", is_permanent=True) from None
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return str(answer.read(_MAX_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(host, error) from None
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        raise DeliveryFailed(f"{host} cannot be reached ({cause})") from None


def _basic(user_and_password: str) -> str:
    """The header that carries user and password of a URL."""
    return "Basic " + b64encode(unquote(user_and_password).encode()).decode()


def _refusal(host: str, error: urllib.error.HTTPError) -> DeliveryFailed:
    """4xx except 408 and 429 means that the request or the secret is wrong."""
    try:
        text = " ".join(error.read(_MAX_BYTES).decode("utf-8", "replace").split())[:200]
    except (OSError, http.client.HTTPException):
        text = ""
    retry = error.headers.get("Retry-After", "") if error.headers else ""
    return DeliveryFailed(
        f"{host} answered {error.code}{': ' + text if text else ''}",
        retry_after_s=float(retry) if retry.isdigit() else None,
        is_permanent=400 <= error.code < 500 and error.code not in (408, 429),
    )
