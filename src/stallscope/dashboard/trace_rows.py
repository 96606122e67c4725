"""A trace as rows of the hub: the same conversion as between an agent and a hub, without a connection between them."""

import json
import time
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Clock, Trace
from stallscope.exporters import hub_arrow, hub_batches
from stallscope.receive import arrow
from stallscope.store.hub.store import Batch

TENANT = "local"
_NO_NAME = "this machine"
_ROWS_A_BATCH = 50_000
_LIMIT_BYTES = 1 << 30


def batches(trace: Trace, cluster: str) -> Iterator[Batch]:
    """The rows of a trace in batches, machine by machine."""
    ranks = _ranks(trace)
    for node in range(len(trace.nodes)):
        clock = _clock(trace, node)
        for table in layout.TABLES:
            rows = getattr(trace, table.name)
            rows = rows[rows["node"] == node]
            for begin in range(0, len(rows), _ROWS_A_BATCH):
                part = rows[begin : begin + _ROWS_A_BATCH]
                sent = hub_batches.on_wall_clock(table, part, clock, trace.symbols, ranks=ranks[node])
                batch_id = f"{node} {table.name} {begin}"
                body = hub_arrow.request(
                    {table.name: sent},
                    batch_id=batch_id,
                    node=node_name(trace, node),
                    cluster=cluster,
                    about={},
                )
                yield arrow.decode(body, TENANT, limit=_LIMIT_BYTES)
        if (stacks := _stack_rows(trace, node, node_name(trace, node), cluster)) is not None:
            yield Batch("", TENANT, {"stacks": stacks})


def node_name(trace: Trace, node: int) -> str:
    return trace.nodes[node] or _NO_NAME


def last_ns(trace: Trace) -> int:
    """The last moment of a trace, ns since 1970."""
    return max(call_times(trace), default=time.time_ns())


def call_times(trace: Trace) -> list[int]:
    """The first and the last call of each node, ns since 1970."""
    rows = processes_rows(trace)
    out = []
    for node in np.unique(rows["node"]).tolist():
        ts_ns = rows["ts_ns"][rows["node"] == node]
        out += [int(at_ns) + _offset_ns(trace, node) for at_ns in (ts_ns.min(), ts_ns.max())]
    return out


def processes_rows(trace: Trace) -> Array:
    """The rows that show when the processes of a trace ran: collectives, otherwise CUDA calls, otherwise states."""
    return next((rows for rows in (trace.collectives, trace.calls) if len(rows)), trace.snapshots)


def _clock(trace: Trace, node: int) -> Clock:
    """A reading of a machine's clock; without a recorded reading, the trace ends now."""
    readings = [clock for clock in trace.clocks if clock.node == node]
    if readings:
        return readings[-1]
    latest = [int(rows["ts_ns"].max()) for rows in (trace.collectives, trace.calls) if len(rows)]
    return Clock(node, max(latest, default=0), time.time_ns())


def _offset_ns(trace: Trace, node: int) -> int:
    clock = _clock(trace, node)
    return clock.wall_ns - clock.monotonic_ns


def _ranks(trace: Trace) -> list[dict[int, tuple[int, int]]]:
    """Rank and local rank of each process, by machine."""
    out: list[dict[int, tuple[int, int]]] = [{} for _ in trace.nodes]
    for node, pid, rank, local_rank in trace.processes[["node", "pid", "rank", "local_rank"]].tolist():
        if rank != UNKNOWN:
            out[node][pid] = (rank, local_rank)
    return out


def _stack_rows(trace: Trace, node: int, name: str, cluster: str) -> pa.Table | None:
    """The stacks that the off-CPU intervals and calls of a machine name."""
    pairs: Array = np.concatenate(
        [
            np.stack([rows["pid"].astype(np.int64), rows["stack"].astype(np.int64)], axis=1)
            for rows in (trace.offcpu[trace.offcpu["node"] == node], trace.calls[trace.calls["node"] == node])
        ]
    )
    known: Mapping[int, tuple[str, ...]] = trace.stacks
    rows = [
        {
            "ts_ns": 0,
            "cluster_id": cluster,
            "node_id": name,
            "pid": pid,
            "stack": stack,
            "frames": json.dumps(known[stack]),
        }
        for pid, stack in np.unique(pairs, axis=0).tolist()
        if stack in known
    ]
    return pa.Table.from_pylist(rows) if rows else None
