"""Kernel records as rows of the tables: whole arrays at a time, fields of the same name copied.

    splits = Splits()                                     # once
    tables = records.tables(arrivals, events, node=0, splits=splits)   # by table name, ready to be appended
    ended = records.communicators_ended(events, splits)   # (pid, comm_hash, ts_ns) of destroyed communicators

A split communicator's rank and size are not among the call's arguments: process/comm_split.py derives them.
"""

from typing import Any, NamedTuple

import numpy as np

from stallscope.capture.process.comm_split import Splits
from stallscope.events import kernel, layout
from stallscope.events.kernel import Kind
from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.names import DATATYPE_BYTES, Datatype

_N_DATATYPES = len(DATATYPE_BYTES)
_SIZES = np.array(DATATYPE_BYTES, np.int64)


class EndedCommunicators(NamedTuple):
    """Communicators that were destroyed or aborted: arrays (n,)."""

    pids: Array
    comm_hashes: Array
    ts_ns: Array


def tables(arrivals: Array, events: Array, *, node: int, splits: Splits | None = None) -> dict[str, Array]:
    """Rows by table name: collectives, calls, call_arguments, offcpu, communicators.

    arrivals: kernel.ARRIVAL (n,). events: kernel.EVENT (m,), of any kinds. splits: split communicators of earlier
    batches; without it their ranks are found only within one batch.
    """
    splits = splits or Splits(n_patience=0)
    born, called = splits.resolve(of_kind(events, Kind.COMM_BORN)), of_kind(events, Kind.CALL)
    return {
        "collectives": splits.fill_ranks(collectives(arrivals, node=node)),
        "calls": calls(called, node=node),
        "call_arguments": call_arguments(called, node=node),
        "offcpu": offcpu(of_kind(events, Kind.OFF_CPU), node=node),
        "communicators": communicators(born, node=node),
    }


def of_kind(events: Array, *kinds: Kind) -> Array:
    """The events of these kinds, which share a struct, as that struct."""
    dtype = _dtype_of(kinds[0])
    if not len(events):
        return np.zeros(0, dtype)
    is_chosen = events["kind"] == kinds[0]
    for kind in kinds[1:]:
        is_chosen |= events["kind"] == kind
    chosen: Array = events[is_chosen] if is_chosen.any() else events[:0]
    return chosen.view(dtype)


def raw(events: Array) -> Array:
    """The raw events of the ledger, kernel.RAW, in order of time; they exist only while everything is recorded.

    Switches that were missed and found later have times in the past, so the order of emission differs from that order.
    """
    raws: Array = events[events["kind"] >= kernel.FIRST_RAW].view(kernel.RAW)
    return raws[np.argsort(raws["ts_ns"], kind="stable")]


def collectives(arrivals: Array, *, node: int) -> Array:
    """Rows of COLLECTIVES. Bytes are elements x size of the datatype; unknown where either is."""
    rows = _rows(layout.COLLECTIVES, arrivals, node)
    is_known = (arrivals["datatype"] > 0) & (arrivals["datatype"] < _N_DATATYPES)
    datatype = np.where(is_known, arrivals["datatype"], Datatype.NONE)
    has_bytes = is_known & (arrivals["count"] >= 0)
    rows["datatype"] = datatype
    rows["comm_handle"] = arrivals["comm"]
    rows["count_bytes"] = np.where(has_bytes, arrivals["count"] * _SIZES[datatype], UNKNOWN)
    return rows


def calls(events: Array, *, node: int) -> Array:
    """Rows of CALLS from kernel.CALL."""
    return _with_stacks(_rows(layout.CALLS, events, node))


def call_arguments(events: Array, *, node: int) -> Array:
    """Rows of CALL_ARGUMENTS from the records of kernel.CALL that have arguments."""
    names = ("direction", "host_memory", "memory", "address", "handle", "grid", "block")
    has_any = np.zeros(len(events), bool)
    for name in names:
        is_set = events[name] != 0
        has_any |= is_set if is_set.ndim == 1 else is_set.any(axis=1)
    with_arguments = events[has_any]
    rows = _rows(layout.CALL_ARGUMENTS, with_arguments, node)
    for name in ("grid", "block"):
        for i, axis in enumerate("xyz"):
            rows[f"{name}_{axis}"] = with_arguments[name][:, i]
    return rows


def offcpu(events: Array, *, node: int) -> Array:
    """Rows of OFFCPU from kernel.OFF_CPU."""
    return _with_stacks(_rows(layout.OFFCPU, events, node))


def communicators(born: Array, *, node: int) -> Array:
    """Rows of COMMUNICATORS from the kernel.LIFE of created communicators."""
    return _rows(layout.COMMUNICATORS, born[born["comm"] != 0], node)


def communicators_ended(events: Array, splits: Splits | None = None) -> EndedCommunicators:
    """The destroyed or aborted communicators among kernel.EVENT of any kinds."""
    dead = of_kind(events, Kind.COMM_DEAD)
    if splits:
        dead = splits.grown.replace_hashes(dead.copy())
    return EndedCommunicators(dead["pid"], dead["comm_hash"], dead["ts_ns"])


def _with_stacks(rows: Array) -> Array:
    """stack: the kernel's hash for now, as Stacks.numbers() expects it; unknown without a stack."""
    rows["stack"][rows["stack"] == 0] = UNKNOWN
    return rows


def _rows(table: Table, records: Array, node: int) -> Array:
    """Rows of a table with all fields that the records also have; other fields are unknown or zero."""
    rows = layout.empty(table, len(records))
    if not len(records):
        return rows
    for name in set(rows.dtype.names or ()) & set(records.dtype.names or ()):
        rows[name] = records[name]
    rows["node"] = node
    return rows


def _dtype_of(kind: Kind) -> np.dtype[Any]:
    if kind is Kind.CALL:
        return kernel.CALL
    if kind is Kind.OFF_CPU:
        return kernel.OFF_CPU
    if kind is Kind.HOST:
        return kernel.HOST
    return kernel.LIFE if kind < kernel.FIRST_RAW else kernel.RAW
