"""The owners of connections that had to retransmit, and the remote end of a connection in words.

The kernel side counts by the number of the socket's file. The owner is the process that has that file open. It is
looked up once, among the traced processes and their descendants. A socket that none of these processes has open is
ignored.
"""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.capture.process.process_identity import open_sockets
from stallscope.events.layout import Array

_FORGET_AFTER_NS = 10 * 10**9
"""A socket number may be reused, and a socket may be passed to another process."""


@dataclass
class SocketOwners:
    """The owner of each open socket. proc: where /proc is mounted."""

    proc: Path = Path("/proc")
    _owners: dict[int, tuple[int, int]] = field(default_factory=dict)

    def owners(self, inodes: Iterable[int], pids: Iterable[int], now_ns: int) -> dict[int, int]:
        """The first process of `pids` that has each socket open; later processes may have inherited it."""
        requested = set(inodes)
        self._owners = {
            inode: (pid, at_ns)
            for inode, (pid, at_ns) in self._owners.items()
            if now_ns - at_ns < _FORGET_AFTER_NS
        }
        if unresolved := requested - self._owners.keys():
            pid_of_inode: dict[int, int] = {}
            for pid in pids:
                for inode in open_sockets(self.proc / str(pid)) & unresolved:
                    pid_of_inode.setdefault(inode, pid)
            self._owners |= {inode: (pid_of_inode.get(inode, 0), now_ns) for inode in unresolved}
        return {inode: pid for inode in requested if (pid := self._owners[inode][0])}


def peer_address(ends: Array) -> str:
    """Address and port of the peer, from one kernel.ENDS; empty for a socket that is not an internet connection."""
    family, port = int(ends["family"]), socket.ntohs(int(ends["peer_port"]))
    address = ends["peer"].tobytes()
    if family == socket.AF_INET:
        return f"{ipaddress.IPv4Address(address[:4])}:{port}"
    if family == socket.AF_INET6:
        peer = ipaddress.IPv6Address(address)
        return f"{peer.ipv4_mapped}:{port}" if peer.ipv4_mapped else f"[{peer}]:{port}"
    return "a Unix socket" if family == socket.AF_UNIX else ""
