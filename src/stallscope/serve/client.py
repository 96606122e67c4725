"""Calls a hub's HTTP interface from a shell or another process. Errors have the class that the hub raised."""

import http.client
import json
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stallscope import errors
from stallscope.credentials import masked
from stallscope.errors import BadInput, NotFound, StallscopeError, TookTooLong, Unreachable
from stallscope.serve.http_errors import kind_of
from stallscope.serve.tokens import bearer

_TIMEOUT_S = 60.0
_MAX_BYTES = 64 << 20
_TOOL_NAME = re.compile(r"\bfleet\.cluster\.(\w+)(?= lists )")
"""A tool in the advice of an error, which a person follows with a command."""


@dataclass(frozen=True)
class HubClient:
    """A hub at http(s)://HOST:PORT. ca: file of the trusted authority; None for the system's authorities."""

    url: str
    token: str
    ca: Path | None = None

    def tools(self) -> list[dict[str, Any]]:
        """The hub's tools. Raises as ask()."""
        tools_list: list[dict[str, Any]] = self._sent("GET", "/api/v1/tools/list", None)["tools"]
        return tools_list

    def ask(self, tool: str, arguments: object) -> dict[str, Any]:
        """A tool's answer. Raises the hub's error, Unreachable or TookTooLong."""
        if not tool.replace(".", "").replace("_", "").isalnum() or not tool.isascii():
            raise NotFound(f"unknown tool {tool[:80]!r}; stallscope ask without a tool lists the tools")
        return self._sent("POST", f"/api/v1/tools/{tool}", arguments)

    def _sent(self, method: str, path: str, body: object) -> dict[str, Any]:
        headers = {"Authorization": bearer(self.token), "Accept": "application/json"}
        text = None if body is None else json.dumps(body)
        if text is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection()
        try:
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            data = response.read(_MAX_BYTES)
        except TimeoutError:
            raise TookTooLong(f"{self.url} did not answer within {_TIMEOUT_S:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(
                f"{self.url}: {_reason(error)}; check the address, and that the hub is running"
            ) from None
        finally:
            connection.close()
        return self._read(response.status, data)

    def _connection(self) -> http.client.HTTPConnection:
        scheme, host, port = check_url(self.url)
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except OSError as error:
            raise BadInput(f"--ca-cert {self.ca}: cannot be used ({error.strerror or error})") from None
        return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)

    def _read(self, status: int, data: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(data)
            if status == 200 and isinstance(answer, dict):
                return answer
            raise error_of(answer["error"]["kind"], str(answer["error"]["message"]))
        except (ValueError, TypeError, KeyError):
            raise Unreachable(
                f"{self.url} answered with status {status}, but not in a hub's format"
            ) from None


def check_url(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port of a hub's address. Raises BadInput."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a bracket without its pair, or a port that is not a number
        parts, port = urlsplit(""), 0
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == 0
        or parts.username is not None
        or parts.path not in ("", "/")
    ):
        raise BadInput(f"--hub {url!r}: expected http(s)://HOST:PORT, for example https://localhost:8081")
    return parts.scheme, parts.hostname, port


def error_of(kind: str, message: str) -> StallscopeError:
    """The error in an answer, as its own class where this version has that class."""
    problem, _, is_of_header = message.partition("; send the header")  # the advice is for programs
    if is_of_header:
        message = f"{problem}; give a file with a token of this hub with --token-file"
    message = _TOOL_NAME.sub(r"`stallscope ask \1`", message)
    known = {
        kind_of(each): each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, StallscopeError)
    }
    return known.get(kind, StallscopeError)(message)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); pass its authority with --ca-cert"
    if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (error.reason or ""):
        return "it requires a client certificate, and none was given"
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "it does not use TLS: begin its address with http://, or choose its TLS port"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return "it does not answer in HTTP: use the address of the hub's API (port 8081)"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return masked(str(error)) or type(error).__name__
