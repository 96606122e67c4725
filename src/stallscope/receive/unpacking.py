"""Decompresses bodies with a limit on the output size, so that a decompression bomb is refused early."""

from typing import TYPE_CHECKING

from isal import isal_zlib

from stallscope.errors import BadInput, TooLarge

_GZIP_OR_ZLIB = 32 + isal_zlib.MAX_WBITS
_NotSo: type[Exception] = isal_zlib.error  # type: ignore[assignment]  # the stubs declare the class as an instance
_CHUNK = 1 << 20
_SLICE = 1 << 16
_MAX_MEMBERS = 1_000
"""Of a gzip body: each of them costs as much as some KB of input."""


if TYPE_CHECKING:
    import pyarrow as pa


def unpacked(body: bytes | memoryview, encoding: str, *, limit: int) -> bytes:
    """The decompressed body. encoding: "" or identity, gzip, deflate, zstd.

    Raises TooLarge for more than limit bytes of output, BadInput for bytes that are not in this encoding.
    """
    if encoding in ("", "identity"):
        out = bytes(body)
    elif encoding in ("gzip", "x-gzip", "deflate"):
        out = _inflated(body, limit)
    elif encoding == "zstd":
        out = _from_zstd(body, limit)
    else:
        raise BadInput(f"unknown encoding {encoding!r}; send gzip, deflate, zstd or none")
    if len(out) > limit:
        raise TooLarge(f"the request exceeds {limit:,} bytes; send smaller requests")
    return out


def inflated_to(body: memoryview, n_bytes: int) -> "pa.Buffer | None":
    """The output of gzip if it has exactly n_bytes; None if not, or if there are several gzip members.

    The output goes to reused memory. The decompressor would assemble its own output in new pages each time, and the
    kernel needs half the decompression time to provide them.
    """
    import pyarrow as pa

    out = pa.allocate_buffer(n_bytes)
    unpacker, room, at = isal_zlib.decompressobj(_GZIP_OR_ZLIB), memoryview(out).cast("B"), 0
    try:
        for begin in range(0, len(body), _SLICE):
            part = unpacker.decompress(body[begin : begin + _SLICE], n_bytes - at + 1)
            if unpacker.unused_data or at + len(part) > n_bytes:
                return None
            room[at : at + len(part)] = part
            at += len(part)
            if unpacker.eof and begin + _SLICE < len(body):
                return None
    except _NotSo:
        return None
    return out if unpacker.eof and at == n_bytes else None


def _inflated(body: bytes | memoryview, limit: int) -> bytes:
    """The content of gzip members, which may follow each other, or of one zlib stream.

    The input is given in slices: a member's end returns a copy of the remaining input.
    """
    view, out, at, n_members, is_ended = memoryview(body), bytearray(), 0, 0, True
    unpacker = isal_zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        while at < len(view) and len(out) <= limit:
            if is_ended:
                n_members += 1
                unpacker = isal_zlib.decompressobj(_GZIP_OR_ZLIB)
            if n_members > _MAX_MEMBERS:
                raise BadInput(f"the gzip body has more than {_MAX_MEMBERS:,} members; compress it as one")
            part = view[at : at + _SLICE]
            out += unpacker.decompress(part, limit + 1 - len(out))
            is_ended = unpacker.eof
            at += len(part) - (len(unpacker.unused_data) if is_ended else 0)
    except _NotSo as error:
        raise BadInput(f"the body is not valid gzip ({error})") from error
    if len(out) <= limit and not (is_ended and n_members):
        raise BadInput("the gzip body is truncated")
    return bytes(out)


def _from_zstd(body: bytes | memoryview, limit: int) -> bytes:
    import pyarrow as pa

    parts, n_bytes = [], 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            while n_bytes <= limit and (part := stream.read(_CHUNK)):
                parts.append(part)
                n_bytes += len(part)
    except (pa.ArrowException, OSError) as error:
        raise BadInput("the body is not valid zstd") from error
    return b"".join(parts)
