"""CUDA calls that failed: which rank broke first, and how.

A failing call is always recorded. An error that a context does not survive (or a driver that does not fit) is told at
once. Memory that was refused is told only where it was the end of the process: allocators retry, and go on.
The ranks that fail after the first one fail because of it, most of the time: they are told as its victims.
"""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
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


def with_failures(trace: Trace, report: Report) -> Report:
    """The report with a verdict on calls that failed before the others: they come before what follows from them."""
    found = failures(trace)
    ended = [one for one in found if int(one.row["result"]) != OUT_OF_MEMORY or not _goes_on(trace, one)]
    retried = [one for one in found if one not in ended]
    benign = [*report.benign, *(_remark(one) for one in retried)]
    if not ended:
        return replace(report, benign=benign) if retried else report
    return replace(report, verdicts=[_verdict(trace, ended), *report.verdicts], benign=benign)


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
    return sorted(found, key=lambda one: _at(trace, one))


def _at(trace: Trace, one: Failure) -> int:
    """When the call returned: wall time where a clock was recorded."""
    at_ns = int(one.row["ts_ns"] + one.row["duration_ns"])
    return wall_ns(trace, one.node, at_ns) or at_ns


def _goes_on(trace: Trace, one: Failure) -> bool:
    """Whether the process still does something a while after its last refusal."""
    calls, rows = trace.calls, trace.collectives
    mine = calls[(calls["node"] == one.node) & (calls["pid"] == one.pid)]
    refused = mine[mine["result"] == OUT_OF_MEMORY]["ts_ns"].max()
    after = refused + NO_CALLS_AFTER_NS
    arrivals = rows[(rows["node"] == one.node) & (rows["pid"] == one.pid)]["ts_ns"]
    has_memory = (mine["ts_ns"] > refused) & (mine["result"] == 0) & (mine["op"] == Op.ALLOC)
    return bool((arrivals > after).any() or (mine["ts_ns"] > after).any() or has_memory.any())


def _verdict(trace: Trace, ended: list[Failure]) -> Verdict:
    first, *later = ended
    name, words = CODES[int(first.row["result"])]
    function = trace.symbols[int(first.row["symbol"])] if first.row["symbol"] < len(trace.symbols) else ""
    evidence: dict[str, object] = {
        "pid": first.pid,
        "error": int(first.row["result"]),
        "said": words,
        "function": function,
        "n_failed_calls": first.n,
    }
    if int(first.row["result"]) == OUT_OF_MEMORY and first.row["count_bytes"] != UNKNOWN:
        evidence["asked_bytes"] = int(first.row["count_bytes"])
    if later:
        evidence["also_failed_later"] = [
            {
                "rank": one.rank,
                "error": int(one.row["result"]),
                "after_ms": (_at(trace, one) - _at(trace, first)) / 1e6,
            }
            for one in later[:16]
        ]
    verdict = Verdict(
        kind="failure",
        summary="",
        ranks=[first.rank] if first.rank != UNKNOWN else [],
        nodes=[node] if (node := trace.nodes[first.node]) else [],
        since_ns=wall_ns(trace, first.node, int(first.row["ts_ns"])),
        n_incidents=1,
        causes=[Explained(cause(name), 1.0, 0.0, {"error": words, "function": function})],
        confidence=0.95 if not later else 0.85,
        victims=sorted({one.rank for one in later if one.rank not in (UNKNOWN, first.rank)}),
        advice=cause(name).advice({}),
        evidence=evidence,
    )
    return replace(verdict, summary=text.summary(verdict))


def _remark(one: Failure) -> dict[str, object]:
    who = f"Rank {one.rank}" if one.rank != UNKNOWN else f"Process {one.pid}"
    return {"what": f"{who} was refused GPU memory, retried and went on", "n_refusals": one.n}
