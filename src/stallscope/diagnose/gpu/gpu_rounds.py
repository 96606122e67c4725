"""The rounds of a job on its GPUs, from the operations that NCCL's profiler plugin recorded.

A collective arrives when its kernel starts on the GPU. Rounds have NCCL's own numbers, so they need no host arrivals,
also where a CUDA graph replays them (if the job set STALLSCOPE_NCCL_GRAPHS before the capture: otherwise NCCL does not
count replays, and rounds with a repeated number are dropped). Only rounds that all recorded members share are kept:
windows of the plugin begin and end at other calls on each rank.

The GPU's clock is converted to the host's. NCCL's thread notices the start of a kernel microseconds after it, so the
least difference of the two in some seconds is the offset of the clocks, and follows their drift. The kernels of a
round end together, which aligns the GPUs of a node more closely. Between two operations, a GPU waits for its host until
the host enqueues the next operation (other_off); after that the GPU does its own work (device). During an operation it
waits for other GPUs (wait_gpu).

NCCL 2.27 to 2.30 do not count the kernels of a graph's replays if another call was captured or enqueued since
(SaveProxyProfiler in proxy.cc). From then on, each operation has the times of the kernel some operations before it, by
the same number on all ranks. Rounds stay comparable, but the host's call belongs to another kernel: a kernel that
"started" before its host's call shows this, and then the time before a kernel counts as the GPU's own work. Replays
then have the times of other kernels: they start when the stream reaches them (see replay_times).
"""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians, numbered
from stallscope.diagnose.gpu.replay_times import with_replay_times
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import SYNCHRONISING_OPS, Category, CollectiveFlag, GpuKernelFlag, Op
from stallscope.events.trace import Trace

_BLOCK_NS = 5_000_000_000  # GPU clocks drift by microseconds in this time
_PAUSE_NS = 1_000_000_000  # a longer time without operations is a pause between two windows ...
_TYPICAL_PAUSES = 20  # ... if it is also this many times the typical time between operations
_MAX_EARLY_NS = 100_000  # the clocks are aligned within microseconds
_MAX_EARLY = 0.05  # share of the operations
_HASH_OF_OP = 0x9E3779B97F4A7C15
_ALL_BITS = (1 << 64) - 1


def gpu_trace(trace: Trace) -> Trace:
    """The trace of the GPUs: its collectives arrive when their kernels start; without calls and states of hosts."""
    rows = gpu_arrivals(trace.gpu_kernels)
    nothing = {
        name: getattr(trace, name)[:0]
        for name in ("calls", "offcpu", "snapshots", "spans", "host_events", "positions", "operations")
    }
    return replace(
        trace,
        collectives=rows,
        communicators=_communicators(rows),
        processes=_with_ranks(trace.processes, rows),
        **nothing,
    )


def gpu_arrivals(kernels: Array) -> Array:
    """Rows of COLLECTIVES by time, one for each collective with GPU times in a round that all members recorded.

    kernels: rows of GPU_KERNELS. comm_hash is NCCL's, changed for each operation but all-reduce, since NCCL numbers
    each operation separately.
    """
    kernels = kernels[kernels["flags"] & GpuKernelFlag.IS_NETWORK == 0]
    kernels, is_by_call = with_replay_times(kernels)
    process, n_processes = numbered(kernels["node"], kernels["pid"])
    parts = [
        _of_process(kernels[process == number], is_by_call[process == number])
        for number in range(n_processes)
    ]
    rows = np.concatenate([layout.empty(layout.COLLECTIVES), *(part for part, _ in parts)])
    is_by_call = np.concatenate([np.zeros(0, bool), *(part for _, part in parts)])
    rows, is_by_call = (column[~has_repeated_number(rows)] for column in (rows, is_by_call))
    rows, is_by_call = (column[_is_whole_round(rows)] for column in (rows, is_by_call))
    after_ns = np.zeros(len(rows), np.int64)
    after_ns[~is_by_call] = _after_others_ns(rows[~is_by_call])
    for name in ("ts_ns", "wait_enter_ns", "wait_leave_ns"):
        rows[name] -= np.where(rows[name] > 0, after_ns, 0)
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def on_host_clock(kernels: Array) -> tuple[Array, Array]:
    """The operations that have times on their GPU, and their starts on the host's clock: int64 (n,).

    Replays start when the stream reaches them where NCCL reports the times of other kernels (see replay_times).
    """
    rows, is_by_call = with_replay_times(kernels[kernels["flags"] & GpuKernelFlag.IS_NETWORK == 0])
    has_times = rows["flags"] & GpuKernelFlag.HAS_GPU_TIMES != 0
    rows, is_by_call = rows[has_times], is_by_call[has_times]
    start_ns = rows["start_ns"].astype(np.int64)
    process, n_processes = numbered(rows["node"], rows["pid"])
    for number in range(n_processes):
        own = process == number
        start_ns[own] += _offset_ns(rows[own], is_by_call[own])
    return rows, start_ns


def are_calls_known(kernels: Array) -> bool:
    """Whether the calls belong to their kernels: no kernel starts before its call. kernels: of one process."""
    timed = kernels[kernels["flags"] & GpuKernelFlag.HAS_GPU_TIMES != 0]
    start_ns = timed["start_ns"] + _offset_ns(timed, np.zeros(len(timed), bool))
    return bool(len(kernels)) and not _are_early(start_ns, timed["ts_ns"])


def _are_early(arrive_ns: Array, called_ns: Array) -> bool:
    return bool((arrive_ns < called_ns - _MAX_EARLY_NS).mean() > _MAX_EARLY) if len(called_ns) else False


def has_repeated_number(rows: Array) -> Array:
    """Whether a process recorded an operation of the same communicator and number twice: bool (n,).

    rows: of COLLECTIVES or GPU_KERNELS with known numbers.
    """
    if not len(rows):
        return np.zeros(0, bool)
    keys = ["node", "pid", "comm_hash", "op", "seq"]
    _, which, n = np.unique(rows[keys], return_inverse=True, return_counts=True)
    is_repeated: Array = n[which] > 1
    return is_repeated


def n_unnumbered(kernels: Array) -> int:
    """Collectives with GPU times and without a number of their own. kernels: rows of GPU_KERNELS."""
    is_collective = (kernels["peer_rank"] == UNKNOWN) & (kernels["seq"] != UNKNOWN)
    is_collective &= kernels["flags"] & GpuKernelFlag.IS_NETWORK == 0
    is_collective &= kernels["flags"] & GpuKernelFlag.HAS_GPU_TIMES != 0
    return int(has_repeated_number(kernels[is_collective]).sum())


def n_without_times(kernels: Array) -> int:
    """Collectives that are left out, since a rank of their round has the times of another kernel.

    kernels: rows of GPU_KERNELS.
    """
    kernels = kernels[kernels["flags"] & GpuKernelFlag.IS_NETWORK == 0]
    rows, _ = with_replay_times(kernels)
    is_removed = kernels["flags"] & ~rows["flags"] & GpuKernelFlag.HAS_GPU_TIMES != 0
    return int(is_removed.sum())


def _of_process(kernels: Array, is_by_call: Array) -> tuple[Array, Array]:
    """The collectives of one process, in the order of their kernels on the GPU, and their rows of is_by_call.

    is_by_call: bool (n,), rows whose times are on the host's clock.
    """
    has_times = kernels["flags"] & GpuKernelFlag.HAS_GPU_TIMES != 0
    kernels, is_by_call = kernels[has_times], is_by_call[has_times]
    arrive_ns = kernels["start_ns"] + _offset_ns(kernels, is_by_call)
    order = np.argsort(arrive_ns, kind="stable")
    kernels, is_by_call, arrive_ns = kernels[order], is_by_call[order], arrive_ns[order]
    rows = layout.empty(layout.COLLECTIVES, len(kernels))
    for name in ("node", "pid", "comm_rank", "nranks", "op", "count", "seq", "peer_rank"):
        rows[name] = kernels[name]
    rows["tid"] = kernels["pid"]
    rows["comm_hash"] = kernels["comm_hash"] ^ _hash_of_op(kernels["op"])
    rows["flags"] = CollectiveFlag.NO_SYSCALLS | CollectiveFlag.LATE_ATTACH | CollectiveFlag.NUMBERED
    rows["gpu_start_ns"], rows["gpu_end_ns"] = kernels["start_ns"], kernels["end_ns"]
    if len(rows):
        _add_times(rows, kernels, arrive_ns)
    is_collective = (kernels["peer_rank"] == UNKNOWN) & (kernels["seq"] != UNKNOWN)
    return rows[is_collective], is_by_call[is_collective]


def _hash_of_op(op: Array) -> Array:
    bits = [
        (_HASH_OF_OP * max(number - Op.ALL_REDUCE, 0)) & _ALL_BITS
        for number in range(int(op.max(initial=0)) + 1)
    ]
    return np.array([*bits, 0], np.uint64)[op]


def _add_times(rows: Array, kernels: Array, arrive_ns: Array) -> None:
    """The arrivals on the GPU, on the host's clock, and the ledger at each arrival."""
    called_ns = kernels["ts_ns"]
    if _are_early(arrive_ns, called_ns):
        called_ns = np.full(len(kernels), np.iinfo(np.int64).min)
    else:
        arrive_ns = np.maximum(arrive_ns, called_ns)
    leave_ns = np.maximum(kernels["end_ns"] - kernels["start_ns"], 0) + arrive_ns
    free_ns = np.maximum.accumulate(np.concatenate([arrive_ns[:1], leave_ns[:-1]]))
    free_ns = np.where(is_pause(np.diff(arrive_ns, prepend=arrive_ns[:1])), arrive_ns, free_ns)
    enqueued_ns = np.clip(called_ns, free_ns, np.maximum(arrive_ns, free_ns))
    rows["ts_ns"] = arrive_ns
    ledger = rows["ledger_ns"]
    ledger[:, Category.OTHER_OFF - 1] = np.cumsum(enqueued_ns - free_ns)
    ledger[:, Category.DEVICE - 1] = np.cumsum(np.maximum(arrive_ns - enqueued_ns, 0))
    ledger[:, Category.WAIT_GPU - 1] = np.maximum(arrive_ns - arrive_ns[0] - ledger.sum(axis=1), 0)
    rows["n_syncs"] = np.arange(len(rows))
    rows["wait_enter_ns"][1:], rows["wait_leave_ns"][1:] = arrive_ns[:-1], leave_ns[:-1]


def is_pause(interval_ns: Array) -> Array:
    """Whether the plugin was off in each interval between two operations: bool (n,)."""
    if not len(interval_ns):
        return np.zeros(0, bool)
    longest: Array = interval_ns > max(_PAUSE_NS, _TYPICAL_PAUSES * float(np.median(interval_ns)))
    return longest


def _offset_ns(kernels: Array, is_by_call: Array) -> Array:
    """The host's clock minus the GPU's, at each operation: int64 (n,). 0 where the times are on the host's clock."""
    out = np.zeros(len(kernels), np.int64)
    rows = np.flatnonzero(~is_by_call)
    if not len(rows):
        return out
    behind = kernels["noticed_ns"][rows] - kernels["start_ns"][rows]
    block, n_blocks = numbered(kernels["ts_ns"][rows] // _BLOCK_NS)
    least = np.full(n_blocks, np.iinfo(np.int64).max)
    np.minimum.at(least, block, behind)
    out[rows] = least[block]
    return out


def _after_others_ns(rows: Array) -> Array:
    """How much later than the others of its node a process's kernels end, in the median over the rounds: int64 (n,).

    Only operations that all ranks leave together count. rows: of whole rounds.
    """
    out = np.zeros(len(rows), np.int64)
    together = np.flatnonzero(np.isin(rows["op"], SYNCHRONISING_OPS))
    if not len(together):
        return out
    ends = rows[together]
    end_ns = (ends["ts_ns"] + ends["gpu_end_ns"] - ends["gpu_start_ns"]).astype(np.float64)
    number, n_rounds = numbered(ends["comm_hash"], ends["seq"], ends["node"])
    after_ns = end_ns - by_group(number, end_ns, n_rounds, medians)[number]
    process, n_processes = numbered(rows["node"], rows["pid"])
    by_process = by_group(process[together], after_ns, n_processes, medians)
    return np.nan_to_num(by_process)[process].astype(np.int64)


def _is_whole_round(rows: Array) -> Array:
    """Whether all processes that recorded a communicator recorded this round of it: bool (n,)."""
    if not len(rows):
        return np.zeros(0, bool)
    comm, n_comms = numbered(rows["comm_hash"])
    process, _ = numbered(rows["node"], rows["pid"])
    members, _ = numbered(comm, process)
    first = np.unique(members, return_index=True)[1]
    n_members = np.bincount(comm[first], minlength=n_comms)
    number, n_rounds = numbered(comm, rows["seq"])
    each = np.unique(np.stack([number, process]), axis=1)[0]
    is_whole: Array = np.bincount(each, minlength=n_rounds)[number] == n_members[comm]
    return is_whole


def _communicators(rows: Array) -> Array:
    _, first = np.unique(rows[["node", "pid", "comm_hash"]], return_index=True)
    out = layout.empty(layout.COMMUNICATORS, len(first))
    for name in ("ts_ns", "node", "pid", "comm_hash", "comm_rank", "nranks"):
        out[name] = rows[name][first]
    return out


def _with_ranks(processes: Array, rows: Array) -> Array:
    """The processes; the rank in the job is the rank in the largest communicator where no launcher states it."""
    out = processes.copy()
    for row in out:
        own = rows[(rows["node"] == row["node"]) & (rows["pid"] == row["pid"])]
        if row["rank"] == UNKNOWN and len(own):
            widest = own[np.argmax(own["nranks"])]
            row["rank"], row["nranks"] = widest["comm_rank"], widest["nranks"]
    return out
