"""The verdict on a process that uses a GPU alone."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose import evidence_fields
from stallscope.diagnose.causes import Excess, Explained, explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, VerdictEvidence
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.processes.activity import Activity, activities
from stallscope.diagnose.processes.budget_summary import word
from stallscope.diagnose.processes.fault import Fault
from stallscope.diagnose.processes.process_faults import Candidate, Faults, faults
from stallscope.diagnose.processes.single import (
    CATEGORY_OF,
    Steps,
    command_of,
    is_single,
    loader_workers,
    outermost,
    rows_in_late_steps,
    steps_of,
    steps_of_rounds,
    typical_ns,
)
from stallscope.diagnose.report import text
from stallscope.diagnose.report.conclusion import graded
from stallscope.diagnose.report.evidence import from_counts
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts import without_nccl
from stallscope.diagnose.verdicts._owners import with_owners
from stallscope.events.layout import UNKNOWN, Array, process_keys
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

_ENOUGH_SAMPLES = 30
_NO_ALARM = ("host_sleep", "network_wait", "blocked", "unknown", "driver", "launch_bound")
_MORE_GPU_WORK = "gpu_slow"
"""A step of a process without peers that waits longer for its GPU may have more work for it: an evaluation, if these
steps return with a period.
"""

_IN_CALLS = [category - 1 for category in sorted(set(CATEGORY_OF.values()))]


def report(trace: Trace, *, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on a trace for which is_single()."""
    verdicts: list[Verdict] = []
    benign: list[dict[str, object]] = []
    calls = outermost(trace.calls)
    known = {
        (each.node, each.pid): each for each in without_nccl.with_polling_as_waits(trace, activities(trace))
    }
    all_steps = [*steps_of_rounds(trace)]
    has_rounds = {(steps.node, steps.pid) for steps in all_steps}
    all_steps += [each for each in steps_of(trace, calls) if (each.node, each.pid) not in has_rounds]
    for activity in known.values():
        own_steps = [steps for steps in all_steps if (steps.node, steps.pid) == (activity.node, activity.pid)]
        verdicts += _of_budget(trace, activity, own_steps, limits, usd_per_gpu_hour)
    for steps in all_steps:
        if any(verdict.evidence.pid == steps.pid and verdict.kind == "process" for verdict in verdicts):
            continue
        of_process = known.get((steps.node, steps.pid))
        busy = of_process.gpu_busy if of_process else None
        is_busy = busy is not None and busy >= limits.healthy_gpu_share
        late, remarks = _judged(trace, steps, limits, usd_per_gpu_hour, is_busy=is_busy)
        verdicts = [each for each in verdicts if not (late and each.evidence.pid == steps.pid)] + late
        benign += remarks
    if without_nccl.is_for(trace, list(known.values())):
        verdicts, of_ranks = without_nccl.attributed(trace, list(known.values()), verdicts)
        benign += of_ranks
    counts = _examined(trace, all_steps)
    evidence = from_counts(counts, trace.coverage)
    return Report(
        source=trace.source,
        examined=counts,
        evidence=replace(evidence, n_steps=None) if known and not evidence.n_steps else evidence,
        verdicts=[replace(verdict, summary=text.summary(verdict)) for verdict in verdicts],
        benign=benign + _idle_remarks(list(known.values())) + _first_calls(trace, calls),
    )


def with_processes_alone(
    trace: Trace, whole: Report, limits: Thresholds, usd_per_gpu_hour: float | None
) -> Report:
    """The report on jobs with collectives, with the faults of other processes that use a GPU on these machines.

    Ranks, members of communicators and inference engines are left out. In a hang, a process without a collective may be
    the missing rank.
    """
    is_hang = any(verdict.kind == "hang" for verdict in whole.verdicts)
    if is_hang or not len(trace.collectives) or is_single(trace):
        return whole
    of_jobs = np.concatenate(
        [process_keys(rows) for rows in (trace.collectives, trace.communicators, trace.servers)]
    )
    verdicts = [
        _fault_verdict(trace, activity, named, usd_per_gpu_hour)
        for activity in activities(trace)
        if activity.rank == UNKNOWN and not np.isin(activity.node << 32 | activity.pid, of_jobs)
        if (named := _named(activity, faults(trace, activity, limits), limits))
    ]
    worded = [replace(each, summary=text.summary(each)) for each in with_owners(trace, verdicts)]
    return replace(whole, verdicts=[*whole.verdicts, *graded(worded, whole, limits)])


def _named(activity: Activity, judged: Faults, limits: Thresholds) -> list[Fault]:
    """The faults that are named: if its GPU is busy all the time, no host fault is named."""
    busy = activity.gpu_busy
    if busy is not None and busy >= limits.healthy_gpu_share:
        return [fault for fault in judged.named if fault.is_of_gpu]
    return judged.named


def _of_budget(
    trace: Trace, activity: Activity, steps: list[Steps], limits: Thresholds, usd_per_gpu_hour: float | None
) -> list[Verdict]:
    """The verdict by the time budget: faults, or an inconclusive answer. Empty where the process is healthy."""
    busy = activity.gpu_busy
    judged = faults(trace, activity, limits)
    if named := _named(activity, judged, limits):
        return [_fault_verdict(trace, activity, named, usd_per_gpu_hour)]
    n_steps = max((len(each.length_ns) for each in steps), default=0)
    is_shown = busy is not None and busy >= limits.healthy_gpu_share
    if is_shown or (n_steps >= limits.steady_steps and not judged.uncertain):
        return []
    return [_inconclusive(trace, activity, judged.uncertain, limits)]


def _inconclusive(
    trace: Trace, activity: Activity, uncertain: list[Candidate], limits: Thresholds
) -> Verdict:
    """The answer about a process without peers, known steps and a certain fault: its largest avoidable item."""
    busy = activity.gpu_busy
    item, share = max(
        ((item, share) for item, share in activity.budget.items() if item != "gpu_wait"),
        key=lambda pair: pair[1],
    )
    because = (
        f"no fault reaches {limits.fault_share:.0%} of its time; "
        f"the largest avoidable item of its time budget is {word(item)} ({share:.0%})"
    )
    advice = ["Annotate the steps (stallscope.annotate): slow steps then differ from the others."]
    if uncertain:
        first = uncertain[0]
        because = (
            f"{activity.seconds:.1f} s is too short for a reliable answer: it {first.fault.title}, which costs "
            f"{first.at_least:.0%} to {first.at_most:.0%} of its time"
        )
        if (at_most := activity.gpu_busy_at_most) is not None and busy is not None:
            because += f"; its GPU was busy for {busy:.0%}, at most {at_most:.0%}"
        advice = ["Trace the process for longer.", *advice]
    return Verdict(
        kind="inconclusive",
        summary="",
        ranks=[activity.rank] if activity.rank >= 0 else [],
        nodes=[name] if (name := trace.nodes[activity.node]) else [],
        confidence=0.5,
        abstained_because=f"it has no peers and no known steps, and {because}",
        advice=advice,
        evidence=VerdictEvidence(
            pid=activity.pid,
            command=activity.command,
            largest_item=item,
            share=round(share, 4),
            gpu_busy=None if busy is None else round(busy, 3),
        ),
    )


def _fault_verdict(
    trace: Trace,
    activity: Activity,
    process_faults: list[Fault],
    usd_per_gpu_hour: float | None,
) -> Verdict:
    first = process_faults[0]
    lost_s = first.lost(activity) * activity.seconds
    has_samples = activity.n_samples >= _ENOUGH_SAMPLES or first.is_of_gpu
    return Verdict(
        kind="process",
        summary="",
        ranks=[activity.rank] if activity.rank >= 0 else [],
        nodes=[name] if (name := trace.nodes[activity.node]) else [],
        since_ns=wall_ns(trace, activity.node, activity.begin_ns),
        n_incidents=1,
        causes=[_explained(fault, activity) for fault in process_faults],
        confidence=0.9 if has_samples and activity.gpu_busy is not None else 0.75 if has_samples else 0.6,
        cost=VerdictCost.of(
            lost_s,
            usd_per_gpu_hour,
            is_lower_bound=False,
            observed_ns=(activity.seconds + activity.idle_seconds) * 1e9,
        ),
        advice=first.advice,
        evidence=VerdictEvidence(
            pid=activity.pid,
            command=activity.command,
            share=round(first.share, 4),
            gain_at_most=round(first.gain(activity), 2),
            line=first.line,
            gpu_busy=None if activity.gpu_busy is None else round(activity.gpu_busy, 3),
        ),
    )


def _explained(fault: Fault, activity: Activity) -> Explained:
    named = replace(
        cause(fault.cause), title=fault.title, because=None, advice=lambda _evidence: list(fault.advice)
    )
    evidence = replace(fault.evidence, line=fault.line or None, gain_at_most=round(fault.gain(activity), 2))
    return Explained(named, round(min(fault.share, 1.0), 4), fault.share * activity.seconds * 1e9, evidence)


def _idle_remarks(known: list[Activity]) -> list[dict[str, object]]:
    return [
        {
            "what": (
                f"Process {activity.pid} made no GPU call for {activity.idle_seconds:.1f} s and waited; "
                "its time shares exclude that time"
            )
        }
        for activity in known
        if activity.idle_seconds >= 1
    ]


def _slow_or_more_work(
    trace: Trace, steps: Steps, process: tuple[int, str], evidence: VerdictEvidence
) -> Verdict:
    """The answer about a process that waited longer for its GPU in some steps, which do not return with a period."""
    return Verdict(
        kind="inconclusive",
        summary="",
        ranks=[process[0]] if process[0] >= 0 else [],
        nodes=[name] if (name := trace.nodes[steps.node]) else [],
        confidence=0.5,
        abstained_because=(
            f"it waited longer for its GPU in {evidence.n_late_steps} of {evidence.n_steps} steps, which do not "
            "return with a period: the GPU had more work, or was slower"
        ),
        advice=[
            "Compare the GPU's clocks and throttle reasons in these steps (nvidia-smi -q -d CLOCK,PERFORMANCE)."
        ],
        evidence=replace(evidence, largest_item="gpu_wait"),
    )


def _excess(trace: Trace, steps: Steps, is_late: Array, *, has_loaders: bool) -> Excess:
    """The time ledger of the late steps beyond the median of the other steps. has_loaders: see loader_workers()."""
    other_ns = np.median(steps.spent_ns[~is_late], axis=0) if not is_late.all() else 0.0
    ledger = (steps.spent_ns[is_late] - other_ns).sum(axis=0)
    if has_loaders:
        for category in (Category.ON_CPU, Category.OTHER_OFF, Category.LOCK, Category.NET):
            ledger[Category.CHILD - 1] += max(ledger[category - 1], 0.0)
            ledger[category - 1] = 0.0
    return Excess(
        total_ns=float(np.maximum(ledger, 0).sum()),
        ledger_ns=ledger,
        n_steps=int(is_late.sum()),
        calls=rows_in_late_steps(trace.calls, steps, is_late),
        offcpu=rows_in_late_steps(trace.offcpu, steps, is_late),
        host=rows_in_late_steps(trace.host_events, steps, is_late),
        symbols=trace.symbols,
    )


def _judged(
    trace: Trace, steps: Steps, limits: Thresholds, usd_per_gpu_hour: float | None, *, is_busy: bool
) -> tuple[list[Verdict], list[dict[str, object]]]:
    """The verdicts on the late steps of a process, and the remarks. is_busy: its GPU is busy all the time."""
    step_ns = typical_ns(steps.length_ns)
    is_late = steps.length_ns > limits.late_factor_alone * step_ns + limits.min_late_ns
    late_ns = float(steps.length_ns[is_late].sum())
    if 2 * is_late.sum() > len(is_late):
        return [], []  # a minority is not typical
    if is_late.sum() < limits.min_late_steps or late_ns < limits.moving_time_share * steps.length_ns.sum():
        return [], []
    loaders = loader_workers(trace, steps)
    excess = _excess(trace, steps, is_late, has_loaders=bool(loaders))
    causes = [
        replace(part, evidence=loaders or CauseEvidence()) if part.cause.name == "input_starvation" else part
        for part in explained(excess, limits.cause_share)
    ]
    process = command_of(trace, steps)
    in_calls = float(steps.spent_ns[is_late][:, _IN_CALLS].sum() / max(late_ns, 1))
    evidence = VerdictEvidence(
        pid=steps.pid,
        command=process[1],
        n_late_steps=int(is_late.sum()),
        n_steps=len(steps.length_ns),
        typical_step_ms=round(step_ns / 1e6, 3),
        step_ms_late=round(float(np.median(steps.length_ns[is_late])) / 1e6, 3),
        in_gpu_calls_share=round(in_calls, 4),
    )
    if causes and causes[0].cause.name == _MORE_GPU_WORK:
        period = period_steps(np.flatnonzero(is_late), steps.length_ns[is_late] - step_ns)
        if period is None and not is_busy:
            return [_slow_or_more_work(trace, steps, process, evidence)], []
        what = f"Process {steps.pid} waited longer for its GPU in some steps: its GPU had more work, or was slower"
        return [], [{"what": what} | evidence_fields.as_json(evidence)]
    if not causes or causes[0].cause.name in _NO_ALARM:
        because = f": it {causes[0].title}" if causes else ""
        remark = {"what": f"Process {steps.pid} left its GPU idle in some steps{because}"}
        return [], [remark | evidence_fields.as_json(evidence)]
    cost = VerdictCost.of(
        excess.total_ns / 1e9,
        usd_per_gpu_hour,
        is_lower_bound=True,
        observed_ns=float(steps.length_ns.sum()),
    )
    return [_late_verdict(trace, steps, is_late, causes, evidence=evidence, cost=cost)], []


def _late_verdict(
    trace: Trace,
    steps: Steps,
    is_late: Array,
    causes: list[Explained],
    *,
    evidence: VerdictEvidence,
    cost: VerdictCost,
) -> Verdict:
    rank, _ = command_of(trace, steps)
    late = np.flatnonzero(is_late)
    longer_ns = steps.length_ns - typical_ns(steps.length_ns)
    return Verdict(
        kind="process",
        summary="",
        ranks=[rank] if rank >= 0 else [],
        nodes=[name] if (name := trace.nodes[steps.node]) else [],
        n_late_rounds=len(late),
        n_rounds=len(steps.length_ns),
        late_ms={
            "median": round(float(np.median(longer_ns[late])) / 1e6, 3),
            "max": round(float(longer_ns.max()) / 1e6, 3),
        },
        since_ns=wall_ns(trace, steps.node, int(steps.begin_ns[late[0]])),
        n_incidents=1 + int((np.diff(late) > 1).sum()),
        causes=causes,
        confidence=round(min(0.9, 0.6 + 0.05 * len(late)) * min(1.0, causes[0].share / 0.8), 2),
        cost=cost,
        advice=causes[0].cause.advice(causes[0].evidence),
        evidence=evidence,
    )


def _first_calls(trace: Trace, calls: Array) -> list[dict[str, object]]:
    """Remarks on first calls that took far longer than the later calls: libraries load and compile in them."""
    remarks: list[dict[str, object]] = []
    for key in np.unique(calls[["node", "pid", "symbol"]]):
        same = calls[calls[["node", "pid", "symbol"]] == key]
        later = np.median(same["duration_ns"][1:]) if len(same) > 3 else np.inf
        if same["duration_ns"][0] > max(10 * later, 10e6) and same["op"][0] in (Op.LAUNCH, Op.GRAPH_LAUNCH):
            remarks.append(
                {
                    "what": f"The first {trace.symbols[int(key['symbol'])]} of process {key['pid']} loaded its kernels",
                    "ms": round(float(same["duration_ns"][0]) / 1e6, 1),
                    "later_ms": round(float(later) / 1e6, 3),
                }
            )
    return remarks


def _examined(trace: Trace, all_steps: list[Steps]) -> dict[str, object]:
    spans = [
        (rows["ts_ns"], rows["ts_ns"] + np.maximum(rows["duration_ns"], 0))
        for rows in (trace.calls, trace.offcpu)
    ]
    counts, states = trace.operations, trace.snapshots
    spans += [(counts["ts_ns"] - counts["interval_ns"], counts["ts_ns"]), (states["ts_ns"], states["ts_ns"])]
    begins, ends = (np.concatenate(each) for each in zip(*spans, strict=True))
    return {
        "n_ranks": len(np.unique(np.concatenate([rows[["node", "pid"]] for rows in (trace.calls, counts)]))),
        "n_nodes": len(trace.nodes),
        "n_communicators": len(np.unique(trace.collectives["comm_hash"])),
        "n_rounds": len(trace.collectives),
        "n_steps": sum(len(steps.length_ns) for steps in all_steps),
        "n_calls": len(trace.calls),
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(float(ends.max() - begins.min()) / 1e9, 3) if len(begins) else 0.0,
    }
