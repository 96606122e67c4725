"""Connections that had to send again, by who owns the socket; and the other end of a connection in words.

The kernel side counts by the number of the socket's file. Its owner is whoever has that file open: looked up once,
among the traced processes and those that descend from them. One that none of these has open is nobody's business.
"""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.capture.process.identity import opened
from stallscope.events.layout import Array

_FORGET_AFTER_NS = 10 * 10**9
"""A number may be given again, and a socket may be handed on."""


@dataclass
class Owners:
    """Who has which socket open. proc: where /proc is mounted."""

    proc: Path = Path("/proc")
    _known: dict[int, tuple[int, int]] = field(default_factory=dict)

    def of(self, inodes: Iterable[int], pids: Iterable[int], now_ns: int) -> dict[int, int]:
        """The process that has each of these open: the first of `pids` that has, as others may have inherited it."""
        wanted = set(inodes)
        self._known = {
            inode: (pid, at_ns)
            for inode, (pid, at_ns) in self._known.items()
            if now_ns - at_ns < _FORGET_AFTER_NS
        }
        if missing := wanted - self._known.keys():
            found: dict[int, int] = {}
            for pid in pids:
                for inode in self._opened(pid) & missing:
                    found.setdefault(inode, pid)
            self._known |= {inode: (found.get(inode, 0), now_ns) for inode in missing}
        return {inode: pid for inode in wanted if (pid := self._known[inode][0])}

    def _opened(self, pid: int) -> set[int]:
        targets = opened(self.proc / str(pid))
        return {int(target[8:-1]) for target in targets if target.startswith("socket:[")}


def other_end(ends: Array) -> str:
    """Address and port of the peer, from one kernel.ENDS; empty for what is no internet connection."""
    family, port = int(ends["family"]), socket.ntohs(int(ends["peer_port"]))
    address = ends["peer"].tobytes()
    if family == socket.AF_INET:
        return f"{ipaddress.IPv4Address(address[:4])}:{port}"
    if family == socket.AF_INET6:
        peer = ipaddress.IPv6Address(address)
        return f"{peer.ipv4_mapped}:{port}" if peer.ipv4_mapped else f"[{peer}]:{port}"
    return "a Unix socket" if family == socket.AF_UNIX else ""
