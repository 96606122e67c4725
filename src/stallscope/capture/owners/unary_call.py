"""One unary gRPC call over a unix socket, without the gRPC library, which costs the agent 20 MB.

HTTP/2 (RFC 9113) with header fields as literals without an index (RFC 7541, 6.2.2); of the answer, only the data
frames are read. gRPC over HTTP/2: a byte for compression and four bytes of length precede the message.
"""

import socket
import struct
from pathlib import Path

_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK, _PADDED = 1, 4, 1, 8
_WHOLE_WINDOW = (1 << 31) - 1
_SMALLEST_WINDOW = 65_535


def unary_call(path: Path, method: str, message: bytes) -> bytes:
    """The answer of a method. Raises OSError if the server does not answer with a message."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_TIMEOUT_S)
        try:
            line.connect(str(path))
            line.sendall(_request(method, message))
            answer = _answer(line)
        except OSError as error:
            raise OSError(f"{path} does not answer ({error})") from error
    if len(answer) < 5 or answer[0] != 0:
        raise OSError(f"{path} refuses {method}")
    return answer[5 : 5 + int.from_bytes(answer[1:5], "big")]


def fields(message: bytes) -> list[tuple[int, bytes]]:
    """Number and value of the length-delimited fields of a protobuf message; other fields are skipped.

    Raises OSError for a message that is cut off.
    """
    out, at = [], 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 2:
            n_bytes, at = _varint(message, at)
            if at + n_bytes > len(message):
                raise OSError("a protobuf message is cut off")
            out.append((tag >> 3, message[at : at + n_bytes]))
            at += n_bytes
        elif tag & 7 == 0:
            _, at = _varint(message, at)
        else:
            at += 8 if tag & 7 == 1 else 4
    return out


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise OSError("a protobuf message is cut off")


def _request(method: str, message: bytes) -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers.items())
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    settings = struct.pack(">HI", 4, _WHOLE_WINDOW)  # SETTINGS_INITIAL_WINDOW_SIZE
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, settings)
        + _frame(_WINDOW, 0, 0, struct.pack(">I", _WHOLE_WINDOW - _SMALLEST_WINDOW))
        + _frame(_HEADERS, _END_HEADERS, 1, block)
        + _frame(_DATA, _END_STREAM, 1, body)
    )


def _literal(text: str) -> bytes:
    """A string without Huffman coding; shorter than 127 bytes."""
    raw = text.encode()
    return bytes([len(raw)]) + raw


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _answer(line: socket.socket) -> bytes:
    data = b""
    while True:
        head = _exactly(line, 9)
        kind, flags = head[3], head[4]
        payload = _exactly(line, int.from_bytes(head[:3], "big"))
        if kind == _SETTINGS and not flags & _ACK:
            line.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            line.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _DATA:
            data += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
        elif kind in (_RESET, _GO_AWAY):
            raise OSError("the server ended the call")
        if len(data) > _MAX_BYTES:
            raise OSError(f"the answer exceeds {_MAX_BYTES >> 20} MiB")
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return data


def _exactly(line: socket.socket, n_bytes: int) -> bytes:
    out = b""
    while len(out) < n_bytes:
        part = line.recv(n_bytes - len(out))
        if not part:
            raise OSError("the server closed the connection")
        out += part
    return out
