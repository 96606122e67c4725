"""Verdicts with the reasons that the drivers state for a slow, shared or broken GPU."""

from dataclasses import replace

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import merged
from stallscope.diagnose.gpu.driver_state import driver_reason, gpu_by_rank
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.events.trace import Trace

_BROKEN = ("gpu_fault", "device_error")
_OF_GPU = ("gpu_slow", *_BROKEN)
"""Causes that lie in the GPU."""


def with_gpu_states(trace: Trace, report: Report) -> Report:
    """The report with the state that the drivers report for the GPUs of its verdicts."""
    if not len(trace.gpus) or not any(_is_of_all(v) or _is_of_one(v) for v in report.verdicts):
        return report
    gpus = gpu_by_rank(trace)
    return replace(report, verdicts=[_with_state(trace, gpus, verdict) for verdict in report.verdicts])


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
        return _named(trace, gpus, verdict)
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
