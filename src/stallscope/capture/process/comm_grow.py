"""Gives a grown communicator a single identity on all ranks: the id that its new ranks receive.

Among the old ranks only the root receives that id; the other old ranks know the communicator as the n-th growth of the
parent. The root knows both identities, and all ranks create the communicator at the same time. So on the root's machine
the other old ranks also get the id. A machine that has only other old ranks keeps the identity by parent, which the new
ranks do not know. The same applies to calls between two readings of the ring, before the return of the root's call is
processed.
"""

from dataclasses import dataclass, field

from stallscope.events.layout import Array

GROWN_COLOR = -3
"""bpf/nccl.bpf.c."""

_MASK = (1 << 64) - 1
_BASIS = 0xCBF29CE484222325
_OF_GROWS = 2 << 32


@dataclass
class GrownCommunicators:
    """The identities known so far: the hash of the id by the hash of the parent's growth."""

    _id_of: dict[int, int] = field(default_factory=dict)

    def rename_created(self, rows: Array) -> Array:
        """Replace the hashes of new communicators, kernel.LIFE (n,), in place."""
        is_root = (rows["color"] == GROWN_COLOR) & (rows["parent_hash"] != 0)
        for row in rows[is_root]:
            old = child_hash(int(row["parent_hash"]), _OF_GROWS | int(row["n_splits"]), int(row["nranks"]))
            if old != row["comm_hash"]:
                self._id_of[old] = int(row["comm_hash"])
        return self.replace_hashes(rows)

    def replace_hashes(self, rows: Array) -> Array:
        """Replace the hashes of any rows with a comm_hash, (n,), in place."""
        for old, new in self._id_of.items():
            rows["comm_hash"][rows["comm_hash"] == old] = new
        return rows


def child_hash(parent_hash: int, n: int, what: int) -> int:
    """The same as in bpf/nccl.bpf.c."""
    value = _BASIS
    for word in (parent_hash, n, what):
        value = (value ^ word) * 0x100000001B3 & _MASK
        value ^= value >> 29
    return value or 1
