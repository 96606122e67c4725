"""The arrivals and communicators of one process of a recording, from its calls into NCCL."""

from typing import Any

import numpy as np

from stallscope.events import layout
from stallscope.events.identity import split_hash
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import DATATYPE_BYTES, CollectiveFlag, Op
from stallscope.importers.recorded_events import Raw

# symbol -> operation, and which argument holds count, datatype, reduce operation, peer or root, communicator
# (nccl.h 2.28; a6 is the 7th argument or the first stack word).
COLLECTIVE_CALLS: dict[str, tuple[Op, int, int, int | None, int | None, int]] = {
    "ncclAllReduce": (Op.ALL_REDUCE, 2, 3, 4, None, 5),
    "ncclAllGather": (Op.ALL_GATHER, 2, 3, None, None, 4),
    "ncclReduceScatter": (Op.REDUCE_SCATTER, 2, 3, 4, None, 5),
    "ncclBroadcast": (Op.BROADCAST, 2, 3, None, 4, 5),
    "ncclBcast": (Op.BROADCAST, 1, 2, None, 3, 4),
    "ncclReduce": (Op.REDUCE, 2, 3, 4, 5, 6),
    "ncclAlltoAll": (Op.ALL_TO_ALL, 2, 3, None, None, 4),
    "ncclGather": (Op.GATHER, 2, 3, None, 4, 5),
    "ncclScatter": (Op.SCATTER, 2, 3, None, 4, 5),
    "ncclSend": (Op.SEND, 1, 2, None, 3, 4),
    "ncclRecv": (Op.RECV, 1, 2, None, 3, 4),
}


def collective_rows(own: Raw, pid: int) -> tuple[Array, Array]:
    """The process's arrivals in order of the calls, and its communicators."""
    rows: list[dict[str, Any]] = []
    communicators: list[dict[str, Any]] = []
    by_handle: dict[int, dict[str, Any]] = {}
    pending: dict[int, tuple[str, list[int]]] = {}
    n_splits: dict[int, int] = {}
    n_rounds: dict[tuple[int, int, int], int] = {}
    groups: dict[int, list[dict[str, Any]]] = {}
    depth: dict[int, int] = {}
    is_nccl = np.char.startswith(own.symbol, "nccl")
    nccl = own.where(is_nccl)
    for ts_ns, tid, kind, symbol, *words in zip(
        *(nccl.ts_ns.tolist(), nccl.tid.tolist(), nccl.kind.tolist(), nccl.symbol.tolist()),
        *nccl.arguments.tolist(),
        strict=True,
    ):
        if symbol.startswith(("ncclCommInit", "ncclCommSplit")):
            if kind == "enter":
                pending[tid] = (symbol, words)
            elif tid in pending:
                made = _communicator(*pending.pop(tid), by_handle=by_handle, n_splits=n_splits)
                if words[1]:
                    by_handle[words[1]] = made | {"ts_ns": ts_ns, "pid": pid}
                    communicators.append(by_handle[words[1]])
        elif kind != "enter":
            continue
        elif symbol in ("ncclCommDestroy", "ncclCommAbort"):
            if words[0] in by_handle:
                by_handle.pop(words[0])["ended_ns"] = ts_ns
        elif symbol == "ncclGroupStart":
            depth[tid] = depth.get(tid, 0) + 1
        elif symbol == "ncclGroupEnd":
            depth[tid] = max(depth.get(tid, 0) - 1, 0)
            if not depth[tid]:
                for row in groups.pop(tid, []):
                    row["ts_ns"] = ts_ns
        elif symbol in COLLECTIVE_CALLS:
            row = _collective(symbol, words, by_handle=by_handle, n_rounds=n_rounds)
            row |= {"ts_ns": ts_ns, "pid": pid, "tid": tid}
            if depth.get(tid, 0):
                row["flags"] |= CollectiveFlag.GROUPED
                groups.setdefault(tid, []).append(row)
            rows.append(row)
    return _filled(layout.COLLECTIVES, rows), _filled(layout.COMMUNICATORS, communicators)


def _communicator(
    symbol: str, words: list[int], *, by_handle: dict[int, dict[str, Any]], n_splits: dict[int, int]
) -> dict[str, Any]:
    if symbol == "ncclCommSplit":
        parent, colour = words[0], words[1] & 0xFFFFFFFF
        n_earlier = n_splits.get(parent, 0)
        n_splits[parent] = n_earlier + 1
        parent_hash = by_handle.get(parent, {}).get("comm_hash", 0)
        return {"comm_hash": split_hash(parent_hash, n_earlier, colour), "parent_hash": parent_hash}
    return {"comm_hash": words[6], "nranks": _c_int(words[1]), "comm_rank": _c_int(words[2])}


def _c_int(word: int) -> int:
    """A C int that is never negative; UNKNOWN for a negative value."""
    value = word & 0xFFFFFFFF
    return value if value < 1 << 31 else UNKNOWN


def _collective(
    symbol: str,
    words: list[int],
    *,
    by_handle: dict[int, dict[str, Any]],
    n_rounds: dict[tuple[int, int, int], int],
) -> dict[str, Any]:
    op, count, datatype, reduce_op, peer, comm = COLLECTIVE_CALLS[symbol]
    handle = words[comm]
    known = by_handle.get(handle, {})
    row = {
        "op": int(op),
        "count": words[count] if words[count] < 1 << 48 else UNKNOWN,
        "datatype": min((words[datatype] & 0xFF) + 1, 0xFF),
        "reduce_op": 0 if reduce_op is None else min((words[reduce_op] & 0xFF) + 1, 0xFF),
        "peer_rank": UNKNOWN if peer is None else _c_int(words[peer]),
        "comm_hash": known.get("comm_hash", handle),
        "comm_rank": known.get("comm_rank", UNKNOWN),
        "nranks": known.get("nranks", UNKNOWN),
        "flags": 0 if known else int(CollectiveFlag.LATE_ATTACH),
    }
    size = DATATYPE_BYTES[row["datatype"]] if row["datatype"] < len(DATATYPE_BYTES) else 0
    row["count_bytes"] = row["count"] * size if size and row["count"] != UNKNOWN else UNKNOWN
    direction = {Op.SEND: 1, Op.RECV: 2}.get(op, 0)
    key = (handle, direction, row["peer_rank"] if direction else 0)
    row["seq"] = n_rounds.get(key, 0)
    n_rounds[key] = row["seq"] + 1
    return row


def _filled(table: layout.Table, rows: list[dict[str, Any]]) -> Array:
    out = layout.empty(table, len(rows))
    for field in table.fields:
        for i, row in enumerate(rows):
            if field.name in row:
                out[field.name][i] = row[field.name]
    return out
