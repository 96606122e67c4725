"""Serves an ASGI application on a port in a separate thread; slow and idle clients cannot exhaust it.

A client that takes longer than READ_S to send a request is disconnected. Beyond MAX_CONNECTIONS new connections are
closed at once; before that, the longest silent connections are closed. uvicorn alone would keep all of them, and
asyncio needs 256 KB per TLS connection. Requests in progress are not interrupted.
"""

import asyncio
import ipaddress
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stallscope.errors import BadInput, StorageFailed

if TYPE_CHECKING:
    from starlette.types import ASGIApp

READ_S = 30.0
HANDSHAKE_S = 5.0
MAX_CONNECTIONS = 1000
_ROOM = 0.75
"""Beyond this number idle connections are closed, so that new connections find room."""

_NOTIFY_EVERY_S = 1
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
        raise BadInput(
            f"{option}: {text!r} is not an address; use ADDR:PORT, for example 0.0.0.0:8081 or :8081"
        )
    return host, int(port)


def bound(text: str, option: str) -> socket.socket:
    """A listening socket at "ADDR:PORT". Raises BadInput when the address is malformed or unavailable."""
    listener = _bound(text, option)
    # Connections inherit the option. asyncio sets it only if the socket names its protocol; without it the second
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
            f"{option}: cannot listen at {text} ({error.strerror}); choose another address"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Gate:
    """A listening socket for asyncio with a limit on connections; excess connections are closed at once."""

    def __init__(self, listener: socket.socket, *, make_room: Callable[[], None]):
        """make_room: called in the server's loop when the number of connections is high."""
        self._listener, self._make_room = listener, make_room
        self._since_s: weakref.WeakKeyDictionary[socket.socket, float] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def accept(self) -> tuple[socket.socket, Any]:
        """As socket.accept(). Raises ConnectionAbortedError, which asyncio treats as a client that disconnected."""
        connection, peer = self._listener.accept()
        if len(self._since_s) >= _ROOM * MAX_CONNECTIONS:
            n_open = len(self._still_open())
            if n_open >= _ROOM * MAX_CONNECTIONS:
                self._make_room()
            if n_open >= MAX_CONNECTIONS:
                connection.close()
                raise ConnectionAbortedError
        self._since_s[connection] = time.monotonic()
        return connection, peer

    def cut_silent(self, met: set[int]) -> None:
        """Close connections that have not finished their handshake in time. met: file numbers of those that have."""
        limit_s = time.monotonic() - HANDSHAKE_S
        for connection, since_s in self._still_open().items():
            if since_s < limit_s and connection.fileno() not in met:
                with suppress(OSError):  # it closed by itself
                    connection.shutdown(socket.SHUT_RDWR)

    def _still_open(self) -> "weakref.WeakKeyDictionary[socket.socket, float]":
        for closed in [connection for connection in self._since_s if connection.fileno() < 0]:
            del self._since_s[closed]
        return self._since_s


class RunningServer:
    """A running server; stop() ends it."""

    def __init__(self, app: "ASGIApp", listener: socket.socket, *, context: ssl.SSLContext | None, name: str):
        """Serve `app` on a listening socket. context: TLS; None without. Raises StorageFailed."""
        import uvicorn

        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._gate = _Gate(listener, make_room=self._cut_off_soon)
        self._is_cut_due = False
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
            callback_notify=self._notified,
            timeout_notify=_NOTIFY_EVERY_S,
        )
        self._server = uvicorn.Server(config)
        self._since_s: dict[Any, tuple[tuple[int, bool], float]] = {}
        self._thread = threading.Thread(target=self._server.run, args=([self._gate],), name=name, daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise StorageFailed(f"{name}: the server did not start")
            time.sleep(0.005)

    def stop(self) -> None:
        """Accept no more connections, answer the pending requests, then end."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    async def _notified(self) -> None:
        """Runs once a second in the server's loop."""
        self._cut_off()

    def _cut_off_soon(self) -> None:
        """Cut off idle clients now: until the next regular check, new connections would be refused in their favor."""
        if not self._is_cut_due:
            self._is_cut_due = True
            asyncio.get_running_loop().call_soon(self._cut_off)

    def _cut_off(self) -> None:
        """Disconnect clients that have been silent for too long, and beyond the limit the longest silent clients."""
        self._is_cut_due = False
        now_s = time.monotonic()
        connections = self._server.server_state.connections
        # A connection that was just lost no longer has a socket.
        sockets = (c.transport.get_extra_info("socket") for c in connections)
        self._gate.cut_silent({open_socket.fileno() for open_socket in sockets if open_socket is not None})
        self._since_s = {c: s for c, s in self._since_s.items() if c in connections}
        for connection in connections:
            cycle = getattr(connection, "cycle", None)
            is_reading = cycle is None or cycle.response_complete or cycle.more_body
            state = (id(cycle), is_reading)
            if connection not in self._since_s or self._since_s[connection][0] != state:
                self._since_s[connection] = (state, now_s)
        reading = sorted((since, id(c), c) for c, ((_, is_r), since) in self._since_s.items() if is_r)
        n_over = len(connections) - int(_ROOM * MAX_CONNECTIONS)
        for number, (since_s, _, connection) in enumerate(reading):
            if number < n_over or now_s - since_s > READ_S:
                connection.transport.abort()
