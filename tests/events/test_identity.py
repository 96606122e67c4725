"""One hash, which every rank computes in the same way, distinguishes communicators."""

from hypothesis import given
from hypothesis import strategies as st

from stallscope.events.identity import mixed, split_hash

OFFSET, PRIME, SIZE = 0x14650FB0739D0383, 0x100000001B3, 1 << 64


def by_hand(words: list[int], start: int = OFFSET) -> int:
    """FNV-1a over 64-bit words, with a shift after each."""
    for word in words:
        start = (start ^ word) * PRIME % SIZE
        start ^= start >> 29
    return start


def test_a_split_is_named_by_parent_count_and_colour():
    parent = by_hand(list(range(16)))
    assert split_hash(parent, 2, 5) == by_hand([2, 5], start=parent)
    made = {split_hash(parent, n, colour) for n in range(4) for colour in range(8)}
    assert len(made) == 32
    assert parent not in made


def test_a_negative_colour_is_taken_as_the_library_passes_it():
    assert split_hash(7, 0, -1) == split_hash(7, 0, 0xFFFFFFFF)


@given(st.integers(0, SIZE - 1), st.integers(-SIZE, SIZE))
def test_hashes_have_64_bits(start, word):
    assert 0 <= mixed(start, word) < SIZE
