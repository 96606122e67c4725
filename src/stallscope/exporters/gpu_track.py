"""The GPUs of a node: driver readings as counters, and the kernels of NCCL that its profiler plugin recorded as slices.

A counter (memory, clock, utilisation) holds until the next reading.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import GpuKernelFlag, Op, word
from stallscope.exporters.trace_context import Process, TraceContext
from stallscope.exporters.tracks import Slice, Value

_STATE = (
    ("utilization_percent", "utilisation", "%"),
    ("memory_used_bytes", "memory used", "bytes"),
    ("sm_mhz", "SM clock", "MHz"),
)
_HARDWARE = (
    ("sm_percent", "multiprocessors at work", "%"),
    ("memory_percent", "memory bandwidth", "%"),
    ("nvlink_sent_bytes_per_s", "sent over NVLink", "bytes/s"),
    ("nvlink_received_bytes_per_s", "received over NVLink", "bytes/s"),
)


def counters(context: TraceContext, node: int) -> Iterator[tuple[str, str, Sequence[tuple[int, float]]]]:
    """By GPU (or partition) and column: title, unit, (ns on the common clock, value) where known."""
    rows = _of_node(context.trace.gpus, node)
    for gpu, mig in sorted(set(rows[["gpu", "mig"]].tolist())):
        own = rows[(rows["gpu"] == gpu) & (rows["mig"] == mig)]
        at_ns = context.common_ns(node, own["ts_ns"])
        yield from _columns(f"GPU {gpu}" if mig == UNKNOWN else f"GPU {gpu} MIG {mig}", own, at_ns, _STATE)
    rows = _of_node(context.trace.gpu_counters, node)
    for gpu in np.unique(rows["gpu"]).tolist():
        own = rows[rows["gpu"] == gpu]
        at_ns = context.common_ns(node, own["ts_ns"] - own["interval_ns"])
        yield from _columns(f"GPU {gpu}", own, at_ns, _HARDWARE)


def _of_node(rows: Array, node: int) -> Array:
    rows = rows[rows["node"] == node]
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _columns(
    name: str, rows: Array, at_ns: Array, columns: Sequence[tuple[str, str, str]]
) -> Iterator[tuple[str, str, Sequence[tuple[int, float]]]]:
    for column, words, unit in columns:
        known = rows[column] != UNKNOWN
        if known.any():
            values = rows[column][known].astype(np.float64)
            yield f"{name} {words}", unit, list(zip(at_ns[known].tolist(), values.tolist(), strict=True))


def nccl_kernels(context: TraceContext, process: Process) -> Iterator[tuple[str, list[Slice]]]:
    """By track title: the kernels of NCCL of a process on its GPU, and the transfers by its proxies."""
    rows = context.trace.gpu_kernels
    rows = rows[(rows["node"] == process.node) & (rows["pid"] == process.pid)]
    transfers = rows[(rows["flags"] & GpuKernelFlag.IS_NETWORK != 0) & (rows["start_ns"] > 0)]
    kernels, start_ns = context.nccl_kernels
    is_own = (kernels["node"] == process.node) & (kernels["pid"] == process.pid)
    for title, own, begin_ns in (
        ("GPU: kernels of NCCL", kernels[is_own], start_ns[is_own]),
        ("network of NCCL", transfers, transfers["start_ns"]),
    ):
        if len(own):
            yield title, _slices(own, context.common_ns(process.node, begin_ns))


def _slices(rows: Array, at_ns: Array) -> list[Slice]:
    lengths_ns = np.maximum(rows["end_ns"] - rows["start_ns"], 0)
    return [
        Slice(at, length, word(Op, int(row["op"])), _arguments(row))
        for row, at, length in zip(rows, at_ns.tolist(), lengths_ns.tolist(), strict=True)
    ]


def _arguments(row: Array) -> dict[str, Value]:
    arguments: dict[str, Value] = {"communicator": f"{int(row['comm_hash']):016x}"}
    known = {name: int(row[name]) for name in ("seq", "peer_rank", "network_ns") if row[name] != UNKNOWN}
    names = {"seq": "round", "peer_rank": "peer", "network_ns": "network_ns"}
    return arguments | {names[name]: value for name, value in known.items()}
