"""HTTP/2 frames as bytes, for attacks that no client library sends (RFC 9113, RFC 7541)."""

import socket
import struct
from contextlib import ExitStack, suppress

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 2, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
CANCEL = struct.pack(">I", 8)
NO_WINDOW = struct.pack(">HI", 4, 0)
"""A setting: the receiver of an answer grants no bytes."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def field(name: str, value: str) -> bytes:
    """A header field without indexing and without Huffman coding."""
    return b"\0" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    rest, length = len(raw) - 127, bytearray([127])
    while rest >= 128:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes(length) + bytes([rest]) + raw


def call_headers(path: str, token: str = "") -> bytes:
    """The header fields of a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "hub",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token:
        fields["authorization"] = f"Bearer {token}"
    return b"".join(field(name, value) for name, value in fields.items())


def message(body: bytes) -> bytes:
    """A message of a gRPC call."""
    return b"\0" + struct.pack(">I", len(body)) + body


def connection(address: tuple[str, int], stack: ExitStack, settings: bytes = b"") -> socket.socket:
    """An open connection, until the end of the stack."""
    opened = stack.enter_context(socket.create_connection(address, timeout=10))
    opened.sendall(_PREFACE + frame(SETTINGS, payload=settings))
    return opened


def sent(opened: socket.socket, content: bytes) -> None:
    """Send bytes; the hub may end the connection, or stop reading it."""
    opened.settimeout(1.0)
    with suppress(OSError):
        opened.sendall(content)
