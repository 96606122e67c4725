"""The OTLP/HTTP port as an ASGI application: /v1/logs, /v1/metrics, /v1/traces; protobuf and JSON; gzip, deflate, zstd.

The sender is known before the body is read, and the body is read up to the limit only. Decoding runs in threads; the
wait for the commit holds none.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stallscope.errors import BadInput, NotFound, Overloaded, TooLarge
from stallscope.receive.error_status import retry_after_header, status
from stallscope.receive.otlp import SIGNALS
from stallscope.receive.receiver import Accepted, Receiver, Sender
from stallscope.receive.unpacking import unpacked

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_PATHS = {f"/v1/{signal}": signal for signal in SIGNALS}
_BODY_S = 30.0

Message = MutableMapping[str, Any]
ReceiveMessage = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], ReceiveMessage, Send], Awaitable[None]]


class Unsupported(BadInput):
    """A content type or method that OTLP/HTTP does not have."""

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
            sender = await loop.run_in_executor(threads, receiver.sender, headers)
            body = await asyncio.wait_for(_body(receive, headers, receiver.bounds.max_bytes), _BODY_S)
            encoding = headers.get("content-encoding", "").strip().lower()
            take = _taking(receiver, sender, signal, body, encoding, is_json)
            accepted = await loop.run_in_executor(threads, take)
            receipt = await asyncio.wait_for(
                asyncio.wrap_future(accepted.future), receiver.bounds.max_waiting_s
            )
            await _answer(send, 200, accepted.answer(receipt), is_json=is_json)
        except ConnectionError:
            return  # the sender has gone: nobody waits for an answer
        except TimeoutError:
            late = Overloaded("the request was not read and stored in time; send it again later", 2.0)
            await _refuse(send, receiver, late, is_json=is_json)
        except Exception as error:  # noqa: BLE001 (the border: a sender gets a status, never a traceback)
            await _refuse(send, receiver, error, is_json=is_json)

    return otlp_http


def _taking(
    receiver: Receiver, sender: Sender, signal: str, body: bytes, encoding: str, is_json: bool
) -> Callable[[], Accepted]:
    def take() -> Accepted:
        plain = unpacked(body, encoding, limit=receiver.bounds.max_bytes)
        return receiver.otlp(signal, plain, sender.tenant, is_json=is_json)

    return take


def _signal(scope: MutableMapping[str, Any], kind: str) -> str:
    signal = _PATHS.get(scope["path"])
    if signal is None:
        raise NotFound(f"there is nothing at {scope['path'][:100]}: this port takes {', '.join(_PATHS)}")
    if scope["method"] != "POST":
        raise Unsupported(f"{scope['path']} takes POST only")
    if kind not in (PROTOBUF, JSON):
        raise Unsupported(f"content-type {kind[:50]!r}: send {PROTOBUF} or {JSON}")
    return signal


async def _body(receive: ReceiveMessage, headers: dict[str, str], limit: int) -> bytes:
    """The whole body. Raises TooLarge as soon as that is known, ConnectionError when the sender goes away."""
    told = headers.get("content-length", "")
    error = TooLarge(f"a request may hold {limit:,} bytes: send smaller ones")
    if told.isdigit() and int(told) > limit:
        raise error
    parts, n_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        parts.append(message.get("body", b""))
        n_bytes += len(parts[-1])
        if n_bytes > limit:
            raise error
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(send: Send, receiver: Receiver, error: Exception, *, is_json: bool) -> None:
    told = receiver.refused(error)
    http = error.http_status if isinstance(error, NotFound | Unsupported) else told.http
    after = retry_after_header(told)
    more = [(b"retry-after", after.encode())] if after else []
    if told.http == 401:
        more.append((b"www-authenticate", b"Bearer"))
    await _answer(send, http, status(told), is_json=is_json, more=more)


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
