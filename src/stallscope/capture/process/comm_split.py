"""Rank and size in a communicator that was split off, from the arguments of all ranks of the parent.

NCCL orders the ranks of one colour by key, then by rank in the parent. So the ranks are known once every rank of the
parent has passed its colour and key. On one node that requires the whole parent to be on that node; otherwise the ranks
stay unknown. A split waits for all ranks, so its records come within moments of each other.
"""

from dataclasses import dataclass, field

import numpy as np

from stallscope.capture.process.comm_grow import GrownCommunicators
from stallscope.events import kernel
from stallscope.events.layout import Array


@dataclass
class Splits:
    """The splits known so far. n_patience: number of batches for which an incomplete split is held back."""

    n_patience: int = 3
    grown: GrownCommunicators = field(default_factory=GrownCommunicators)
    _incomplete: Array = field(default_factory=lambda: np.zeros(0, kernel.LIFE))
    _n_batches_held: int = 0
    _rank_and_size: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def resolve(self, born: Array) -> Array:
        """Assign ranks in complete communicators. Returns the communicators to report: kernel.LIFE (n,).

        born: communicators of this batch. Communicators of an incomplete split come with a later batch.
        """
        if not len(born) and not len(self._incomplete):
            return born
        rows = np.concatenate([self._incomplete, self.grown.rename_created(born)])
        is_incomplete = (rows["comm_rank"] < 0) & (rows["parent_hash"] != 0) & (rows["color"] >= -1)
        for parent, n_splits in np.unique(rows[is_incomplete][["parent_hash", "n_splits"]]).tolist():
            siblings = np.flatnonzero((rows["parent_hash"] == parent) & (rows["n_splits"] == n_splits))
            if len(siblings) == rows["parent_nranks"][siblings[0]]:
                self._assign_ranks(rows, siblings)
                is_incomplete[siblings] = False
        self._n_batches_held = self._n_batches_held + 1 if is_incomplete.any() else 0
        if self._n_batches_held > self.n_patience:
            is_incomplete[:] = False
            self._n_batches_held = 0
        complete: Array = rows[~is_incomplete]
        self._incomplete = rows[is_incomplete]
        return complete

    def fill_ranks(self, collectives: Array) -> Array:
        """Fill in the rank and size of split communicators in rows of COLLECTIVES, in place."""
        self.grown.replace_hashes(collectives)
        unknown = np.flatnonzero((collectives["comm_rank"] < 0) & (collectives["comm_hash"] != 0))
        if not len(unknown) or not self._rank_and_size:
            return collectives
        members, index = np.unique(collectives[unknown][["pid", "comm_hash"]], return_inverse=True)
        ranks = np.array([self._rank_and_size.get(member, (-1, -1)) for member in members.tolist()], np.int32)
        collectives["comm_rank"][unknown] = ranks[index, 0]
        collectives["nranks"][unknown] = ranks[index, 1]
        return collectives

    def _assign_ranks(self, rows: Array, siblings: Array) -> None:
        """Assign ranks to the communicators that one parent was split into."""
        for comm_hash in np.unique(rows["comm_hash"][siblings]).tolist():
            members = siblings[rows["comm_hash"][siblings] == comm_hash]
            order = members[np.lexsort((rows["parent_rank"][members], rows["key"][members]))]
            rows["comm_rank"][order] = np.arange(len(order))
            rows["nranks"][members] = len(members)
            for rank, pid in enumerate(rows["pid"][order].tolist()):
                self._rank_and_size[pid, comm_hash] = (rank, len(members))
