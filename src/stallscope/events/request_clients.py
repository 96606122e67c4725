"""The column `client` of REQUESTS: the keyed hash of an address, and the number of its key.

Each start of the agent hashes with another random key, so the hashes of two starts cannot be compared. The number of
the key is random too: it distinguishes the starts, and does not reveal the key.
"""

import secrets

from stallscope.events.layout import Array

_HASH_BITS = 32
_NUMBER_BITS = 20
"""A value of at most 52 bits is exact in JSON."""


def new_key_number() -> int:
    return secrets.randbits(_NUMBER_BITS)


def clients(hashes: Array, key_number: int) -> Array:
    """Values of the column: int64 (n,). hashes: (n,), of 32 bits."""
    values: Array = hashes.astype("i8") | key_number << _HASH_BITS
    return values


def key_numbers(clients: Array) -> Array:
    """The number of the key of each client: int64 (n,). clients: values of the column that are not UNKNOWN."""
    numbers: Array = clients >> _HASH_BITS
    return numbers
