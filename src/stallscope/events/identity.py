"""The identity of a communicator across ranks: one 64-bit hash. bpf/arrival.h computes the same."""

_MASK = (1 << 64) - 1
_FNV_PRIME = 1099511628211  # FNV-1a, 64 bits, taken word by word


def mixed(hash_: int, word: int) -> int:
    """The hash after one more 64-bit word; the shift spreads high bits, as FNV-1a by words does not."""
    hash_ = ((hash_ ^ (word & _MASK)) * _FNV_PRIME) & _MASK
    return hash_ ^ (hash_ >> 29)


def split_hash(parent_hash: int, n_splits: int, colour: int) -> int:
    """comm_hash of a communicator split off; n_splits: earlier splits of the same parent on this rank."""
    return mixed(mixed(parent_hash, n_splits), colour & 0xFFFFFFFF)
