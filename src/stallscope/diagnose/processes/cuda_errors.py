"""CUDA calls that failed: which rank broke first, and how.

A failing call is always recorded. An error that a context does not survive (or a driver that does not fit) is told at
once. Memory that was refused is told only where it was the end of the process: allocators retry, and go on.
The ranks that fail after the first one fail because of it, most of the time: they are told as its victims.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Op
from stallscope.events.trace import Trace

OUT_OF_MEMORY = 2
CODES = {
    OUT_OF_MEMORY: ("out_of_memory", "out of memory"),
    35: ("driver_mismatch", "the driver is older than the CUDA runtime needs"),
    46: ("driver_mismatch", "all devices are busy or unavailable"),
    209: ("driver_mismatch", "no kernel image for this device"),
    214: ("gpu_fault", "uncorrectable ECC error"),
    220: ("gpu_fault", "uncorrectable NVLink error"),
    222: ("driver_mismatch", "PTX of a newer toolchain than the driver knows"),
    700: ("device_error", "illegal address"),
    702: ("device_error", "launch timed out"),
    710: ("device_error", "device-side assert"),
    714: ("device_error", "hardware stack error"),
    715: ("device_error", "illegal instruction"),
    716: ("device_error", "misaligned address"),
    717: ("device_error", "invalid address space"),
    718: ("device_error", "invalid program counter"),
    719: ("device_error", "launch failed"),
    802: ("driver_mismatch", "the system is not ready (fabric manager)"),
    803: ("driver_mismatch", "the driver does not match the system's"),
    804: ("driver_mismatch", "forward compatibility is not supported on this device"),
}
"""Cause and words by error code: the same numbers in cudaError_t and CUresult (driver_types.h and cuda.h, 12.x).

Codes that are no failure (600: not ready) or come with a normal end (4, 709) are not here.
"""

NO_CALLS_AFTER_NS = 1_000_000_000
"""A process whose memory was refused goes on if it makes successful calls or arrives after this time."""


@dataclass(frozen=True)
class Failure:
    """The first failing call of a process. row: of trace.calls; n: failing calls of that code."""

    node: int
    pid: int
    rank: int
    row: Array
    n: int


def failed(calls: Array) -> Array:
    """Those of some calls that have returned with an error of CODES."""
    return calls[np.isin(calls["result"], list(CODES)) & (calls["duration_ns"] != UNKNOWN)]


def failures(trace: Trace) -> list[Failure]:
    """The first failing call of each process, in the order of their times on the wall clock."""
    rows = failed(trace.calls)
    ranks = {(int(p["node"]), int(p["pid"])): int(p["rank"]) for p in trace.processes}
    found = []
    for who in np.unique(rows[["node", "pid"]]):
        mine = rows[rows[["node", "pid"]] == who]
        first = mine[np.argmin(mine["ts_ns"] + mine["duration_ns"])]
        key = int(who["node"]), int(who["pid"])
        found.append(
            Failure(*key, ranks.get(key, UNKNOWN), first, int((mine["result"] == first["result"]).sum()))
        )
    return sorted(found, key=lambda one: returned_ns(trace, one))


def returned_ns(trace: Trace, one: Failure) -> int:
    """When the call returned: wall time where a clock was recorded."""
    at_ns = int(one.row["ts_ns"] + one.row["duration_ns"])
    return wall_ns(trace, one.node, at_ns) or at_ns


def goes_on(trace: Trace, one: Failure) -> bool:
    """Whether the process still does something a while after its last refusal."""
    calls, rows = trace.calls, trace.collectives
    mine = calls[(calls["node"] == one.node) & (calls["pid"] == one.pid)]
    refused = mine[mine["result"] == OUT_OF_MEMORY]["ts_ns"].max()
    after = refused + NO_CALLS_AFTER_NS
    arrivals = rows[(rows["node"] == one.node) & (rows["pid"] == one.pid)]["ts_ns"]
    has_memory = (mine["ts_ns"] > refused) & (mine["result"] == 0) & (mine["op"] == Op.ALLOC)
    return bool((arrivals > after).any() or (mine["ts_ns"] > after).any() or has_memory.any())
