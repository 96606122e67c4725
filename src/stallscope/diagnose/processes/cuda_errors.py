"""CUDA calls that failed: the rank that failed first, and its error.

Every failing call is recorded. An error that ends a context is reported immediately. Any other error is reported only
if the process stops making progress: allocators retry. Later failures of other ranks are usually consequences of the
first failure: these ranks are reported as its victims.

A refused lookup of code (a kernel, a module, a library) is an answer: libraries probe for variants that this GPU does
not have. Lookups alone are a failure only if the process ends with an error, or keeps other ranks waiting, without any
work on the GPU after them.
"""

import signal
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import BY_SIGNAL, HostKind, Op
from stallscope.events.trace import Trace

OUT_OF_MEMORY = 2
CODES = {
    OUT_OF_MEMORY: ("out_of_memory", "out of memory"),
    35: ("driver_mismatch", "the driver is too old for the CUDA runtime"),
    46: ("driver_mismatch", "all devices are busy or unavailable"),
    209: ("driver_mismatch", "no kernel image for this device"),
    214: ("gpu_fault", "uncorrectable ECC error"),
    220: ("gpu_fault", "uncorrectable NVLink error"),
    222: ("driver_mismatch", "PTX of a newer toolchain than the driver supports"),
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

Codes that are not failures (600: not ready) or occur at a normal exit (4, 709) are left out.
"""

ENDS_CONTEXT = frozenset(code for code, (name, _) in CODES.items() if name in ("device_error", "gpu_fault"))

MAY_BE_HANDLED = frozenset(CODES) - ENDS_CONTEXT
"""Errors after which a process may continue."""

_WORK = (Op.LAUNCH, Op.GRAPH_LAUNCH, Op.COPY, Op.MEMSET, Op.ALLOC)
"""Calls that a process makes only while it works: unlike synchronisations, they are not part of its end."""

_MISSING_NS = 10_000_000_000
"""A rank that others wait for is missing after this time: see Thresholds.hang_after_ns."""

NO_CALLS_AFTER_NS = 1_000_000_000
"""A process continues after an error if it makes calls or arrives at a round after this time."""


@dataclass(frozen=True)
class Failure:
    """The first failing call of a process. row: of trace.calls; n: failing calls of that code."""

    node: int
    pid: int
    rank: int
    row: Array
    n: int


def failed(calls: Array) -> Array:
    """The calls that have returned with an error in CODES."""
    return calls[np.isin(calls["result"], list(CODES)) & (calls["duration_ns"] != UNKNOWN)]


def failures(trace: Trace) -> list[Failure]:
    """The first failing call of each process, in the order of their times on the wall clock."""
    rows = failed(trace.calls)
    ranks = {(int(p["node"]), int(p["pid"])): int(p["rank"]) for p in trace.processes}
    out = []
    for process in np.unique(rows[["node", "pid"]]):
        failed_calls = rows[rows[["node", "pid"]] == process]
        first = failed_calls[np.argmin(failed_calls["ts_ns"] + failed_calls["duration_ns"])]
        key = int(process["node"]), int(process["pid"])
        n = int((failed_calls["result"] == first["result"]).sum())
        out.append(Failure(*key, ranks.get(key, UNKNOWN), first, n))
    return sorted(out, key=lambda failure: returned_ns(trace, failure))


def returned_ns(trace: Trace, failure: Failure) -> int:
    """The time at which the call returned: wall time if a clock was recorded."""
    at_ns = int(failure.row["ts_ns"] + failure.row["duration_ns"])
    return wall_ns(trace, failure.node, at_ns) or at_ns


def continues(trace: Trace, failure: Failure) -> bool:
    """Whether the process makes progress after its last failing call of this code."""
    code = int(failure.row["result"])
    if code in ENDS_CONTEXT:
        return False
    calls, rows, counts = (
        _of_process(table, failure) for table in (trace.calls, trace.collectives, trace.operations)
    )
    refused = calls[calls["result"] == code]["ts_ns"].max()
    if (calls["op"][calls["result"] == code] == Op.MODULE).all():
        return _is_answered(trace, failure, int(refused))
    after = refused + NO_CALLS_AFTER_NS
    succeeds = (counts["ts_ns"] - counts["interval_ns"] > refused) & (counts["n_seen"] > counts["n_failed"])
    has_memory = (calls["ts_ns"] > refused) & (calls["result"] == 0) & (calls["op"] == Op.ALLOC)
    return bool(
        (rows["ts_ns"] > after).any()
        or (calls["ts_ns"] > after).any()
        or succeeds.any()
        or (code == OUT_OF_MEMORY and has_memory.any())
    )


def _is_answered(trace: Trace, failure: Failure, refused_ns: int) -> bool:
    """Whether a process whose lookups were refused works afterwards, or nothing shows that it could not."""
    calls, rows, counts, events = (
        _of_process(table, failure)
        for table in (trace.calls, trace.collectives, trace.operations, trace.host_events)
    )
    worked = (calls["ts_ns"] > refused_ns) & (calls["result"] == 0) & np.isin(calls["op"], _WORK)
    counted = (counts["ts_ns"] > refused_ns) & np.isin(counts["op"], _WORK)
    counted &= counts["n_seen"] > counts["n_failed"]
    if worked.any() or counted.any() or (rows["ts_ns"] > refused_ns).any():
        return True
    if len(ends := events[events["kind"] == HostKind.EXIT]):
        return not _is_error(int(ends["value"][-1]))
    on_node = trace.collectives["ts_ns"][trace.collectives["node"] == failure.node]
    end_ns = max(on_node.max(initial=0), *trace.ends_ns[failure.node : failure.node + 1], 0)
    return not (on_node > refused_ns).any() or end_ns < refused_ns + _MISSING_NS


def _is_error(status: int) -> bool:
    """Whether a process ended itself with an error: not if it was asked to end, or killed."""
    return status not in (0, BY_SIGNAL + signal.SIGKILL) and status - BY_SIGNAL not in exit_reason.ASK


def _of_process(table: Array, failure: Failure) -> Array:
    return table[(table["node"] == failure.node) & (table["pid"] == failure.pid)]
