"""Messages between the hub and a worker through pipes: a JSON header and binary blobs.

A frame is the length of the header, the number of blobs, the header, and each blob behind its length; lengths are
unsigned 32-bit, big-endian.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

_HEAD = struct.Struct(">II")
_LENGTH = struct.Struct(">I")


def send(pipe: BinaryIO, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one frame."""
    for part in packed(header, blobs):
        pipe.write(part)
    pipe.flush()


def receive(pipe: BinaryIO) -> tuple[dict[str, Any], list[bytes]]:
    """The next frame. Raises EOFError when the other side has closed the pipe."""

    def read(n_bytes: int) -> bytes:
        data = pipe.read(n_bytes)
        if len(data) != n_bytes:
            raise EOFError
        return data

    return _unpacked(read)


def packed(header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> list[bytes]:
    """A frame, as the pieces to write one after the other."""
    text = json.dumps(header, allow_nan=False).encode()
    parts = [_HEAD.pack(len(text), len(blobs)) + text]
    for blob in blobs:
        parts += [_LENGTH.pack(len(blob)), blob]
    return parts


def unpacked(read: Callable[[int], bytes]) -> dict[str, Any]:
    """The header of the next frame. read: returns exactly the requested number of bytes."""
    return _unpacked(read)[0]


def _unpacked(read: Callable[[int], bytes]) -> tuple[dict[str, Any], list[bytes]]:
    length, n_blobs = _HEAD.unpack(read(_HEAD.size))
    header = json.loads(read(length))
    blobs = [read(_LENGTH.unpack(read(_LENGTH.size))[0]) for _ in range(n_blobs)]
    return header, blobs
