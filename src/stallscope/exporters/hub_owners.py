"""The hub that an agent sends to: the configured hub, or the owner that hubs name for the agent's cluster.

Hubs that share their data name the owner in their answers (docs/decisions/shared-hub.md). The agent follows only to
hosts that its configuration permits, because it sends its token there. After any failure of the owner it returns to
the configured hub, which forwards the rows.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

_FOLLOW_EVERY_S = 5.0
"""While slots move, hubs may name different owners for a moment."""
_AVOID_S = 30.0
_ADDRESS = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
_LOG = logging.getLogger(__name__)


class Connection(Protocol):
    """A connection to one hub."""

    @property
    def address(self) -> str:
        """HOST:PORT."""

    def close(self) -> None:
        """End it; requests in flight fail."""


C = TypeVar("C", bound=Connection)


class HubChoice(Generic[C]):
    """The current hub of an agent. Thread-safe."""

    def __init__(
        self,
        home: C,
        open_to: Callable[[str], C],
        *,
        hosts: Sequence[str],
        clock_s: Callable[[], float],
    ):
        """home: to the configured hub. hosts: permitted hosts in addition to its host, see is_permitted()."""
        self._home, self._open_to, self._clock_s = home, open_to, clock_s
        self._hosts = (host_of(home.address) or "", *hosts)
        self._lock = threading.Lock()
        self._owner: C | None = None
        self._n_in_flight: dict[int, int] = {}
        self._retired: dict[int, C] = {}
        self._avoided_until_s: dict[str, float] = {}
        self._follow_again_s = 0.0
        self._refused = ""

    def take(self) -> C:
        """The connection for a request, until give()."""
        with self._lock:
            chosen = self._owner or self._home
            self._n_in_flight[id(chosen)] = self._n_in_flight.get(id(chosen), 0) + 1
            return chosen

    def give(self, used: C) -> None:
        """The request has ended: a replaced connection is closed after its last request."""
        with self._lock:
            self._n_in_flight[id(used)] -= 1
            retired = None if self._n_in_flight[id(used)] else self._retired.pop(id(used), None)
        if retired:
            retired.close()

    def follow(self, address: str) -> None:
        """Send to this hub from now on, if the configuration permits its host; it is named as the owner."""
        with self._lock:
            now_s = self._clock_s()
            current = self._owner or self._home
            is_recent = now_s < self._follow_again_s or now_s < self._avoided_until_s.get(address, 0.0)
            if address == current.address or is_recent:
                return
            if not is_permitted(address, self._hosts):
                if address != self._refused:
                    self._refused = address
                    _LOG.warning("the hub names %.300r as the owner; hub_hosts does not permit it", address)
                return
            self._follow_again_s = now_s + _FOLLOW_EVERY_S
            gone = self._replaced_by(None if address == self._home.address else self._open_to(address))
        if gone:
            gone.close()

    def has_failed(self, used: C) -> bool:
        """A request failed. Returns whether it was at an owner: the configured hub gets the next requests."""
        with self._lock:
            if used is self._home:
                return False
            now_s = self._clock_s()
            self._avoided_until_s = {a: end_s for a, end_s in self._avoided_until_s.items() if end_s > now_s}
            self._avoided_until_s[used.address] = now_s + _AVOID_S
            gone = self._replaced_by(None) if used is self._owner else None
        if gone:
            gone.close()
        return True

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            every = [self._home, *self._retired.values(), *([self._owner] if self._owner else [])]
            self._retired, self._owner = {}, None
        for each in every:
            each.close()

    def _replaced_by(self, new: C | None) -> C | None:
        """Change the owner's connection. Returns the previous connection if it can be closed at once."""
        gone, self._owner = self._owner, new
        if gone and self._n_in_flight.get(id(gone)):
            self._retired[id(gone)] = gone
            return None
        return gone


def host_of(address: str) -> str | None:
    """The host of HOST:PORT in lower case; None for any other text."""
    match = _ADDRESS.fullmatch(address)
    return match[1].lower() if match and 0 < int(match[2]) < 1 << 16 else None


def is_permitted(address: str, hosts: Sequence[str]) -> bool:
    """Whether the host of an address is one of these: names, addresses, or *.DOMAIN for one label before a domain."""
    host = host_of(address)
    if host is None:
        return False
    _, _, domain = host.partition(".")
    return any(
        host == wanted.lower() or (wanted.startswith("*.") and bool(domain) and domain == wanted[2:].lower())
        for wanted in hosts
        if wanted
    )
