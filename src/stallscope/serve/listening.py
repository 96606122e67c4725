"""An ASGI application on a port, in a thread of its own, that slow and idle clients cannot fill.

A client that takes longer than READ_S to send a request is cut off, and beyond MAX_CONNECTIONS those that have
sent nothing for longest are: uvicorn alone would keep both for ever. Requests in work are left alone.
"""

import ipaddress
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

from stallscope.errors import BadInput, StorageFailed

if TYPE_CHECKING:
    from starlette.types import ASGIApp

READ_S = 30.0
MAX_CONNECTIONS = 2000
_LOOK_EVERY_S = 1
_STOP_S = 5


def address(text: str, option: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8081", "[::1]:8081", ":8081" (every address). Raises BadInput."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not colon
        or not port.isascii()
        or not port.isdigit()
        or int(port) > 65535
        or (":" in host) != ("[" in text)
    ):
        raise BadInput(f"{option}: {text!r} is no address: give ADDR:PORT, for example 0.0.0.0:8081 or :8081")
    return host, int(port)


def bound(text: str, option: str) -> socket.socket:
    """A listening socket at "ADDR:PORT". Raises BadInput when it is no address, or not to be had."""
    listener = _bound(text, option)
    # Connections inherit it. asyncio sets it only where the socket names its protocol; without it the second
    # part of an answer waits 40 ms for the acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _bound(text: str, option: str) -> socket.socket:
    host, port = address(text, option)
    try:
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise BadInput(
            f"{option}: cannot listen at {text} ({error.strerror}): choose another address"
        ) from error


def is_loopback(host: str) -> bool:
    """Can only programs of this machine reach it?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Listening:
    """A running server; stop() ends it."""

    def __init__(self, app: "ASGIApp", listener: socket.socket, *, context: ssl.SSLContext | None, name: str):
        """Serve `app` on an open socket from now on. context: TLS; None without. Raises StorageFailed."""
        import uvicorn

        self.port = int(listener.getsockname()[1])
        self._listener = listener
        config = uvicorn.Config(
            app,
            ssl_context_factory=(lambda config, default: context) if context else None,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=_STOP_S,
            callback_notify=self._look,
            timeout_notify=_LOOK_EVERY_S,
        )
        self._server = uvicorn.Server(config)
        self._since_s: dict[Any, tuple[tuple[int, bool], float]] = {}
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name=name, daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise StorageFailed(f"{name}: the server did not start")
            time.sleep(0.005)

    def stop(self) -> None:
        """Take no more connections, answer what has been asked, end."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    async def _look(self) -> None:
        """Cut off who reads or says nothing; called once a second in the server's loop."""
        now_s = time.monotonic()
        connections = self._server.server_state.connections
        self._since_s = {c: s for c, s in self._since_s.items() if c in connections}
        for connection in connections:
            cycle = getattr(connection, "cycle", None)
            is_reading = cycle is None or cycle.response_complete or cycle.more_body
            state = (id(cycle), is_reading)
            if connection not in self._since_s or self._since_s[connection][0] != state:
                self._since_s[connection] = (state, now_s)
        reading = sorted((since, id(c), c) for c, ((_, is_r), since) in self._since_s.items() if is_r)
        n_over = len(connections) - MAX_CONNECTIONS
        for number, (since_s, _, connection) in enumerate(reading):
            if number < n_over or now_s - since_s > READ_S:
                connection.transport.abort()
