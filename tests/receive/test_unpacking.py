"""Compressed bodies: what comes out is bounded, and known to be all there."""

import gzip
import random
import zlib

import pytest

from stallscope.errors import BadInput, TooLarge
from stallscope.receive import arrow
from stallscope.receive.unpacking import inflated_to, unpacked

PLAIN = b"".join(b"%d," % (i * i) for i in range(60_000))
PACKED = memoryview(gzip.compress(PLAIN, 1))


def test_a_body_with_the_announced_size_is_decompressed():
    assert len(PACKED) > 2 << 16, "more than is unpacked at a time"
    inflated = inflated_to(PACKED, len(PLAIN))
    assert inflated is not None and inflated.to_pybytes() == PLAIN
    assert inflated_to(memoryview(gzip.compress(b"")), 0) is not None


@pytest.mark.parametrize(
    ("packed", "n_told"),
    [
        (PACKED, len(PLAIN) - 1),
        (PACKED, len(PLAIN) + 1),
        (PACKED, 0),
        (PACKED[:-1], len(PLAIN)),
        (PACKED[:70_000], len(PLAIN)),
        (memoryview(bytes(PACKED) + b"x"), len(PLAIN)),
        (memoryview(gzip.compress(PLAIN) * 2), 2 * len(PLAIN)),
        (memoryview(gzip.compress(PLAIN) * 2), len(PLAIN)),
        (memoryview(b"hello, world"), 12),
        (memoryview(b""), 0),
        (memoryview(gzip.compress(bytes(1 << 24))), 1 << 10),
    ],
)
def test_a_body_with_another_size_or_format_returns_none(packed, n_told):
    assert inflated_to(packed, n_told) is None


def request(body: bytes, *, n_bytes: int) -> bytes:
    """A request to the Arrow endpoint that announces this many bytes."""
    head = b'{"compression": "gzip", "tables": [{"name": "calls", "n_bytes": %d}]}\n' % n_bytes
    return head + body


def test_invalid_compressed_requests_raise_specific_errors():
    bomb = gzip.compress(bytes(1 << 22))
    with pytest.raises(TooLarge):
        arrow.read(request(bomb, n_bytes=1 << 22), limit=1 << 20)
    with pytest.raises(TooLarge):
        arrow.read(request(bomb, n_bytes=10), limit=1 << 20)
    with pytest.raises(BadInput, match="announces 10 bytes, but the body has 4,194,304"):
        arrow.read(request(bomb, n_bytes=10), limit=1 << 23)
    with pytest.raises(BadInput, match="not valid gzip"):
        arrow.read(request(b"hello", n_bytes=10), limit=1 << 20)
    with pytest.raises(BadInput, match="not a valid Arrow stream"):
        arrow.read(request(gzip.compress(b"x" * 10), n_bytes=10), limit=1 << 20)


def test_members_of_gzip_and_plain_zlib_are_unpacked():
    assert unpacked(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", limit=9) == b"ab"
    assert unpacked(zlib.compress(b"ab"), "deflate", limit=9) == b"ab"


def test_very_many_members_of_gzip_are_refused_and_members_may_cross_slices():
    """Each member's end copies the remaining input: 32 MB of empty members would take minutes."""
    with pytest.raises(BadInput, match="members"):
        unpacked(gzip.compress(b"") * 100_000, "gzip", limit=1 << 20)
    parts = [random.Random(number).randbytes(50_000) for number in range(5)]
    assert unpacked(b"".join(map(gzip.compress, parts)), "gzip", limit=1 << 20) == b"".join(parts)
    for cut in (b"", gzip.compress(b"ab")[:-1], gzip.compress(b"ab") + gzip.compress(b"cd")[:9]):
        with pytest.raises(BadInput, match="truncated"):
            unpacked(cut, "gzip", limit=9)
