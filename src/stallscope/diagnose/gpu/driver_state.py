"""Driver state of the GPUs as an explanation of verdicts: why a GPU is slow, shared or faulty.

Driver state only explains existing verdicts. An idle link, a small thermal dip or a power cap on all GPUs raises no
verdict. A clock counts as held down if the driver reports a reason, and if the clock is clearly below the clocks of the
other ranks' GPUs at the same time, or below its own earlier clock.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import known_mean
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.gpu.gpu_differences import LINKS, Compared, Readings, compared
from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CLOCK_REASONS
from stallscope.events.trace import Clock, Trace

_HOLDS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons that hold a clock down. An idle GPU, a user setting and sync boost do not count."""

_HELD_SHARE = 0.5
_CLOCK_SHARE = 0.85
"""Held for half of the time, below this share of the reference: GPUs of one model differ by several per cent."""

_LOWERED_SHARE = 0.95  # of a GPU's own clock before, from which a clock is lower

_READING_NS = 500_000_000  # a reading shows the time before it
_BUSY_PERCENT = 20

_FEW = 0.5  # share of the GPUs up to which a state is not normal for the job

_FAULTS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})
"""Xid errors of memory, links, bus and firmware (NVIDIA's list of Xid errors); 13, 31, 43, 45 come from the program."""

_MPS = b"nvidia-cuda-mps"
"""The Multi-Process Service (server and control) runs kernels of its clients, and none of its own."""

_EVER = 1 << 62


@dataclass(frozen=True)
class _Reason:
    """name: of the cause. evidence: the driver's readings."""

    name: str
    evidence: CauseEvidence


@dataclass(frozen=True)
class _HeldClock:
    """mhz: mean while held. share: of the time."""

    mhz: float
    reasons: list[str]
    share: float


def gpu_by_rank(trace: Trace) -> dict[int, tuple[int, int]]:
    """Node and number of each rank's GPU: the GPU with most of its memory, otherwise its assigned GPU."""
    gpus = {}
    for process in trace.processes:
        if process["rank"] == UNKNOWN:
            continue
        rows = trace.gpu_processes
        of_process = rows[(rows["node"] == process["node"]) & (rows["pid"] == process["pid"])]
        of_process = of_process[(of_process["alive"] == 1) & (of_process["mig"] == UNKNOWN)]
        number = (
            int(of_process["gpu"][np.argmax(of_process["memory_used_bytes"])])
            if len(of_process)
            else int(process["device"])
        )
        if number != UNKNOWN:
            gpus[int(process["rank"])] = (int(process["node"]), number)
    return gpus


def driver_reason(
    trace: Trace, gpus: dict[int, tuple[int, int]], rank: int, verdict: Verdict
) -> _Reason | None:
    if rank not in gpus:
        return None
    node, number = gpus[rank]
    begin_ns, end_ns = _periods(trace, gpus, verdict)[node]
    return (
        _fault(_of(trace.gpus, node, number), begin_ns, end_ns)
        or _foreign(trace, node, number, begin_ns=begin_ns, end_ns=end_ns)
        or _held(trace, gpus, rank, verdict)
    )


def gpu_readings(
    trace: Trace, gpus: dict[int, tuple[int, int]], rank: int, verdict: Verdict
) -> CauseEvidence:
    """The driver's readings of the rank's GPU, compared with other ranks' GPUs of its model at the same time."""
    periods = _periods(trace, gpus, verdict)
    others = sorted(set(gpus.values()) - {gpus[rank]})
    own, *of_others = (_readings(trace, gpu, periods[gpu[0]]) for gpu in (gpus[rank], *others))
    readings = _compared(own, of_others)
    other = readings.other + _clock_limits(own)
    return CauseEvidence(unlike_other_gpus=readings.unlike or None, gpu_readings=other or None)


def _clock_limits(own: Readings) -> list[str]:
    """Whether the driver has limited the clock during a verdict, and why."""
    known = own.during["clock_reasons"][own.during["clock_reasons"] != UNKNOWN]
    if not len(known):
        return []
    names = _hold_reasons(known)
    return [f"clock limited at times by {', '.join(names)}" if names else "clock not limited"]


def link_states(
    trace: Trace, gpus: dict[int, tuple[int, int]], ranks: list[int], verdict: Verdict
) -> list[str]:
    """In which readings of links, and by which hardware errors, the GPUs of some ranks differ from all other GPUs."""
    chosen = {rank: gpus[rank] for rank in ranks if rank in gpus}
    periods = _periods(trace, gpus, verdict)
    others = [
        _readings(trace, gpu, periods[gpu[0]]) for gpu in sorted(set(gpus.values()) - set(chosen.values()))
    ]
    out = []
    for rank, gpu in chosen.items():
        own = _readings(trace, gpu, periods[gpu[0]])
        found, fault = _compared(own, others, LINKS).unlike, _fault(own.rows, *periods[gpu[0]])
        found += [f"Xid {number}" for number in (fault.evidence.xid or [] if fault else [])]
        out += [f"rank {rank}: {'; '.join(found)}"] if found else []
    return out


def _compared(own: Readings, others: list[Readings], columns: Collection[str] | None = None) -> Compared:
    """The readings of a GPU, compared with other GPUs of its model."""
    same_model = [each for each in others if _max_mhz(each.rows) == _max_mhz(own.rows)]
    return compared(own, same_model, columns)


def _readings(trace: Trace, gpu: tuple[int, int], period: tuple[int, int]) -> Readings:
    rows = _of(trace.gpus, *gpu)
    begin_ns, end_ns = period
    counters = trace.gpu_counters
    counters = counters[(counters["node"] == gpu[0]) & (counters["gpu"] == gpu[1])]
    since_ns = counters["ts_ns"] - counters["interval_ns"]
    inside_ns = np.minimum(counters["ts_ns"], end_ns) - np.maximum(since_ns, begin_ns)
    return Readings(rows, *_during(rows, begin_ns, end_ns), counters, np.maximum(inside_ns, 0))


def _max_mhz(rows: Array) -> int:
    return int(rows["sm_max_mhz"].max(initial=UNKNOWN))


def _of(rows: Array, node: int, number: int) -> Array:
    rows = rows[(rows["node"] == node) & (rows["gpu"] == number) & (rows["mig"] == UNKNOWN)]
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _periods(
    trace: Trace, gpus: dict[int, tuple[int, int]], verdict: Verdict | None
) -> dict[int, tuple[int, int]]:
    """Begin and end of a verdict by node, on its clock; all time without a verdict."""
    readings: dict[int, list[Clock]] = {node: [] for node, _ in gpus.values()}
    if verdict is None:
        return dict.fromkeys(readings, (-_EVER, _EVER))
    for clock in trace.clocks:
        if clock.node in readings:
            readings[clock.node].append(clock)
    return {
        node: (_on_node(clocks, verdict.since_ns, -_EVER), _on_node(clocks, verdict.until_ns, _EVER))
        for node, clocks in readings.items()
    }


def _on_node(readings: list[Clock], at_wall_ns: int | None, otherwise: int) -> int:
    if at_wall_ns is None or not readings:
        return otherwise
    nearest = min(readings, key=lambda clock: abs(clock.wall_ns - at_wall_ns))
    return at_wall_ns - nearest.wall_ns + nearest.monotonic_ns


def _fault(rows: Array, begin_ns: int, end_ns: int) -> _Reason | None:
    """A hardware error, up to ten seconds before or after: the driver reports late."""
    near = (rows["ts_ns"] >= begin_ns - 10**10) & (rows["ts_ns"] <= end_ns + 10**10)
    xids = sorted(set(rows["xid"][near].tolist()) & _FAULTS)
    errors = rows["n_ecc_uncorrected"][near & (rows["n_ecc_uncorrected"] != UNKNOWN)]
    grown = int(errors.max() - errors.min()) if len(errors) else 0
    if not xids and not grown:
        return None
    return _Reason("gpu_fault", CauseEvidence(xid=xids or None, uncorrected_memory_errors=grown or None))


def _foreign(trace: Trace, node: int, number: int, *, begin_ns: int, end_ns: int) -> _Reason | None:
    """Other processes on the GPU that are not ranks of the job."""
    ranks = trace.processes[(trace.processes["node"] == node) & (trace.processes["rank"] != UNKNOWN)]["pid"]
    rows = trace.gpu_processes
    rows = rows[(rows["node"] == node) & (rows["gpu"] == number) & ~np.isin(rows["pid"], ranks)]
    arrived = trace.collectives[trace.collectives["node"] == node]["pid"]
    rows = rows[(rows["alive"] == 1) & ~np.isin(rows["pid"], arrived)]
    rows = rows[~np.char.startswith(rows["comm"], _MPS)]
    rows = rows[(rows["ts_ns"] >= begin_ns - 4 * 10**10) & (rows["ts_ns"] <= end_ns)]
    if not len(rows):
        return None
    names = {int(row["pid"]): row["comm"].decode("utf-8", "replace") for row in rows}
    labels = [f"{name} ({pid})" for pid, name in sorted(names.items())]
    return _Reason("gpu_shared", CauseEvidence(also_on_this_gpu=labels[:4]))


def _held(
    trace: Trace, gpus: dict[int, tuple[int, int]], rank: int, verdict: Verdict | None
) -> _Reason | None:
    """A clock that is held down, at the time of the verdict, or for most of the trace without one."""
    periods = _periods(trace, gpus, verdict)
    held = _held_clock(*_during(_of(trace.gpus, *gpus[rank]), *periods[gpus[rank][0]]))
    if held is None:
        return None
    reference = _reference_mhz(trace, gpus, rank, periods)
    if reference is None or held.mhz > _CLOCK_SHARE * reference:
        return None
    return _Reason(
        "gpu_slow",
        CauseEvidence(
            clock_held_by=held.reasons,
            clock_mhz=round(held.mhz),
            typical_mhz=round(reference),
            share_of_time=round(held.share, 3),
        ),
    )


def _held_clock(during: Array, weight: Array) -> _HeldClock | None:
    """The clock while the driver holds it down; None if it does so for less than half of the time of the rows."""
    known = (during["sm_mhz"] != UNKNOWN) & (during["clock_reasons"] != UNKNOWN)
    during, weight = during[known], weight[known]
    if not weight.sum():
        return None
    is_held = (during["clock_reasons"] & _HOLDS) != 0
    share = float(weight[is_held].sum() / weight.sum())
    if share < _HELD_SHARE:
        return None
    mhz = float(np.average(during["sm_mhz"][is_held], weights=weight[is_held]))
    return _HeldClock(mhz, _hold_reasons(during["clock_reasons"][is_held]), share)


def _hold_reasons(clock_reasons: Array) -> list[str]:
    """The reasons that hold a clock down in any of some rows."""
    bits = int(np.bitwise_or.reduce(clock_reasons)) & _HOLDS
    return [name for bit, name in CLOCK_REASONS.items() if bits & bit]


def _reference_mhz(
    trace: Trace, gpus: dict[int, tuple[int, int]], rank: int, periods: dict[int, tuple[int, int]]
) -> float | None:
    """The median clock of the other ranks' GPUs of the same maximum at the time; otherwise the GPU's own earlier clock.

    GPUs of all nodes count, since the GPUs of a whole node may be held down together.
    """
    clocks, rows = [], _of(trace.gpus, *gpus[rank])
    for gpu in gpus.values():
        if gpu == gpus[rank]:
            continue
        of_other = _of(trace.gpus, *gpu)
        if _max_mhz(of_other) != _max_mhz(rows):
            continue
        during, weight = _during(of_other, *periods[gpu[0]])
        is_busy = (during["sm_mhz"] != UNKNOWN) & (during["utilization_percent"] >= _BUSY_PERCENT)
        if weight[is_busy].sum():
            clocks.append(float(np.average(during["sm_mhz"][is_busy], weights=weight[is_busy])))
    if clocks:
        return float(np.median(clocks))
    begin_ns, _ = periods[gpus[rank][0]]
    before = rows[
        (rows["ts_ns"] < begin_ns)
        & (rows["sm_mhz"] != UNKNOWN)
        & (rows["utilization_percent"] >= _BUSY_PERCENT)
    ]
    return float(np.median(before["sm_mhz"])) if len(before) else None


def narrow_links(trace: Trace, gpus: dict[int, tuple[int, int]]) -> dict[int, CauseEvidence]:
    """The ranks whose GPU uses fewer PCIe lanes than it has, while most GPUs use all: the lanes, by rank.

    The generation is lower while a GPU idles, so only the lanes count.
    """
    lanes = {}
    for rank, (node, number) in gpus.items():
        rows = _of(trace.gpus, node, number)
        rows = rows[(rows["pcie_width"] > 0) & (rows["pcie_max_width"] > 0)]
        if len(rows):
            lanes[rank] = int(rows["pcie_width"].max()), int(rows["pcie_max_width"].max())
    narrow = {rank: each for rank, each in lanes.items() if each[0] < each[1]}
    if len(narrow) > _FEW * len(lanes):
        return {}
    return {
        rank: CauseEvidence(pcie_lanes=used, pcie_max_lanes=most) for rank, (used, most) in narrow.items()
    }


def lowered_clocks(trace: Trace, gpus: dict[int, tuple[int, int]], verdict: Verdict) -> dict[int, str]:
    """The ranks whose GPU's clock the driver holds down from a verdict to the last collective, clearly below the clock
    before it: by rank, the clocks and the reasons.
    """
    lowered, periods = {}, _periods(trace, gpus, verdict)
    for rank, gpu in gpus.items():
        rows, (begin_ns, end_ns) = _of(trace.gpus, *gpu), periods[gpu[0]]
        calls_ns = trace.collectives["ts_ns"][trace.collectives["node"] == gpu[0]]
        end_ns = min(end_ns, int(calls_ns.max(initial=-_EVER)) + _READING_NS)
        # A row may be older than the change, and a GPU that idles after the job has a high clock.
        inside = rows[(rows["ts_ns"] >= begin_ns) & (rows["ts_ns"] <= end_ns)]
        inside = inside[inside["utilization_percent"] >= _BUSY_PERCENT]
        held = _held_clock(inside, np.ones(len(inside)))
        before, weight = _during(rows, -_EVER, begin_ns)
        earlier_mhz = known_mean(before["sm_mhz"], weight)
        if held and earlier_mhz and held.mhz <= _LOWERED_SHARE * earlier_mhz:
            lowered[rank] = f"{held.mhz:.0f} MHz instead of {earlier_mhz:.0f}, {', '.join(held.reasons)}"
    return lowered


def held_gpus(trace: Trace, gpus: dict[int, tuple[int, int]]) -> dict[int, CauseEvidence]:
    """The ranks whose GPU's clock is held down for most of the trace, if most ranks' GPUs are not: by rank."""
    held = {}
    for rank in gpus:
        reason = _held(trace, gpus, rank, None)
        if reason:
            held[rank] = reason.evidence
    return held if len(held) <= _FEW * len(gpus) else {}


def _during(rows: Array, begin_ns: int, end_ns: int) -> tuple[Array, Array]:
    """The rows that apply in a period, and the time for which each applies: a row applies until the next row."""
    if not len(rows):
        return rows, np.zeros(0)
    ts = rows["ts_ns"].astype(np.int64)
    until = np.append(ts[1:], max(int(ts[-1]) + 2 * 10**9, min(end_ns, int(ts[-1]) + 30 * 10**9)))
    length = np.minimum(until, end_ns) - np.maximum(ts, begin_ns)
    return rows[length > 0], length[length > 0].astype(np.float64)
