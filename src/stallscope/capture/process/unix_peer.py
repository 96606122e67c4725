"""The other end of a Unix socket, by the kernel's socket monitoring interface (sock_diag(7)).

Sockets of other network namespaces are unknown.
"""

import socket
import struct

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_SHOW_PEER, _PEER = 4, 2
_ANY_COOKIE, _ANY_STATE = 0xFFFFFFFF, 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBHIIIII")  # struct unix_diag_req
_ANSWER_BYTES = 16  # struct unix_diag_msg
_MAX_BYTES = 8192


def unix_peer(inode: int) -> int | None:
    """The number of the socket that a Unix socket is connected to; None if it is unknown or not connected."""
    asked = _ASKED.pack(socket.AF_UNIX, 0, 0, _ANY_STATE, inode, _SHOW_PEER, _ANY_COOKIE, _ANY_COOKIE)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as diagnosis:
            diagnosis.setblocking(False)
            diagnosis.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, 0, 0) + asked)
            answer = diagnosis.recv(_MAX_BYTES)
    except OSError:
        return None
    return _peer_of(answer)


def _peer_of(answer: bytes) -> int | None:
    """The attribute UNIX_DIAG_PEER of an answer."""
    kind = _HEADER.unpack_from(answer)[1] if len(answer) >= _HEADER.size else 0
    at = _HEADER.size + _ANSWER_BYTES
    while kind == _BY_FAMILY and at + 8 <= len(answer):
        n_bytes, attribute = struct.unpack_from("=HH", answer, at)
        if attribute == _PEER:
            return int(struct.unpack_from("=I", answer, at + 4)[0]) or None
        at += max((n_bytes + 3) & ~3, 4)
    return None
