"""The OTLP/HTTP port as an ASGI application: /v1/logs, /v1/metrics, /v1/traces; protobuf and JSON; gzip, deflate, zstd.

The sender is authenticated before the body is read, and the body is read only up to the limit. Decoding runs in
threads; waiting for the commit blocks none of them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stallscope.errors import BadInput, NotFound, Overloaded, TooLarge
from stallscope.receive.error_status import retry_after_header, status
from stallscope.receive.otlp_requests import SIGNALS
from stallscope.receive.receiver import Accepted, Receiver, Sender
from stallscope.receive.unpacking import unpacked

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_PATHS = {f"/v1/{signal}": signal for signal in SIGNALS}
_BODY_S = 30.0

Message = MutableMapping[str, Any]
ReceiveMessage = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], ReceiveMessage, Send], Awaitable[None]]


class UnsupportedRequest(BadInput):
    """A content type or method that OTLP/HTTP does not support."""

    http_status = 415


def app(receiver: Receiver) -> App:
    """The application, for any ASGI server."""
    threads = ThreadPoolExecutor(4 * receiver.bounds.max_at_once, thread_name_prefix="otlp-http")

    async def otlp_http(scope: MutableMapping[str, Any], receive: ReceiveMessage, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send, threads)
            return
        if scope["type"] != "http":
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        is_json = kind == JSON
        try:
            signal = _signal(scope, kind)
            loop = asyncio.get_running_loop()
            _check_framing(headers)
            sender = receiver.sender(headers)
            with receiver.requests.held(sender.tenant), _Body(receiver, sender.tenant) as body:
                await asyncio.wait_for(body.read(receive, headers), _BODY_S)
                encoding = headers.get("content-encoding", "").strip().lower()
                take = _taking(receiver, sender, signal, body, encoding, is_json)
                accepted = await loop.run_in_executor(threads, take)
                body.close()
                receipt = await asyncio.wait_for(
                    asyncio.wrap_future(accepted.future), receiver.bounds.max_waiting_s
                )
            await _answer(send, 200, accepted.answer(receipt), is_json=is_json)
        except ConnectionError:
            return  # the sender has disconnected
        except TimeoutError:
            late = Overloaded("the hub did not read and store the request in time; send again later", 2.0)
            await _refuse(send, receiver, late, scope, is_json=is_json)
        except Exception as error:  # noqa: BLE001 (the boundary: a sender gets a status, never a traceback)
            await _refuse(send, receiver, error, scope, is_json=is_json)

    return otlp_http


def _taking(
    receiver: Receiver, sender: Sender, signal: str, body: "_Body", encoding: str, is_json: bool
) -> Callable[[], Accepted]:
    def take() -> Accepted:
        plain = unpacked(body.content, encoding, limit=receiver.bounds.max_bytes)
        return receiver.otlp(signal, plain, sender.tenant, is_json=is_json)

    return take


def _signal(scope: MutableMapping[str, Any], kind: str) -> str:
    signal = _PATHS.get(scope["path"])
    if signal is None:
        raise NotFound(f"no resource at {scope['path'][:100]}; this port accepts {', '.join(_PATHS)}")
    if scope["method"] != "POST":
        raise UnsupportedRequest(f"{scope['path']} accepts only POST")
    if kind not in (PROTOBUF, JSON):
        raise UnsupportedRequest(f"unsupported content-type {kind[:50]!r}; send {PROTOBUF} or {JSON}")
    return signal


def _check_framing(headers: dict[str, str]) -> None:
    """Raises BadInput if two headers state the length: a proxy could parse a different message than the hub."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise BadInput("Content-Length and Transfer-Encoding exclude each other; send only one")


class _Body:
    """The body of a request. Its bytes count against the bound of all bodies, from arrival to close()."""

    def __init__(self, receiver: Receiver, tenant: str):
        self._bodies, self._limit, self._tenant = receiver.bodies, receiver.bounds.max_bytes, tenant
        self.content = b""
        self._n_held = 0

    def __enter__(self) -> "_Body":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def read(self, receive: ReceiveMessage, headers: dict[str, str]) -> None:
        """Read the whole body. Raises TooLarge as early as possible, Overloaded, ConnectionError if it is cut off."""
        length = headers.get("content-length", "")
        error = TooLarge(f"the request exceeds {self._limit:,} bytes; send smaller requests")
        if length.isdigit() and int(length) > self._limit:
            raise error
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            parts.append(message.get("body", b""))
            if self._n_held + len(parts[-1]) > self._limit:
                raise error
            self._bodies.take(self._tenant, len(parts[-1]))
            self._n_held += len(parts[-1])
            if not message.get("more_body", False):
                self.content = b"".join(parts)
                return

    def close(self) -> None:
        """Release the bytes; may be called repeatedly."""
        self.content = b""
        if self._n_held:
            self._bodies.give(self._tenant, self._n_held)
        self._n_held = 0


async def _refuse(
    send: Send, receiver: Receiver, error: Exception, scope: MutableMapping[str, Any], *, is_json: bool
) -> None:
    refusal = receiver.refused(error, peer=scope["client"][0] if scope.get("client") else "")
    http = error.http_status if isinstance(error, NotFound | UnsupportedRequest) else refusal.http
    after = retry_after_header(refusal)
    more = [(b"retry-after", after.encode())] if after else []
    if refusal.http == 401:
        more.append((b"www-authenticate", b"Bearer"))
    if refusal.http in (400, 401, 403, 413):
        more.append((b"connection", b"close"))  # the remaining body, if any, is not read
    await _answer(send, http, status(refusal), is_json=is_json, more=more)


async def _answer(
    send: Send, http: int, message: Any, *, is_json: bool, more: list[tuple[bytes, bytes]] | None = None
) -> None:
    from google.protobuf import json_format

    body = json.dumps(json_format.MessageToDict(message)).encode() if is_json else message.SerializeToString()
    kind = JSON if is_json else PROTOBUF
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        *(more or []),
    ]
    await send({"type": "http.response.start", "status": http, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: ReceiveMessage, send: Send, threads: ThreadPoolExecutor) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            threads.shutdown(wait=False)
            await send({"type": "lifespan.shutdown.complete"})
            return
