"""One identity for a communicator that was grown: the id that its new ranks have.

Of the old ranks only one, the root, is given that id; the others know it as the n-th growth of the parent. The
root knows both, and all of them make the communicator at the same time, so on a machine with the root the others
are told by the id as well. On a machine that has only other old ranks they keep the parent's: unknown to the new ones.
So does what comes between two looks at the ring, before the root has been seen to return.
"""

from dataclasses import dataclass, field

from stallscope.events.layout import Array

GROWN_COLOR = -3
"""bpf/nccl.bpf.c."""

_MASK = (1 << 64) - 1
_BASIS = 0xCBF29CE484222325
_OF_GROWS = 2 << 32


@dataclass
class Grown:
    """The identities told so far: by the hash of the parent's growth, that of the id."""

    _id_of: dict[int, int] = field(default_factory=dict)

    def born(self, rows: Array) -> Array:
        """Communicators that were made, kernel.LIFE (n,), in place."""
        is_root = (rows["color"] == GROWN_COLOR) & (rows["parent_hash"] != 0)
        for row in rows[is_root]:
            old = child_hash(int(row["parent_hash"]), _OF_GROWS | int(row["n_splits"]), int(row["nranks"]))
            if old != row["comm_hash"]:
                self._id_of[old] = int(row["comm_hash"])
        return self.told(rows)

    def told(self, rows: Array) -> Array:
        """Whatever has a comm_hash, (n,), in place."""
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
