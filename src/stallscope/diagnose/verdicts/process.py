"""The verdict on a process that uses a GPU alone."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes import Excess, explained
from stallscope.diagnose.processes.single import (
    CATEGORY_OF,
    Steps,
    command_of,
    loader_workers,
    outermost,
    rows_in_late_steps,
    steps_of,
    steps_of_rounds,
    typical_ns,
)
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import CostSaid, Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import Array
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

_NO_ALARM = ("host_sleep", "network_wait", "blocked", "unknown", "driver", "launch_bound")

_IN_CALLS = [category - 1 for category in sorted(set(CATEGORY_OF.values()))]


def report(trace: Trace, *, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on a trace for which is_single()."""
    verdicts: list[Verdict] = []
    benign: list[dict[str, object]] = []
    calls = outermost(trace.calls)
    by_rounds = steps_of_rounds(trace)
    has_rounds = {(steps.node, steps.pid) for steps in by_rounds}
    by_calls = [one for one in steps_of(trace, calls) if (one.node, one.pid) not in has_rounds]
    all_steps = by_rounds + by_calls
    for steps in all_steps:
        found, remarks = _judged(trace, steps, limits, usd_per_gpu_hour)
        verdicts += found
        benign += remarks
    return Report(
        source=trace.source,
        looked_at=_looked_at(trace, all_steps),
        verdicts=[replace(verdict, summary=text.summary(verdict)) for verdict in verdicts],
        benign=benign + _first_calls(trace, calls),
    )


def _judged(
    trace: Trace, steps: Steps, limits: Thresholds, usd_per_gpu_hour: float | None
) -> tuple[list[Verdict], list[dict[str, object]]]:
    usual_ns = typical_ns(steps.length_ns)
    is_late = steps.length_ns > limits.late_factor_alone * usual_ns + limits.min_late_ns
    late_ns = float(steps.length_ns[is_late].sum())
    if is_late.sum() < limits.min_late_steps or late_ns < limits.moving_time_share * steps.length_ns.sum():
        return [], []
    usual = np.median(steps.spent_ns[~is_late], axis=0) if not is_late.all() else 0.0
    ledger = (steps.spent_ns[is_late] - usual).sum(axis=0)
    loaders = loader_workers(trace, steps)
    if loaders:
        for category in (Category.ON_CPU, Category.OTHER_OFF, Category.LOCK, Category.NET):
            ledger[Category.CHILD - 1] += max(ledger[category - 1], 0.0)
            ledger[category - 1] = 0.0
    excess = Excess(
        total_ns=float(np.maximum(ledger, 0).sum()),
        ledger_ns=ledger,
        n_steps=int(is_late.sum()),
        calls=rows_in_late_steps(trace.calls, steps, is_late),
        offcpu=rows_in_late_steps(trace.offcpu, steps, is_late),
        host=rows_in_late_steps(trace.host_events, steps, is_late),
        symbols=trace.symbols,
    )
    causes = [
        replace(part, evidence=loaders) if part.cause.name == "input_starvation" else part
        for part in explained(excess, limits.cause_share)
    ]
    first = int(np.flatnonzero(is_late)[0])
    process = command_of(trace, steps)
    in_calls = float(steps.spent_ns[is_late][:, _IN_CALLS].sum() / max(late_ns, 1))
    evidence: dict[str, object] = {
        "pid": steps.pid,
        "command": process[1],
        "n_late_steps": int(is_late.sum()),
        "n_steps": len(steps.length_ns),
        "step_ms_usual": round(usual_ns / 1e6, 3),
        "step_ms_late": round(float(np.median(steps.length_ns[is_late])) / 1e6, 3),
        "in_gpu_calls_share": round(in_calls, 4),
    }
    if not causes or causes[0].cause.name in _NO_ALARM:
        because = f", it {causes[0].title}" if causes else ""
        return [], [{"what": f"Process {steps.pid} left its GPU alone at times{because}", **evidence}]
    since = int(steps.begin_ns[first])
    lost_s = excess.total_ns / 1e9
    usd = None if usd_per_gpu_hour is None else lost_s / 3600 * usd_per_gpu_hour
    observed_h = float(steps.length_ns.sum()) / 3.6e12
    verdict = Verdict(
        kind="process",
        summary="",
        ranks=[process[0]] if process[0] >= 0 else [],
        nodes=[name] if (name := trace.nodes[steps.node]) else [],
        n_late_rounds=int(is_late.sum()),
        n_rounds=len(steps.length_ns),
        late_ms={
            "median": round(float(np.median(steps.length_ns[is_late]) - usual_ns) / 1e6, 3),
            "max": round(float(steps.length_ns.max() - usual_ns) / 1e6, 3),
        },
        since_ns=wall_ns(trace, steps.node, since),
        n_incidents=1 + int((np.diff(np.flatnonzero(is_late)) > 1).sum()),
        causes=causes,
        confidence=round(min(0.9, 0.6 + 0.05 * int(is_late.sum())) * min(1.0, causes[0].share / 0.8), 2),
        cost=CostSaid(
            round(lost_s, 3),
            None if usd is None else round(usd, 4),
            None if usd is None or not observed_h else round(usd / observed_h, 4),
            True,
        ),
        advice=causes[0].cause.advice(causes[0].evidence),
        evidence=evidence,
    )
    return [verdict], []


def _first_calls(trace: Trace, calls: Array) -> list[dict[str, object]]:
    """First calls that took far longer than the later ones: libraries load and compile then."""
    said: list[dict[str, object]] = []
    for key in np.unique(calls[["node", "pid", "symbol"]]):
        mine = calls[calls[["node", "pid", "symbol"]] == key]
        later = np.median(mine["duration_ns"][1:]) if len(mine) > 3 else np.inf
        if mine["duration_ns"][0] > max(10 * later, 10e6) and mine["op"][0] in (Op.LAUNCH, Op.GRAPH_LAUNCH):
            said.append(
                {
                    "what": f"The first {trace.symbols[int(key['symbol'])]} of process {key['pid']} loaded its kernels",
                    "ms": round(float(mine["duration_ns"][0]) / 1e6, 1),
                    "later_ms": round(float(later) / 1e6, 3),
                }
            )
    return said


def _looked_at(trace: Trace, all_steps: list[Steps]) -> dict[str, object]:
    times = np.concatenate([trace.calls["ts_ns"], trace.offcpu["ts_ns"]])
    ends = np.concatenate(
        [rows["ts_ns"] + np.maximum(rows["duration_ns"], 0) for rows in (trace.calls, trace.offcpu)]
    )
    return {
        "n_ranks": len(np.unique(trace.calls[["node", "pid"]])),
        "n_nodes": len(trace.nodes),
        "n_communicators": len(np.unique(trace.collectives["comm_hash"])),
        "n_rounds": len(trace.collectives),
        "n_steps": sum(len(steps.length_ns) for steps in all_steps),
        "n_calls": len(trace.calls),
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(float(ends.max() - times.min()) / 1e9, 3) if len(times) else 0.0,
    }
