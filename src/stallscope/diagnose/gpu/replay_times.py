"""Replays of CUDA graphs for which NCCL reports the times of other kernels: they start when the stream reaches them.

NCCL reads the times of a kernel from a slot whose index is a count of kernels. NCCL 2.27 to 2.30 do not count the
kernels of a graph's replays once another call was captured or enqueued on the communicator. Each operation of the graph
then reads the same slot, which the GPU writes again after 64 kernels: many operations have equal times. But NCCL
starts the events of a replay by a host function in the stream. The time of the event is the time at which the stream
reaches the replay, within about 0.3 ms (two H200, NCCL 2.28.9).

The operations of a group run in one kernel, and have equal times of their own. NCCL starts the events of all of them
before its thread waits for their kernel. So if the thread noticed a start before a call with the same start, the times
are of another kernel.
"""

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import GpuKernelFlag

_NEAR = 16  # operations before and after one that show the state of NCCL's count
_MANY = 0.5  # share of the operations nearby


def with_replay_times(kernels: Array) -> tuple[Array, Array]:
    """The operations, with the times of the calls where NCCL reports the times of other kernels.

    kernels: rows of GPU_KERNELS. Returns a copy, and bool (n,): the rows whose times are on the host's clock instead,
    from the arrival to the arrival of the last rank of the node. Where a round has both kinds of times, and where an
    operation that is not a replay has the times of another kernel, the times are removed.
    """
    is_stale = _has_times_of_others(kernels)
    if not is_stale.any():
        return kernels, is_stale
    kernels = kernels.copy()
    process, n_processes = numbered(kernels["node"], kernels["pid"])
    is_replay = kernels["flags"] & GpuKernelFlag.IS_REPLAY != 0
    are_marked = (np.bincount(process, weights=is_replay, minlength=n_processes) > 0)[process]
    number, n_rounds = numbered(kernels["comm_hash"], kernels["op"], kernels["seq"])
    is_by_call = is_stale & (is_replay | ~are_marked)
    n_members = np.bincount(number, minlength=n_rounds)
    n_by_call = np.bincount(number, weights=is_by_call, minlength=n_rounds)
    is_mixed = (n_by_call > 0) & (n_by_call < n_members)
    without = (is_stale & ~is_by_call) | is_mixed[number]
    kernels["flags"][without] &= ~np.uint8(GpuKernelFlag.HAS_GPU_TIMES)
    is_by_call &= ~without
    kernels["flags"][is_by_call] |= np.uint8(GpuKernelFlag.HAS_GPU_TIMES)
    _add_times_of_calls(kernels, np.flatnonzero(is_by_call))
    return kernels, is_by_call


def _has_times_of_others(kernels: Array) -> Array:
    """Whether most operations near one, of its process, have a start that NCCL noticed before another call with the
    same start: bool (n,).
    """
    out = np.zeros(len(kernels), bool)
    is_known = (kernels["flags"] & GpuKernelFlag.HAS_GPU_TIMES != 0) & (kernels["peer_rank"] == UNKNOWN)
    is_known &= kernels["flags"] & GpuKernelFlag.IS_NETWORK == 0
    rows = np.flatnonzero(is_known & (kernels["seq"] != UNKNOWN))
    if not len(rows):
        return out
    process, n_processes = numbered(kernels["node"][rows], kernels["pid"][rows])
    for each in range(n_processes):
        own = rows[process == each]
        own = own[np.argsort(kernels["ts_ns"][own], kind="stable")]
        _, which = np.unique(kernels["start_ns"][own], return_inverse=True)
        n_starts = int(which.max()) + 1
        noticed_ns, last_ns = np.full(n_starts, np.iinfo(np.int64).max), np.zeros(n_starts, np.int64)
        is_noticed = kernels["noticed_ns"][own] != UNKNOWN
        np.minimum.at(noticed_ns, which[is_noticed], kernels["noticed_ns"][own][is_noticed])
        np.maximum.at(last_ns, which, kernels["ts_ns"][own])
        n_others = np.concatenate([[0], np.cumsum((noticed_ns < last_ns)[which])])
        at = np.arange(len(own))
        begin, end = np.maximum(at - _NEAR, 0), np.minimum(at + _NEAR + 1, len(own))
        out[own] = n_others[end] - n_others[begin] >= _MANY * (end - begin)
    return out


def _add_times_of_calls(kernels: Array, rows: Array) -> None:
    """Start, end and notice of operations by their calls. The operations of a replay are called together, but run one
    after the other: none starts before the last rank has reached the operation before it.
    """
    group, n_groups = numbered(kernels["comm_hash"][rows], kernels["node"][rows])
    for each in range(n_groups):
        own = rows[group == each]
        called_ns = kernels["ts_ns"][own].astype(np.int64)
        number, n_rounds = numbered(kernels["op"][own], kernels["seq"][own])
        last_ns = np.full(n_rounds, np.iinfo(np.int64).min)
        np.maximum.at(last_ns, number, called_ns)
        order = np.argsort(last_ns, kind="stable")
        before_ns = np.full(n_rounds, np.iinfo(np.int64).min)
        before_ns[order[1:]] = last_ns[order[:-1]]
        start_ns = np.maximum(called_ns, before_ns[number])
        kernels["start_ns"][own] = kernels["noticed_ns"][own] = start_ns
        kernels["end_ns"][own] = np.maximum(last_ns[number], start_ns)
