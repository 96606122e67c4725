"""Rounds of which only every k-th is known: a busy hub samples a job, and changes k with the load.

Steps are found by their calls. Where k changes, a step with as many known calls covers another number of rounds, so
that two delays can fall into one step. Every k-th round of a finer sample is a coarser sample.
"""

import numpy as np

from stallscope.events.layout import UNKNOWN, Array, process_keys

_RUN = 8  # equal distances between rounds in a row that are a sample, and not lost records


def steady_strides(comm: Array, seq: Array) -> tuple[Array, Array]:
    """The distances between rounds that many rounds in a row have: communicators and distances, int64 (m,), unique.

    comm, seq: int64 (n,), the rounds in order of communicator and seq.
    """
    stride = np.diff(seq)
    is_steady = (stride[_RUN - 1 :] == stride[: 1 - _RUN]) & (comm[_RUN:] == comm[:-_RUN])
    for offset in range(1, _RUN - 1):
        is_steady &= stride[offset : offset + len(is_steady)] == stride[: len(is_steady)]
    known = np.unique(np.stack([comm[:-_RUN][is_steady], stride[: len(is_steady)][is_steady]]), axis=1)
    return known[0], known[1]


def in_common_sample(rows: Array) -> Array | None:
    """The rows of every k-th round, for the largest k of a window with several: bool (n,); None if k is the same.

    rows: COLLECTIVES sorted by node, pid, time. All communicators of a job have the same k at a time, so the process
    with most rows shows it.
    """
    keys = process_keys(rows)
    begins = (
        np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(rows) else np.zeros(0, int)
    )
    if not len(begins):
        return None
    sizes = np.diff(begins, append=len(rows))
    begin = int(begins[sizes.argmax()])
    largest = rows[begin : begin + int(sizes.max())]
    seq, (_, comm) = largest["seq"].astype(np.int64), np.unique(largest["comm_hash"], return_inverse=True)
    order = np.argsort(comm, kind="stable")
    comm, seq = comm[order], seq[order]
    of, strides = steady_strides(comm, seq)
    several = np.flatnonzero(np.bincount(of) > 1) if len(of) else of
    k = max((int(stride) for stride in strides[np.isin(of, several)]), default=1)
    if k < 2 or k & (k - 1):
        return None
    coarse = np.flatnonzero(np.diff(seq) == k)
    if (seq[coarse] % k).any():  # rounds that are not recorded for another reason
        return None
    is_common: Array = (rows["seq"] % k == 0) | (rows["seq"] == UNKNOWN)
    return is_common
