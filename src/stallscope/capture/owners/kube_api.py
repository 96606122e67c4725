"""Read-only requests to the API of Kubernetes, or to a kubelet: one object, a list page by page, a watch.

Uses http.client: a Kubernetes client library costs the agent tens of megabytes. The token is read for each request,
because the kubelet replaces the token file.
"""

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from stallscope.credentials import header_value

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 10.0
_METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1,application/json"
"""Lists and watches carry metadata only, a fraction of a pod; other servers send whole objects."""
_PAGE = 100
_MAX_BYTES = 32 << 20


class Gone(OSError):
    """The resource version of a watch is too old: list again (HTTP 410)."""


class Absent(OSError):
    """The object does not exist, or the service account may not read it (HTTP 401, 403, 404)."""


@dataclass(frozen=True)
class KubeApi:
    """address: https://HOST:PORT. account: folder with token and ca.crt. verifies: check the server's certificate."""

    address: str
    account: Path = ACCOUNT
    verifies: bool = True

    def get(self, path: str, accept: str = "application/json") -> dict[str, Any]:
        """The JSON object at a path. Raises OSError, ValueError."""
        with closing(self._connection(_TIMEOUT_S)) as connection:
            answer = self._answer(connection, path, accept)
            found: dict[str, Any] = json.loads(_body(answer))
            return found

    def pages(self, path: str, **params: str) -> Iterator[dict[str, Any]]:
        """The metadata of a list, page by page. Raises OSError, ValueError."""
        token = ""
        while True:
            query = params | {"limit": str(_PAGE)} | ({"continue": token} if token else {})
            page = self.get(f"{path}?{urlencode(query)}", _METADATA.format("List"))
            yield page
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    def watch(self, path: str, *, timeout_s: float, **params: str) -> Iterator[dict[str, Any]]:
        """The events of a watch of metadata until the server ends it. Raises OSError, ValueError, Gone.

        A proxy may end a watch in the middle of an event; the next watch then repeats it.
        """
        query = params | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{timeout_s:.0f}",
        }
        with closing(self._connection(timeout_s + _TIMEOUT_S)) as connection:
            answer = self._answer(connection, f"{path}?{urlencode(query)}", _METADATA.format(""))
            while (line := answer.readline(_MAX_BYTES)).endswith(b"\n"):
                event: dict[str, Any] = json.loads(line)
                if event.get("type") == "ERROR":
                    _raise(path, int((event.get("object") or {}).get("code") or 0))
                yield event

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        ca = self.account / "ca.crt"
        context = ssl.create_default_context(cafile=str(ca) if ca.is_file() else None)
        if not self.verifies:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=timeout_s, context=context
        )

    def _answer(
        self, connection: http.client.HTTPConnection, path: str, accept: str
    ) -> http.client.HTTPResponse:
        headers = {"Accept": accept}
        token = self.account / "token"
        if token.is_file():
            headers["Authorization"] = f"Bearer {header_value(token.read_text().strip(), str(token))}"
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
        except (http.client.HTTPException, OSError) as error:
            raise OSError(f"{self.address} does not answer ({error or type(error).__name__})") from error
        if answer.status != http.client.OK:
            _raise(path, answer.status)
        return answer


def _body(answer: http.client.HTTPResponse) -> bytes:
    body = answer.read(_MAX_BYTES + 1)
    if len(body) > _MAX_BYTES:
        raise ValueError(f"an answer exceeds {_MAX_BYTES >> 20} MiB")
    return body


def _raise(path: str, status: int) -> None:
    what = path.partition("?")[0]
    if status == http.client.GONE:
        raise Gone(f"{what}: the resource version is too old")
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        raise Absent(f"{what} is forbidden (HTTP {status}): grant get, list and watch to the service account")
    if status == http.client.NOT_FOUND:
        raise Absent(f"{what}: HTTP {status}")
    raise OSError(f"{what}: HTTP {status}")
