"""Records of NCCL's profiler plugin (see nccl_ring) as rows of GPU_KERNELS, and as the trace of a machine's ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stallscope.capture.gpu.nccl_ring import P2P, PROXY, RecordFlag, RingComm
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import GpuKernelFlag, Op
from stallscope.events.trace import Clock, Coverage, Gap, Trace

_OPS = {
    b"AllReduce": Op.ALL_REDUCE,
    b"AllGather": Op.ALL_GATHER,
    b"AllGatherV": Op.ALL_GATHER,
    b"ReduceScatter": Op.REDUCE_SCATTER,
    b"Broadcast": Op.BROADCAST,
    b"Reduce": Op.REDUCE,
    b"AlltoAll": Op.ALL_TO_ALL,
    b"Gather": Op.GATHER,
    b"Scatter": Op.SCATTER,
    b"Send": Op.SEND,
    b"Recv": Op.RECV,
}
"""ncclFuncToString, NCCL 2.26 to 2.29."""

_FLAGS = RecordFlag.HAS_GPU_TIMES | RecordFlag.ON_HOST_CLOCK | RecordFlag.IS_SEND | RecordFlag.IS_PARTIAL


@dataclass
class Recorded:
    """The records of one process. n_lost: records that were overwritten or not written."""

    records: Array
    communicators: Sequence[RingComm] = ()
    comm: bytes = b""
    n_lost: int = field(default=0)


def kernel_rows(records: Array, communicators: Sequence[RingComm], *, pid: int, node: int) -> Array:
    """Rows of GPU_KERNELS of one process. Records of one operation are merged."""
    records = _merged(records)
    sizes = {comm.comm_hash: comm.n_ranks for comm in communicators}
    has_times = records["flags"] & RecordFlag.HAS_GPU_TIMES > 0
    is_network, is_transfer = records["kind"] == PROXY, records["kind"] == P2P
    rows = layout.empty(layout.GPU_KERNELS, len(records))
    rows["node"], rows["pid"] = node, pid
    rows["comm_hash"], rows["comm_rank"] = records["comm_hash"], records["rank"]
    rows["ts_ns"], rows["count"], rows["n_channels"] = (
        records[name] for name in ("host_ns", "count", "n_channels")
    )
    rows["nranks"] = [sizes.get(comm_hash, UNKNOWN) for comm_hash in records["comm_hash"].tolist()]
    rows["op"] = [_OPS.get(name, Op.NONE) for name in records["func"].tolist()]
    rows["seq"] = np.where(is_transfer, UNKNOWN, records["seq"].astype(np.int64))
    rows["peer_rank"] = np.where(is_transfer | is_network, records["peer"], UNKNOWN)
    is_replay = records["flags"] & RecordFlag.IS_REPLAY > 0
    rows["flags"] = records["flags"] & _FLAGS
    rows["flags"] |= np.where(is_network, GpuKernelFlag.IS_NETWORK, 0).astype(np.uint8)
    rows["flags"] |= np.where(is_replay, GpuKernelFlag.IS_REPLAY, 0).astype(np.uint8)
    for name, source in (("start_ns", "start_ns"), ("end_ns", "stop_ns"), ("noticed_ns", "noticed_ns")):
        rows[name] = np.where(has_times, records[source].astype(np.int64), UNKNOWN)
    if is_network.any():
        duration_ns = records["start_ns"].astype(np.int64)
        rows["start_ns"] = np.where(is_network, rows["ts_ns"], rows["start_ns"])
        rows["end_ns"] = np.where(is_network, rows["ts_ns"] + duration_ns, rows["end_ns"])
        rows["network_ns"] = np.where(is_network, records["stop_ns"].astype(np.int64), UNKNOWN)
    return rows


def nccl_trace(processes: Mapping[int, Recorded], *, node: str, clock: Clock) -> Trace:
    """The trace of all processes, by process id."""
    parts = [
        kernel_rows(each.records, each.communicators, pid=pid, node=0) for pid, each in processes.items()
    ]
    kernels = np.concatenate(parts) if parts else layout.empty(layout.GPU_KERNELS)
    kernels = kernels[np.argsort(kernels["ts_ns"], kind="stable")]
    is_open = kernels["flags"] & (GpuKernelFlag.HAS_GPU_TIMES | GpuKernelFlag.IS_NETWORK) == 0
    n_lost = sum(each.n_lost for each in processes.values())
    return Trace(
        gpu_kernels=kernels,
        processes=_processes(processes, kernels),
        nodes=(node,),
        clocks=(clock,),
        ends_ns=(int(kernels["ts_ns"].max(initial=clock.monotonic_ns)),),
        lost={"gpu_kernels": n_lost} if n_lost else {},
        source="records of NCCL's profiler plugin",
        coverage=Coverage(
            omitted={"collectives without GPU times": int(is_open.sum())} if is_open.any() else {},
            gaps=() if len(kernels) else (_NOTHING,),
        ),
    )


_NOTHING = Gap(
    "the plugin recorded no collective",
    "Record longer, or while the job trains; the job needs NCCL 2.25 or newer.",
)


def _merged(rows: Array) -> Array:
    """The operations of a process in the order of its calls; parts of one operation are one row."""
    rows = rows[np.lexsort((rows["stop_ns"], rows["host_ns"]))]
    keys = ["kind", "comm_hash", "rank", "func", "seq", "host_ns", "peer"]
    _, first, which = np.unique(rows[keys], return_index=True, return_inverse=True)
    if len(first) == len(rows):
        return rows
    out = rows[first]
    has_times = rows["flags"] & RecordFlag.HAS_GPU_TIMES > 0
    starts = np.full(len(out), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(starts, which[has_times], rows["start_ns"][has_times])
    np.maximum.at(out["stop_ns"], which, rows["stop_ns"])
    np.bitwise_or.at(out["flags"], which, rows["flags"])
    out["start_ns"] = np.where(starts != np.iinfo(np.uint64).max, starts, out["start_ns"])
    return out[np.argsort(out["host_ns"], kind="stable")]


def _processes(processes: Mapping[int, Recorded], kernels: Array) -> Array:
    """The rank in the job is the rank in the largest communicator."""
    out = layout.empty(layout.PROCESSES, len(processes))
    for row, (pid, recorded) in zip(out, processes.items(), strict=True):
        own = kernels[kernels["pid"] == pid]
        row["pid"], row["comm"], row["ts_ns"] = pid, recorded.comm, own["ts_ns"].min(initial=0)
        if len(own):
            widest = own[np.argmax(own["nranks"])]
            row["rank"], row["nranks"] = widest["comm_rank"], widest["nranks"]
    return out
