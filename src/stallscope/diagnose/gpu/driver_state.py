"""What the drivers tell of the GPUs, laid beside verdicts: why a GPU is slow, shared or broken.

Only a verdict that something else has found is explained, so an idle link, a small thermal dip or a power cap that
all GPUs have raises none. A clock counts as held down when the driver gives a reason that holds it and it is clearly
below those of the other ranks' GPUs at the same time, or below its own before.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CLOCK_REASONS
from stallscope.events.trace import Trace

_HOLDS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons that hold a clock down; an idle GPU's, the user's own and sync boost are none."""

_HELD_SHARE = 0.5
_CLOCK_SHARE = 0.85
"""Held for half of the time, at so little of the usual clock: chips of one model differ by several per cent."""

_FAULTS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})
"""Xid errors of memory, links, bus and firmware (NVIDIA's list of Xid errors); 13, 31, 43, 45 are the program's."""

_EVER = 1 << 62


@dataclass(frozen=True)
class _Told:
    """name: of the cause. evidence: what the driver says, short."""

    name: str
    evidence: dict[str, object]


def gpu_by_rank(trace: Trace) -> dict[int, tuple[int, int]]:
    """Node and number of the GPU of each rank: the one it holds most memory of, else the one it is told to use."""
    found = {}
    for process in trace.processes:
        if process["rank"] == UNKNOWN:
            continue
        rows = trace.gpu_processes
        mine = rows[(rows["node"] == process["node"]) & (rows["pid"] == process["pid"])]
        mine = mine[(mine["alive"] == 1) & (mine["mig"] == UNKNOWN)]
        number = (
            int(mine["gpu"][np.argmax(mine["memory_used_bytes"])]) if len(mine) else int(process["device"])
        )
        if number != UNKNOWN:
            found[int(process["rank"])] = (int(process["node"]), number)
    return found


def driver_reason(
    trace: Trace, gpus: dict[int, tuple[int, int]], rank: int, verdict: Verdict
) -> _Told | None:
    if rank not in gpus:
        return None
    node, number = gpus[rank]
    begin_ns, end_ns = (
        _on_node(trace, node, verdict.since_ns, -_EVER),
        _on_node(trace, node, verdict.until_ns, _EVER),
    )
    rows = _of(trace, node, number)
    return (
        _fault(rows, begin_ns, end_ns)
        or _foreign(trace, node, number, begin_ns=begin_ns, end_ns=end_ns)
        or _held(trace, gpus, rank, rows=rows, begin_ns=begin_ns, end_ns=end_ns)
    )


def _of(trace: Trace, node: int, number: int) -> Array:
    rows = trace.gpus
    rows = rows[(rows["node"] == node) & (rows["gpu"] == number) & (rows["mig"] == UNKNOWN)]
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _on_node(trace: Trace, node: int, at_wall_ns: int | None, otherwise: int) -> int:
    readings = [clock for clock in trace.clocks if clock.node == node]
    if at_wall_ns is None or not readings:
        return otherwise
    nearest = min(readings, key=lambda clock: abs(clock.wall_ns - at_wall_ns))
    return at_wall_ns - nearest.wall_ns + nearest.monotonic_ns


def _fault(rows: Array, begin_ns: int, end_ns: int) -> _Told | None:
    """An error of the hardware, up to some seconds before or after: the driver tells late."""
    near = (rows["ts_ns"] >= begin_ns - 10**10) & (rows["ts_ns"] <= end_ns + 10**10)
    xids = sorted(set(rows["xid"][near].tolist()) & _FAULTS)
    errors = rows["n_ecc_uncorrected"][near & (rows["n_ecc_uncorrected"] != UNKNOWN)]
    grown = int(errors.max() - errors.min()) if len(errors) else 0
    evidence: dict[str, object] = {"xid": xids} if xids else {}
    if grown:
        evidence["uncorrected_memory_errors"] = grown
    return _Told("gpu_fault", evidence) if evidence else None


def _foreign(trace: Trace, node: int, number: int, *, begin_ns: int, end_ns: int) -> _Told | None:
    """Processes on the GPU that are no ranks of the job and were there for long."""
    ranks = trace.processes[(trace.processes["node"] == node) & (trace.processes["rank"] != UNKNOWN)]["pid"]
    rows = trace.gpu_processes
    rows = rows[(rows["node"] == node) & (rows["gpu"] == number) & ~np.isin(rows["pid"], ranks)]
    arrived = trace.collectives[trace.collectives["node"] == node]["pid"]
    rows = rows[(rows["alive"] == 1) & ~np.isin(rows["pid"], arrived)]
    rows = rows[(rows["ts_ns"] >= begin_ns - 4 * 10**10) & (rows["ts_ns"] <= end_ns)]
    if not len(rows):
        return None
    who = {int(row["pid"]): row["comm"].decode("utf-8", "replace") for row in rows}
    said = [f"{name} ({pid})" for pid, name in sorted(who.items())]
    return _Told("gpu_shared", {"also_on_this_gpu": said[:4]})


def _held(
    trace: Trace, gpus: dict[int, tuple[int, int]], rank: int, *, rows: Array, begin_ns: int, end_ns: int
) -> _Told | None:
    """A clock that is held down, at the time of the verdict. rows: of the rank's GPU."""
    mine, weight = _during(rows, begin_ns, end_ns)
    known = (mine["sm_mhz"] != UNKNOWN) & (mine["clock_reasons"] != UNKNOWN)
    mine, weight = mine[known], weight[known]
    if not weight.sum():
        return None
    is_held = (mine["clock_reasons"] & _HOLDS) != 0
    if weight[is_held].sum() < _HELD_SHARE * weight.sum():
        return None
    mhz = float(np.average(mine["sm_mhz"][is_held], weights=weight[is_held]))
    usual = _usual_mhz(trace, gpus, rank, rows=rows, begin_ns=begin_ns, end_ns=end_ns)
    if usual is None or mhz > _CLOCK_SHARE * usual:
        return None
    bits = int(np.bitwise_or.reduce(mine["clock_reasons"][is_held])) & _HOLDS
    reasons = [name for bit, name in CLOCK_REASONS.items() if bits & bit]
    return _Told("gpu_slow", {"clock_held_by": reasons, "clock_mhz": round(mhz), "usual_mhz": round(usual)})


def _usual_mhz(
    trace: Trace, gpus: dict[int, tuple[int, int]], rank: int, *, rows: Array, begin_ns: int, end_ns: int
) -> float | None:
    """The median clock of the other ranks' GPUs of that node at the time; without any, the GPU's own before: rows."""
    node = gpus[rank][0]
    clocks = []
    for other, (there, number) in gpus.items():
        if other == rank or there != node or (there, number) == gpus[rank]:
            continue
        theirs, weight = _during(_of(trace, there, number), begin_ns, end_ns)
        is_busy = (theirs["sm_mhz"] != UNKNOWN) & (theirs["utilization_percent"] >= 20)
        if weight[is_busy].sum():
            clocks.append(float(np.average(theirs["sm_mhz"][is_busy], weights=weight[is_busy])))
    if clocks:
        return float(np.median(clocks))
    before = rows[
        (rows["ts_ns"] < begin_ns) & (rows["sm_mhz"] != UNKNOWN) & (rows["utilization_percent"] >= 20)
    ]
    return float(np.median(before["sm_mhz"])) if len(before) else None


def _during(rows: Array, begin_ns: int, end_ns: int) -> tuple[Array, Array]:
    """Rows that hold in a stretch of time, and for how long each: a row holds until the next one."""
    if not len(rows):
        return rows, np.zeros(0)
    ts = rows["ts_ns"].astype(np.int64)
    until = np.append(ts[1:], max(int(ts[-1]) + 2 * 10**9, min(end_ns, int(ts[-1]) + 30 * 10**9)))
    length = np.minimum(until, end_ns) - np.maximum(ts, begin_ns)
    return rows[length > 0], length[length > 0].astype(np.float64)
