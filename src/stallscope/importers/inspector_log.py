"""Logs of NCCL's Inspector plugin: one JSON object for each collective of a communicator, a file per process.

The exact part of a record is how long the rank was inside a collective. All ranks leave a synchronising collective
together, so the rank that was inside for the shortest time entered last: arrivals are computed backwards from a common
end, without any clock of a host. The end is the time at which the collective was logged, which orders rounds but is
late by the plugin's dump interval. coll_sn counts per operation of a communicator: rounds are matched by operation and
coll_sn, and ordered as the processes logged them. Where a rank spent the time between two collectives is not recorded
(other_off). The format, v4.0 to v5.1, is described in the plugin's README (NVIDIA/nccl, plugins/profiler/inspector,
5067397c).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, CollectiveFlag, Op
from stallscope.events.trace import Clock, Coverage, Trace
from stallscope.importers.operation_names import NCCL_OPS
from stallscope.importers.registry import Importer, Unread
from stallscope.importers.texts import begins_as_object, lines_of

_MAX_OBJECT_LENGTH = 1 << 20  # characters
_MAX_ROWS = 3_000_000
_WORDS = (b'"inspector_output_format_version"', b'"coll_perf"')
_COLLECTIVES = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.BROADCAST, Op.REDUCE)
_COLUMNS = [
    *(("process", "i8"), ("comm", "u8"), ("rank", "i8"), ("nranks", "i8"), ("seq", "i8")),
    *(("op", "i8"), ("count_bytes", "i8"), ("inside_ns", "i8"), ("logged_ns", "i8")),
]
_MAX_NS = 2**61


@dataclass(frozen=True)
class _Logs:
    """rows: one per collective and rank, columns as above. processes: host and pid, by number. omitted: by reason."""

    rows: Array
    processes: list[tuple[str, int]]
    omitted: dict[str, int]


def _accepts(file: Path, head: bytes) -> bool:
    return begins_as_object(head, _WORDS)


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    logs = _logs(files)
    rows = logs.rows
    hosts = sorted({host for host, _ in logs.processes})
    node = np.array([hosts.index(host) for host, _ in logs.processes])[rows["process"]]
    pid = np.array([pid for _, pid in logs.processes])[rows["process"]]
    end_ns = _ends(rows)
    collectives = layout.empty(layout.COLLECTIVES, len(rows))
    collectives["ts_ns"] = collectives["gpu_start_ns"] = end_ns - rows["inside_ns"]
    collectives["gpu_end_ns"] = end_ns
    collectives["node"], collectives["pid"], collectives["tid"] = node, pid, pid
    collectives["comm_hash"], collectives["comm_rank"] = rows["comm"], rows["rank"]
    for name in ("nranks", "seq", "op", "count_bytes"):
        collectives[name] = rows[name]
    collectives["flags"] = CollectiveFlag.NO_SYSCALLS
    _add_ledger(collectives, rows["process"])
    last = int(end_ns.max())
    return Trace(
        collectives=collectives[np.argsort(collectives["ts_ns"], kind="stable")],
        communicators=_communicators(collectives),
        processes=_processes(logs, rows, hosts),
        nodes=tuple(hosts),
        clocks=tuple(Clock(i, last, last) for i in range(len(hosts))),
        ends_ns=(last,) * len(hosts),
        source=f"NCCL Inspector logs of {counted(len(logs.processes), 'process')}",
        coverage=Coverage(omitted=logs.omitted),
    )


def _logs(files: Sequence[Path]) -> _Logs:
    numbers: dict[tuple[str, int], int] = {}
    parts: list[tuple[int, ...]] = []
    omitted: dict[str, int] = {}
    first_error = ""
    for file in files:
        for number, record in enumerate(_objects(file), 1):
            try:
                row = None if record is None else _row(record, numbers)
                reason = "damaged records" if record is None else "records of other operations"
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                row, reason = None, "damaged records"
                first_error = first_error or f"{file}: object {number} is not an Inspector record ({error})"
            if row:
                parts.append(row)
            else:
                omitted[reason] = omitted.get(reason, 0) + 1
        if len(parts) > _MAX_ROWS:
            raise BadTrace(f"{file}: more than {_MAX_ROWS:,} collectives: record a shorter time")
    if not parts:
        raise BadTrace(
            f"{first_error}: copy the file again"
            if first_error
            else f"{files[0]} contains no collectives: check that NCCL_INSPECTOR_ENABLE was set"
        )
    rows = np.array(parts, dtype=_COLUMNS)
    rows["seq"] = _round_numbers(rows)
    order = np.lexsort((rows["seq"], rows["comm"], rows["process"]))
    return _Logs(rows[order], list(numbers), omitted)


def _objects(file: Path) -> Iterator[Any]:
    """The JSON objects of a file one by one, None for a damaged object.

    An unfinished last object, as of a killed job, is left out.
    """
    text, depth = "", 0
    for line in lines_of(file):
        text += line
        depth += line.count("{") - line.count("}")
        if (
            depth > 0
            and len(text) < _MAX_OBJECT_LENGTH
            and not (text != line and line.startswith('{"header"'))
        ):
            continue
        if text != line and line.startswith('{"header"'):  # the object before ends in the middle
            yield None
            text, depth = line, line.count("{") - line.count("}")
            if depth > 0:
                continue
        if text.strip():
            try:
                yield json.loads(text)
            except (ValueError, RecursionError):
                yield None
        text, depth = "", 0


def _round_numbers(rows: Array) -> Array:
    """The number of each row's round in its communicator: int64 (n,).

    A round is an operation and its coll_sn; rounds are in the order in which the processes logged them.
    """
    out = np.zeros(len(rows), np.int64)
    for comm in np.unique(rows["comm"]):
        own = np.flatnonzero(rows["comm"] == comm)
        keys, key = np.unique(rows[["op", "seq"]][own], return_inverse=True)
        process = rows["process"][own]
        by_process = [key[process == number] for number in np.unique(process)]
        out[own] = _common_order(by_process, len(keys))[key]
    return out


def _common_order(sequences: Sequence[Array], n_keys: int) -> Array:
    """The position of each key in an order that all sequences share: int64 (n_keys,)."""
    longest = max(sequences, key=len)
    index = np.full(n_keys, -1.0)
    index[longest] = np.arange(len(longest))
    step = 1.0 / (n_keys + 1)
    for sequence in sequences:
        if (index[sequence] >= 0).all():
            continue
        last = -1.0
        for key in sequence.tolist():  # a round that the longest log lacks comes after the round before it
            index[key] = last = index[key] if index[key] >= 0 else last + step
    return np.argsort(np.argsort(index, kind="stable"), kind="stable")


def _row(record: dict[str, Any], numbers: dict[tuple[str, int], int]) -> tuple[int, ...] | None:
    header, about, perf = record["header"], record["metadata"], record.get("coll_perf")
    if perf is None or NCCL_OPS.get(perf["coll"]) not in _COLLECTIVES:
        return None
    process_key = str(about["hostname"])[:256], int(about["pid"])
    logged_ns = int(about["dump_timestamp_us"]) * 1000
    inside_ns = int(perf["coll_exec_time_us"]) * 1000
    counts = (
        int(header["rank"]),
        int(header["n_ranks"]),
        int(perf["coll_sn"]),
        int(perf["coll_msg_size_bytes"]),
    )
    if not (0 <= inside_ns < logged_ns < _MAX_NS and min(counts) >= 0 and 0 <= process_key[1] < 2**32):
        raise ValueError("a number is out of range")
    rank, nranks, seq, n_bytes = counts
    if rank >= nranks or nranks >= 2**31 or max(seq, n_bytes) >= _MAX_NS:
        raise ValueError(f"rank {rank} of {nranks}")
    process = numbers.setdefault(process_key, len(numbers))
    comm = int(str(header["id"]), 16) & (2**64 - 1)
    return process, comm, rank, nranks, seq, int(NCCL_OPS[perf["coll"]]), n_bytes, inside_ns, logged_ns


def _ends(rows: Array) -> Array:
    """The common end of each round, ns, for every row: as logged first, but after the round before it."""
    out = np.zeros(len(rows), np.int64)
    for comm in np.unique(rows["comm"]):
        selected = np.flatnonzero(rows["comm"] == comm)
        _, round_ = np.unique(rows["seq"][selected], return_inverse=True)
        logged = np.full(round_.max() + 1, _MAX_NS, np.int64)
        np.minimum.at(logged, round_, rows["logged_ns"][selected])
        inside = np.zeros(len(logged), np.int64)
        np.maximum.at(inside, round_, rows["inside_ns"][selected])
        # end[i] = max(logged[i], end[i-1] + inside[i]), as a running maximum
        done = np.cumsum(inside)
        out[selected] = (np.maximum.accumulate(logged - done) + done)[round_]
    return out


def _add_ledger(collectives: Array, process: Array) -> None:
    """Inside a collective a process waits; its state between two collectives is not known."""
    for number in np.unique(process):
        selected = np.flatnonzero(process == number)
        selected = selected[np.argsort(collectives["ts_ns"][selected], kind="stable")]
        begin, end = collectives["ts_ns"][selected], collectives["gpu_end_ns"][selected]
        free = np.maximum(begin - np.concatenate([begin[:1], np.maximum.accumulate(end)[:-1]]), 0)
        other = np.cumsum(free)
        ledger = np.zeros((len(selected), collectives["ledger_ns"].shape[1]), np.int64)
        ledger[:, Category.OTHER_OFF - 1] = other
        ledger[:, Category.WAIT_GPU - 1] = begin - begin[0] - other
        collectives["ledger_ns"][selected] = ledger
        collectives["n_syncs"][selected] = np.arange(len(selected))
        collectives["wait_enter_ns"][selected[1:]], collectives["wait_leave_ns"][selected[1:]] = (
            begin[:-1],
            end[:-1],
        )


def _communicators(collectives: Array) -> Array:
    _, first = np.unique(collectives[["node", "pid", "comm_hash"]], return_index=True)
    rows = layout.empty(layout.COMMUNICATORS, len(first))
    for name in ("ts_ns", "node", "pid", "comm_hash", "comm_rank", "nranks"):
        rows[name] = collectives[name][first]
    return rows


def _processes(logs: _Logs, rows: Array, hosts: list[str]) -> Array:
    """The rank in the job is the rank in the largest communicator of its processes."""
    out = layout.empty(layout.PROCESSES, len(logs.processes))
    size = int(rows["nranks"].max())
    widest = rows[rows["nranks"] == size]
    ranks: dict[int, int] = {}
    for comm in dict.fromkeys(widest["comm"].tolist()):
        members = widest[widest["comm"] == comm]
        if not set(members["process"].tolist()) & set(
            ranks
        ):  # the first of a job: several jobs share no process
            ranks |= dict(zip(members["process"].tolist(), members["rank"].tolist(), strict=True))
    for number, (row, (host, pid)) in enumerate(zip(out, logs.processes, strict=True)):
        row["node"], row["pid"], row["nranks"] = hosts.index(host), pid, size
        row["rank"] = ranks.get(number, UNKNOWN)
    return out


IMPORTER = Importer("NCCL Inspector log (JSON)", _accepts, _read)
