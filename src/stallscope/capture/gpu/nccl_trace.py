"""The trace of the ranks of a machine from the records of NCCL's profiler plugin (see nccl_ring).

A collective arrives when its kernel starts on the GPU. The GPU's clock is converted to the host's: NCCL's thread
notices the start of a kernel microseconds after it, so the least difference of the two is the offset of the clocks.
Between two collectives, a GPU waits for its host until the host enqueues the next collective (other_off); after that
the GPU does its own work (device). So a rank that is late on the GPU but not on the host is late because of its GPU.
Collectives without GPU times arrive when the host enqueues them. Rounds are numbered per communicator in the order of
the calls.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stallscope.capture.gpu.nccl_ring import COLL, P2P, RecordFlag, RingComm
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, CollectiveFlag, Op
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


@dataclass
class Recorded:
    """The records of one process. n_lost: records that were overwritten or not written."""

    records: Array
    communicators: Sequence[RingComm] = ()
    comm: bytes = b""
    n_lost: int = field(default=0)


def nccl_trace(processes: Mapping[int, Recorded], *, node: str, clock: Clock) -> Trace:
    """The trace of all processes, by process id. Records of one collective are merged."""
    parts = {pid: _merged(recorded) for pid, recorded in processes.items()}
    sizes = {(pid, comm.comm_hash): comm for pid, each in processes.items() for comm in each.communicators}
    first = _first_common_round(parts)
    rows = [_rows(pid, records, sizes, first) for pid, records in parts.items()]
    collectives = np.concatenate(rows) if rows else layout.empty(layout.COLLECTIVES)
    collectives = collectives[np.argsort(collectives["ts_ns"], kind="stable")]
    n_lost = sum(each.n_lost for each in processes.values())
    n_open = sum(int((each["flags"] & RecordFlag.HAS_GPU_TIMES == 0).sum()) for each in parts.values())
    end_ns = int(collectives["ts_ns"].max(initial=clock.monotonic_ns))
    return Trace(
        collectives=collectives,
        communicators=_communicators(collectives),
        processes=_processes(processes, collectives),
        nodes=(node,),
        clocks=(clock,),
        ends_ns=(end_ns,),
        lost={"gpu_arrival": n_lost} if n_lost else {},
        source="records of NCCL's profiler plugin",
        coverage=Coverage(
            omitted={"collectives without GPU times": n_open} if n_open else {}, gaps=tuple(_gaps(parts))
        ),
    )


def _gaps(parts: Mapping[int, Array]) -> list[Gap]:
    if any(len(records) for records in parts.values()):
        return []
    return [
        Gap(
            "the plugin recorded no collective",
            "Record longer, or while the job trains; the job needs NCCL 2.25 or newer.",
        )
    ]


def _merged(recorded: Recorded) -> Array:
    """The operations of a process in the order of its calls; parts of one operation are one row."""
    rows = recorded.records
    rows = rows[np.isin(rows["kind"], (COLL, P2P))]
    keys = ["kind", "comm_hash", "rank", "func", "seq", "host_ns"]
    rows = rows[np.lexsort((rows["stop_ns"], rows["host_ns"]))]
    _, first, which = np.unique(rows[keys], return_index=True, return_inverse=True)
    out = rows[first]
    has_times = rows["flags"] & RecordFlag.HAS_GPU_TIMES > 0
    starts = np.full(len(out), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(starts, which[has_times], rows["start_ns"][has_times])
    np.maximum.at(out["stop_ns"], which, rows["stop_ns"])
    np.bitwise_or.at(out["flags"], which, rows["flags"])
    out["start_ns"] = np.where(out["flags"] & RecordFlag.HAS_GPU_TIMES > 0, starts, 0)
    return out[np.argsort(out["host_ns"], kind="stable")]


def _key(row: np.void) -> tuple[int, bytes]:
    return int(row["comm_hash"]), bytes(row["func"])


def _first_common_round(parts: Mapping[int, Array]) -> dict[tuple[int, bytes], int]:
    """NCCL's number of the first call that all members recorded, by communicator and operation."""
    first: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for records in parts.values():
        rounds = records[records["kind"] == COLL]
        _, at = np.unique(rounds[["comm_hash", "func", "rank"]], return_index=True)
        for index in at.tolist():
            first[_key(rounds[index])].append(int(rounds["seq"][index]))
    return {key: max(numbers) for key, numbers in first.items()}


def _rows(
    pid: int,
    records: Array,
    sizes: Mapping[tuple[int, int], RingComm],
    first: Mapping[tuple[int, bytes], int],
) -> Array:
    """The collectives of one process, numbered from the first call that all members recorded."""
    is_common = np.array([row["kind"] == P2P or int(row["seq"]) >= first[_key(row)] for row in records], bool)
    records = records[is_common]
    rows = layout.empty(layout.COLLECTIVES, len(records))
    rows["pid"], rows["tid"] = pid, pid
    rows["comm_hash"], rows["comm_rank"] = records["comm_hash"], records["rank"]
    rows["count"] = records["count"]
    rows["op"] = [_OPS.get(name, Op.NONE) for name in records["func"].tolist()]
    rows["nranks"] = [
        known.n_ranks if (known := sizes.get((pid, comm_hash))) else UNKNOWN
        for comm_hash in records["comm_hash"].tolist()
    ]
    rows["peer_rank"] = np.where(records["kind"] == P2P, records["peer"], UNKNOWN)
    rows["seq"] = _numbers(rows)
    rows["flags"] = CollectiveFlag.NO_SYSCALLS | CollectiveFlag.LATE_ATTACH
    _add_times(rows, records)
    return rows


def _add_times(rows: Array, records: Array) -> None:
    """The arrivals on the GPU, on the host's clock, and the ledger at each arrival."""
    host_ns = records["host_ns"].astype(np.int64)
    has_times = records["flags"] & RecordFlag.HAS_GPU_TIMES > 0
    start_ns, stop_ns = (records[name].astype(np.int64) for name in ("start_ns", "stop_ns"))
    offset_ns = (
        int((records["noticed_ns"].astype(np.int64) - start_ns)[has_times].min()) if has_times.any() else 0
    )
    arrive_ns = np.where(has_times, np.maximum(start_ns + offset_ns, host_ns), host_ns)
    leave_ns = np.where(has_times, np.maximum(stop_ns + offset_ns, arrive_ns), arrive_ns)
    free_ns = np.maximum.accumulate(np.concatenate([arrive_ns[:1], leave_ns[:-1]]))
    enqueued_ns = np.clip(host_ns, free_ns, np.maximum(arrive_ns, free_ns))
    rows["ts_ns"] = arrive_ns
    rows["gpu_start_ns"] = np.where(has_times, start_ns, UNKNOWN)
    rows["gpu_end_ns"] = np.where(has_times, stop_ns, UNKNOWN)
    ledger = rows["ledger_ns"]
    ledger[:, Category.OTHER_OFF - 1] = np.cumsum(enqueued_ns - free_ns)
    ledger[:, Category.DEVICE - 1] = np.cumsum(np.maximum(arrive_ns - enqueued_ns, 0))
    ledger[:, Category.WAIT_GPU - 1] = np.maximum(
        arrive_ns - arrive_ns.min(initial=0) - ledger.sum(axis=1), 0
    )
    rows["n_syncs"] = np.arange(len(rows))
    rows["wait_enter_ns"][1:], rows["wait_leave_ns"][1:] = arrive_ns[:-1], leave_ns[:-1]


def _numbers(rows: Array) -> Array:
    """The number of each call in its communicator; of a transfer, in its direction and peer."""
    counts: dict[tuple[int, int, int], int] = defaultdict(int)
    out = np.zeros(len(rows), np.int64)
    for index, row in enumerate(rows):
        is_transfer = row["peer_rank"] != UNKNOWN
        key = int(row["comm_hash"]), int(row["op"]) * is_transfer, int(row["peer_rank"]) * is_transfer
        out[index] = counts[key]
        counts[key] += 1
    return out


def _communicators(collectives: Array) -> Array:
    _, first = np.unique(collectives[["pid", "comm_hash"]], return_index=True)
    rows = layout.empty(layout.COMMUNICATORS, len(first))
    for name in ("ts_ns", "pid", "comm_hash", "comm_rank", "nranks"):
        rows[name] = collectives[name][first]
    return rows


def _processes(processes: Mapping[int, Recorded], collectives: Array) -> Array:
    """The rank in the job is the rank in the largest communicator."""
    out = layout.empty(layout.PROCESSES, len(processes))
    for row, (pid, recorded) in zip(out, processes.items(), strict=True):
        own = collectives[collectives["pid"] == pid]
        row["pid"], row["comm"] = pid, recorded.comm
        row["ts_ns"] = own["ts_ns"].min(initial=0) if len(own) else 0
        if len(own):
            widest = own[np.argmax(own["nranks"])]
            row["rank"], row["nranks"] = widest["comm_rank"], widest["nranks"]
    return out
