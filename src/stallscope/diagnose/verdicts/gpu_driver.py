"""Verdicts with the reasons that the drivers state for a slow, shared or broken GPU."""

from collections.abc import Mapping
from dataclasses import replace

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.diagnose.gpu.driver_state import (
    driver_reason,
    gpu_by_rank,
    gpu_readings,
    held_gpus,
    link_states,
    lowered_clocks,
    narrow_links,
)
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost
from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

_BROKEN = ("gpu_fault", "device_error")
_OVER_PCIE = ("host_device_copy", "pageable_copy", "gpu_slow")
_RESEAT = "Check the PCIe link of that GPU (nvidia-smi -q -d PCIE): reseat the card or the riser."
_MOST = 0.5  # share of the GPUs from which a state is normal for the job
_CONFIDENCE = 0.7  # a low clock under load is certain, its effect on the job is not measured
_OF_GPU = ("gpu_slow", *_BROKEN)
"""Causes that lie in the GPU."""


def with_gpu_states(trace: Trace, report: Report) -> Report:
    """The report with the state that the drivers report for the GPUs of its verdicts."""
    if not len(trace.gpus):
        return report
    gpus = gpu_by_rank(trace)
    narrow = narrow_links(trace, gpus)
    verdicts = [_with_link(_with_state(trace, gpus, verdict), narrow) for verdict in report.verdicts]
    verdicts = [_with_readings(trace, gpus, verdict) for verdict in verdicts]
    verdicts = [_with_link_states(trace, gpus, verdict) for verdict in verdicts]
    named = {rank for verdict in verdicts for rank in verdict.ranks}
    remarks = [_narrow(rank, lanes) for rank, lanes in narrow.items() if rank not in named]
    return replace(report, verdicts=verdicts, benign=report.benign + remarks)


def held_down(trace: Trace, report: Report) -> list[Verdict]:
    """The verdict on GPUs whose clocks are held down, in a report that names no rank, without GPU times.

    The GPUs' own times would show whether a low clock makes a GPU slower. Without these times, the readings of the
    driver are the only evidence. The others wait in every collective, at most for the share that the clock lacks.
    """
    if not len(trace.gpus) or any(verdict.ranks for verdict in report.verdicts) or not len(trace.collectives):
        return []
    if (trace.collectives["gpu_start_ns"] != UNKNOWN).any():
        return []
    gpus = gpu_by_rank(trace)
    held = held_gpus(trace, gpus)
    if not held:
        return []
    slowest = max(held.values(), key=_lacking)
    part = Explained(cause("gpu_slow"), 1.0, 0.0, slowest)
    seconds = float(report.examined.get("seconds", 0.0))
    most = _lacking(slowest) * seconds * (len(gpus) - len(held))
    verdict = Verdict(
        kind="device",
        summary="",
        ranks=sorted(held),
        nodes=sorted({trace.nodes[gpus[rank][0]] for rank in held}),
        n_incidents=1,
        causes=[part],
        confidence=_CONFIDENCE,
        victims=sorted(set(gpus) - set(held)),
        cost=VerdictCost(0.0, None, None, is_lower_bound=True, at_most_gpu_seconds=round(most, 3)),
        advice=part.cause.advice(slowest),
    )
    return [replace(verdict, summary=text.summary(verdict))]


def _lacking(held: CauseEvidence) -> float:
    """The share of its clock that a GPU lacks, over the whole time."""
    return (1.0 - (held.clock_mhz or 0) / max(held.typical_mhz or 1, 1)) * (held.share_of_time or 1.0)


def _with_link(verdict: Verdict, narrow: Mapping[int, CauseEvidence]) -> Verdict:
    """The verdict on a rank with slow copies, with the lanes of its PCIe link where the link is narrow."""
    if len(verdict.ranks) != 1 or verdict.ranks[0] not in narrow or not verdict.causes:
        return verdict
    first = verdict.causes[0]
    if first.cause.name not in _OVER_PCIE:
        return verdict
    part = replace(first, evidence=merged(first.evidence, narrow[verdict.ranks[0]]))
    return replace(
        verdict, causes=[part, *verdict.causes[1:]], advice=[*part.cause.advice(part.evidence), _RESEAT]
    )


def _with_readings(trace: Trace, gpus: dict[int, tuple[int, int]], verdict: Verdict) -> Verdict:
    """A verdict on one rank's GPU, with the driver's readings of that GPU, compared with the others."""
    if len(verdict.ranks) != 1 or verdict.ranks[0] not in gpus or not verdict.causes:
        return verdict
    first = verdict.causes[0]
    if not first.cause.name.startswith("gpu_"):
        return verdict
    found = gpu_readings(trace, gpus, verdict.ranks[0], verdict)
    part = replace(first, evidence=merged(first.evidence, found))
    return replace(verdict, causes=[part, *verdict.causes[1:]])


def _with_link_states(trace: Trace, gpus: dict[int, tuple[int, int]], verdict: Verdict) -> Verdict:
    """A verdict on a link, with the state of the links of the suspected GPUs."""
    suspects = verdict.evidence.suspects
    if verdict.kind != "link" or not suspects:
        return verdict
    found = link_states(trace, gpus, suspects, verdict)
    return replace(verdict, evidence=replace(verdict.evidence, link_states=found or None))


def _narrow(rank: int, lanes: CauseEvidence) -> dict[str, object]:
    return {
        "what": f"the GPU of rank {rank} uses {lanes.pcie_lanes} of its {lanes.pcie_max_lanes} PCIe lanes",
        "rank": rank,
    }


def _is_of_all(verdict: Verdict) -> bool:
    """Whether the verdict is a slowdown of all ranks, on their GPUs."""
    share = verdict.evidence.host_share
    return verdict.kind == "change" and share is not None and share < 0.5


def _is_of_one(verdict: Verdict) -> bool:
    """Whether the verdict names one rank, with a cause that the state of its GPU may explain better."""
    if len(verdict.ranks) != 1 or not verdict.causes:
        return False
    return verdict.kind in ("device", "hang") or verdict.causes[0].cause.name in _OF_GPU


def _with_state(trace: Trace, gpus: dict[int, tuple[int, int]], verdict: Verdict) -> Verdict:
    if _is_of_all(verdict):
        named = _named(trace, gpus, verdict)
        return _with_lowered_clocks(trace, gpus, verdict) if named is verdict else named
    if not _is_of_one(verdict):
        return verdict
    reason = driver_reason(trace, gpus, verdict.ranks[0], verdict)
    if reason is None:
        return verdict
    first = verdict.causes[0]
    if reason.name != "gpu_fault" and (verdict.kind == "hang" or first.cause.name in _BROKEN):
        return verdict
    why = cause(reason.name)
    parts = [
        Explained(why, first.share, first.excess_ns, merged(first.evidence, reason.evidence)),
        *verdict.causes[1:],
    ]
    named = replace(verdict, causes=parts, advice=why.advice(reason.evidence))
    return replace(named, summary=text.summary(named))


def _with_lowered_clocks(trace: Trace, gpus: dict[int, tuple[int, int]], verdict: Verdict) -> Verdict:
    """The verdict on a slowdown of all ranks, with its reason if the drivers have lowered the clocks of most GPUs."""
    lowered = lowered_clocks(trace, gpus, verdict)
    if len(lowered) <= _MOST * len(gpus):
        return verdict
    rank = min(lowered)
    why = f"the drivers have lowered the clocks of {len(lowered)} of {counted(len(gpus), 'GPU')}"
    named = replace(
        verdict,
        abstained_because=f"{why} (rank {rank}: {lowered[rank]})",
        advice=cause("gpu_throttled").advice(CauseEvidence()),
        evidence=replace(
            verdict.evidence, lowered_clocks=[f"rank {rank}: {lowered[rank]}" for rank in sorted(lowered)]
        ),
    )
    return replace(named, summary=text.summary(named))


def _named(trace: Trace, gpus: dict[int, tuple[int, int]], verdict: Verdict) -> Verdict:
    """The verdict on a slowdown of all ranks: if exactly one GPU has a reason, the others wait for that GPU."""
    slow = [(rank, reason) for rank in gpus if (reason := driver_reason(trace, gpus, rank, verdict))]
    if len(slow) != 1:
        return verdict
    rank, reason = slow[0]
    before, after = verdict.evidence.step_ms_before or 0.0, verdict.evidence.step_ms_after or 0.0
    why = cause(reason.name)
    named = replace(
        verdict,
        kind="device",
        ranks=[rank],
        nodes=[node] if (node := trace.nodes[gpus[rank][0]]) else [],
        victims=sorted(set(gpus) - {rank}),
        cost=verdict.cost.times(1 - 1 / len(gpus)) if verdict.cost else None,
        late_ms={"median": round(after - before, 3), "max": round(after - before, 3)},
        causes=[Explained(why, 1.0, (after - before) * 1e6, reason.evidence)],
        confidence=0.8,
        abstained_because=None,
        advice=why.advice(reason.evidence),
        evidence=replace(verdict.evidence, n_late_steps=verdict.evidence.n_steps),
    )
    return replace(named, summary=text.summary(named))
